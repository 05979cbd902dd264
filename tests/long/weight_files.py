"""Mutated weight files, each either refused or loaded bit by bit: `python -m tests.long.weight_files --size 1000000`.

This module reads the files without the library that the service uses: the header is JSON, and the bytes of the tensors follow it.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.errors import ModelError
from service.modeling import store
from service.modeling.spec import WEIGHTS, ModelSpec
from tests import models

SIZE = 1_000_000
MAX_SECONDS = 1.0
"""Processor time of one file."""
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
    """Changes a valid file at random."""

    def __init__(self, content: bytes, seed: int) -> None:
        self._content = content
        self._header, self._data = split(content)
        self._names = [name for name in self._header if name != "__metadata__"]
        self._chance = random.Random(seed)
        self._mutations: list[Callable[[], bytes]] = [
            self._nothing,
            self._bytes,
            self._bytes_of_the_header,
            self._cut,
            self._longer,
            self._length,
            self._offset,
            self._shape,
            self._dtype,
            self._renamed,
            self._twice,
            self._swapped,
            self._hole,
            self._odd_float,
            self._entry,
        ]

    def mutated(self) -> bytes:
        return self._chance.choice(self._mutations)()

    def _nothing(self) -> bytes:
        return self._content

    def _bytes(self) -> bytes:
        return self._overwritten(0, len(self._content))

    def _bytes_of_the_header(self) -> bytes:
        return self._overwritten(0, len(self._content) - len(self._data))

    def _overwritten(self, begin: int, end: int) -> bytes:
        content = bytearray(self._content)
        for _ in range(self._chance.randint(1, 4)):
            content[self._chance.randrange(begin, end)] = self._chance.randrange(256)
        return bytes(content)

    def _cut(self) -> bytes:
        return self._content[: self._chance.randrange(len(self._content))]

    def _longer(self) -> bytes:
        return self._content + self._chance.randbytes(self._chance.randint(1, 64))

    def _length(self) -> bytes:
        return struct.pack("<Q", self._chance.choice(LENGTHS)) + self._content[8:]

    def _changed(self, change: Callable[[Header, str], object]) -> bytes:
        """Return the file with a change of one tensor's entry."""
        header = json.loads(json.dumps(self._header))
        change(header, self._chance.choice(self._names))
        return joined(header, self._data)

    def _offset(self) -> bytes:
        def change(header: Header, name: str) -> None:
            offsets = header[name]["data_offsets"]
            offsets[self._chance.randrange(2)] = self._chance.choice((*NUMBERS, self._chance.randrange(len(self._data))))

        return self._changed(change)

    def _shape(self) -> bytes:
        def change(header: Header, name: str) -> None:
            shape = header[name]["shape"]
            self._chance.choice(
                (shape.reverse, lambda: shape.append(self._chance.choice(NUMBERS)), lambda: shape.insert(0, 1), shape.clear)
            )()

        return self._changed(change)

    def _dtype(self) -> bytes:
        return self._changed(lambda header, name: header[name].update(dtype=self._chance.choice(DTYPES)))

    def _renamed(self) -> bytes:
        other = self._chance.choice((*self._names, "", "../../etc/passwd", "x" * 300, "\0", "__metadata__"))
        return self._changed(lambda header, name: header.update({other: header.pop(name)}))

    def _twice(self) -> bytes:
        """Name one tensor twice, with the offsets of another in between."""
        name, other = self._chance.sample(self._names, 2)
        text = json.dumps(self._header)[:-1] + f", {json.dumps(name)}: {json.dumps(self._header[other])}}}"
        return joined(text.encode(), self._data)

    def _swapped(self) -> bytes:
        def change(header: Header, name: str) -> None:
            other = self._chance.choice(self._names)
            header[name]["data_offsets"], header[other]["data_offsets"] = (
                header[other]["data_offsets"],
                header[name]["data_offsets"],
            )

        return self._changed(change)

    def _hole(self) -> bytes:
        """Move all tensors behind some unused bytes."""
        header = json.loads(json.dumps(self._header))
        hole = self._chance.randint(1, 64)
        for name in self._names:
            header[name]["data_offsets"] = [offset + hole for offset in header[name]["data_offsets"]]
        return joined(header, bytes(hole) + self._data)

    def _odd_float(self) -> bytes:
        data = bytearray(self._data)
        struct.pack_into("<f", data, 4 * self._chance.randrange(len(data) // 4), self._chance.choice(ODD_FLOATS))
        return joined(self._header, bytes(data))

    def _entry(self) -> bytes:
        return self._changed(lambda header, name: header.update({name: self._chance.choice(NUMBERS)}))


@dataclass
class Report:
    """The outcome of the files: how many were loaded, how many were refused for each reason, and all faults."""

    loaded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0


def wrong_tensor(content: bytes, arrays: dict[str, torch.Tensor]) -> str | None:
    """Return the name of an array that differs from the bytes in the file, or that is not finite."""
    header, data = split(content)
    for name, array in arrays.items():
        begin, end = header[name]["data_offsets"]
        if array.numpy().tobytes() != data[begin:end] or not bool(array.isfinite().all()):
            return name
    return None


def run(folder: Path, spec: ModelSpec, size: int, seed: int = 0) -> Report:
    """Load `size` mutations of the weights in a version folder. Each has the digest that model.toml names."""
    report, content = Report(), (folder / WEIGHTS).read_bytes()
    mutator = Mutator(content, seed)
    for number in range(size):
        mutated = mutator.mutated()
        began = time.thread_time()
        try:
            arrays = store.parse_arrays(folder / WEIGHTS, mutated, spec)
        except ModelError as error:
            report.refused[str(error).removeprefix(str(folder / WEIGHTS))[:24]] += 1
        except BaseException as error:
            report.wrong.append(f"file {number} of seed {seed}: {error!r}")
        else:
            report.loaded += 1
            name = wrong_tensor(mutated, arrays)
            if name is not None:
                report.wrong.append(f"file {number} of seed {seed}: {name} is not what the file holds")
        report.slowest = max(report.slowest, time.thread_time() - began)
    if report.slowest > MAX_SECONDS:
        report.wrong.append(f"a file took {report.slowest:.2f} s")
    return report


def main() -> int:
    """Return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description="Mutated weight files, each either refused or loaded bit by bit.")
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        spec = models.words(Path(root))
        report = run(Path(root) / spec.name / "1", spec, options.size, options.seed)
    print(
        f"{options.size} files: {report.loaded} loaded, {report.refused.total()} refused, the slowest took {report.slowest:.3f} s"
    )
    print(f"{len(report.wrong)} wrong" + "".join(f"\n  {wrong}" for wrong in report.wrong[:20]))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
