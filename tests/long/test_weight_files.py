"""A million mutated weight files, each of which is refused, or loaded bit by bit.

This module reads the files without the library that the service uses: the header is JSON, and the bytes of the tensors follow it.
"""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.errors import ModelError
from service.modeling import store
from service.modeling.spec import WEIGHTS
from tests import models
from tests.long import scaled
from tests.steady import resident_bytes

SIZE, WARM_UP = 1_000_000, 5_000
MAX_SECONDS, LIMIT_BYTES = 1.0, 64 << 20
"""Processor time of one file, and growth of this process."""
LENGTHS = (0, 1, 7, 8, 99, 1 << 16, 100_000_000, 100_000_001, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
NUMBERS: tuple[Any, ...] = (-1, 0, 1, 3, 7, 1 << 31, 1 << 63, (1 << 64) - 1, 10**30, 0.5, None, "1", [], {})
DTYPES: tuple[Any, ...] = ("F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "I64", "f32", "", None, 7)
ODD_FLOATS = (float("nan"), float("inf"), -float("inf"), 3e38, -0.0, 1e-45)
Header = dict[str, Any]


def joined(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def split(content: bytes) -> tuple[Header, bytes]:
    """Return the header of a file and the bytes behind it."""
    [length] = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


class Mutator:
    """Changes a valid file at random: its bytes, or the entry of a tensor in its header."""

    def __init__(self, content: bytes, seed: int) -> None:
        self._content = content
        self._header, self._data = split(content)
        self._names = [name for name in self._header if name != "__metadata__"]
        self._chance = random.Random(seed)

    def mutated(self) -> bytes:
        return self._of_entries() if self._chance.random() < 0.5 else self._of_bytes(self._chance.randrange(7))

    def _of_bytes(self, way: int) -> bytes:
        chance, content = self._chance, bytearray(self._content)
        if way < 2:  # anywhere, or in the header
            for _ in range(chance.randint(1, 4)):
                content[chance.randrange(len(content) - way * len(self._data))] = chance.randrange(256)
        elif way == 2:
            del content[chance.randrange(len(content)) :]
        elif way == 3:
            content += chance.randbytes(chance.randint(1, 64))
        elif way == 4:
            content[:8] = struct.pack("<Q", chance.choice(LENGTHS))
        elif way == 5:
            place = len(content) - 4 * chance.randint(1, len(self._data) // 4)
            struct.pack_into("<f", content, place, chance.choice(ODD_FLOATS))
        else:  # one tensor is there twice, with the offsets of another in between
            one, other = chance.sample(self._names, 2)
            text = json.dumps(self._header)[:-1] + f", {json.dumps(one)}: {json.dumps(self._header[other])}}}"
            return joined(text.encode(), self._data)
        return bytes(content)

    def _of_entries(self) -> bytes:
        chance, header, hole = self._chance, json.loads(json.dumps(self._header)), b""
        name, other = chance.sample(self._names, 2)
        entry, number = header[name], chance.choice((*NUMBERS, chance.randrange(len(self._data))))
        match chance.randrange(8):
            case 0:
                entry["data_offsets"][chance.randrange(2)] = number
            case 1:
                entry["shape"].insert(chance.choice((0, len(entry["shape"]))), number)
            case 2:
                entry["shape"] = chance.choice((entry["shape"][::-1], []))
            case 3:
                entry["dtype"] = chance.choice(DTYPES)
            case 4:
                header[chance.choice((other, "", "../../etc/passwd", "x" * 300, "\0", "__metadata__"))] = header.pop(name)
            case 5:
                entry["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], entry["data_offsets"]
            case 6:
                header[name] = number
            case _:  # all tensors behind some unused bytes
                hole = bytes(chance.randint(1, 64))
                for each in self._names:
                    header[each]["data_offsets"] = [offset + len(hole) for offset in header[each]["data_offsets"]]
        return joined(header, hole + self._data)


def test_million_mutated_files_are_refused_or_loaded_bit_by_bit(tmp_path: Path, show: Callable[[object], None]) -> None:
    """Each file has the digest that model.toml names."""
    spec = models.words(tmp_path)
    file = tmp_path / spec.name / "1" / WEIGHTS
    mutator, size, loaded, before = Mutator(file.read_bytes(), seed=0), scaled(SIZE), 0, 0
    for number in range(WARM_UP + size):
        before = before or (resident_bytes("self") if number == WARM_UP else 0)
        content, began = mutator.mutated(), time.thread_time()
        try:
            arrays = store.parse_arrays(file, content, spec)
        except ModelError:
            arrays = {}
        assert time.thread_time() - began < MAX_SECONDS, number
        loaded += bool(arrays)
        header, data = split(content) if arrays else ({}, b"")
        for name, array in arrays.items():
            begin, end = header[name]["data_offsets"]
            assert array.numpy().tobytes() == data[begin:end] and bool(array.isfinite().all()), (number, name)
    grown = resident_bytes("self") - before
    show(f"{loaded} of {WARM_UP + size} files loaded, {grown / 2**20:.1f} MiB more")
    assert size // 20 < loaded < size - size // 20
    assert grown <= LIMIT_BYTES
