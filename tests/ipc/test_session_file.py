"""The reader of exported sessions accepts only the files of an export. Rendezvous hashing places sessions."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from typing import Any

import pytest
import torch

from service.engine.batching import session_state
from service.errors import InvalidRequest
from service.ipc import session_file
from service.ipc.session_file import FORMAT, MAX_HEADER_BYTES, MAX_TENSORS, StateOrigin, StoredTensor
from service.ipc.session_placement import engine_of_session

ORIGIN = StateOrigin("words", "3", "0af" * 10, 7)
METADATA = {"format": FORMAT, "model": "words", "version": "3", "weights": "", "steps": "7"}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MAX_SECONDS = 0.5
"""Processor time for any file. A header of the largest size takes a few milliseconds."""


def file_of(header: Any, data: bytes = b"") -> bytes:
    """Return a file with this header. header: JSON text, or a value to write as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def of_tensors(tensors: dict[str, Any], data: bytes = b"") -> bytes:
    return file_of({"__metadata__": METADATA, **tensors}, data)


def of_metadata(**changes: Any) -> bytes:
    metadata = {name: value for name, value in (METADATA | changes).items() if value is not None}
    return file_of({"__metadata__": metadata, "a": ROW}, bytes(8))


def refusal(data: bytes) -> str:
    """Return the message with which a file is refused."""
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="is not the state of a session") as raised:
        session_file.read(data)
    assert time.process_time() - began < MAX_SECONDS
    return raised.value.message


def test_exported_state_is_read() -> None:
    state = {
        "0.0.hidden": torch.arange(3.0),
        "0.0.left": torch.ones(2, 3, dtype=torch.bfloat16),
        "1.0.left": torch.zeros(0, 3),
        "pool.steps": torch.ones(1, dtype=torch.float16),
    }
    file = session_file.read(session_state.pack(state, ORIGIN))
    assert file.origin == ORIGIN
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    unpacked = session_state.unpack(file.tensors, file.data, state)
    assert all(unpacked[name].equal(tensor) and unpacked[name].dtype == tensor.dtype for name, tensor in state.items())


def test_state_becomes_that_of_the_model() -> None:
    """Values are converted to its precision, and shapes are compared before anything is allocated."""
    exported = session_file.read(session_state.pack({"a": torch.tensor([1.5, 1e4], dtype=torch.float16)}, ORIGIN))
    unpacked = session_state.unpack(exported.tensors, exported.data, {"a": torch.zeros(2)})
    assert unpacked["a"].dtype == torch.float32 and unpacked["a"].tolist() == [1.5, 1e4]
    beyond = session_file.read(session_state.pack({"a": torch.tensor([1e30])}, ORIGIN))
    with pytest.raises(InvalidRequest, match="not finite"):
        session_state.unpack(beyond.tensors, beyond.data, {"a": torch.zeros(1, dtype=torch.float16)})
    without_data = {"a": StoredTensor("F32", (1 << 20, 1 << 20), (0, 1 << 42))}
    with pytest.raises(InvalidRequest, match="do not match the model"):
        session_state.unpack(without_data, b"", {"a": torch.zeros(2)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 9) + b"{}",
        file_of(b""),
        file_of(b"\xff\xfe"),
        file_of(b"[]"),
        file_of(b"{" * (MAX_HEADER_BYTES - 1)),
        file_of(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        file_of(b"9" * (MAX_HEADER_BYTES - 1)),
        file_of(b" " * (MAX_HEADER_BYTES + 1)),
        of_tensors({"a": EMPTY | {"more": 1}}),
        of_tensors({"a": {"dtype": "F32", "shape": [0]}}),
        of_tensors({"a": EMPTY | {"shape": [0, 1 << 62, 1 << 62]}}),
        of_tensors({"a": EMPTY | {"shape": [0] * 5}}),
        of_tensors({"a": EMPTY | {"shape": [-1]}}),
        of_tensors({"a": EMPTY | {"shape": [10**400]}}),
        of_tensors({"a": EMPTY | {"dtype": "I64"}}),
        of_tensors({"A b": EMPTY}),
        of_tensors({"a" * 65: EMPTY}),
        of_tensors({f"{number}": 0 for number in range(MAX_TENSORS + 1)}),
        of_tensors({"a": ROW}, bytes(7)),
        of_tensors({"a": ROW}, bytes(9)),
        of_tensors({"a": ROW, "b": ROW | {"data_offsets": [4, 12]}}, bytes(12)),
        of_tensors({"a": ROW, "b": ROW | {"data_offsets": [12, 20]}}, bytes(20)),
        of_tensors({"a": ROW | {"data_offsets": [8, 0]}}, bytes(8)),
        of_tensors({"a": ROW | {"shape": [3]}}, bytes(8)),
        file_of(b'{"__metadata__":%b,"a":%b,"a":%b}' % (*(json.dumps(x).encode() for x in (METADATA, ROW, ROW)),), bytes(8)),
        of_metadata(format="seqserve state 2"),
        of_metadata(more="1"),
        of_metadata(model="a" * 129),
        of_metadata(model="words\n"),
        of_metadata(version="one"),
        of_metadata(weights="0" * 65),
        of_metadata(steps="0"),
        of_metadata(steps="9" * 19),
        of_metadata(steps="\u0667"),
        of_metadata(steps=7),
    ],
)
def test_other_bytes_are_refused_with_a_short_message(data: bytes) -> None:
    message = refusal(data)
    assert message.isascii() and len(message) < 400 and message.endswith("send the body that GET on this path returned")


def test_damaged_files_are_read_or_refused() -> None:
    data, chance = of_tensors({"a": ROW, "b": ROW | {"data_offsets": [8, 16]}}, bytes(16)), random.Random(0)
    for _ in range(2_000):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            file = session_file.read(bytes(changed))
        except InvalidRequest:
            continue
        assert sum(tensor.size for tensor in file.tensors.values()) == len(file.data)


NAMES = [f"session {number}" for number in range(4000)]


@pytest.mark.parametrize("places", [1, 3])
def test_added_engine_moves_only_its_share(places: int) -> None:
    found = Counter(engine_of_session(name, places) for name in NAMES)
    assert sorted(found) == list(range(places))
    assert max(found.values()) - min(found.values()) < 0.1 * len(NAMES)
    moved = [name for name in NAMES if engine_of_session(name, places) != engine_of_session(name, places + 1)]
    assert len(moved) == pytest.approx(len(NAMES) / (places + 1), rel=0.15)
    assert {engine_of_session(name, places + 1) for name in moved} == {places}


def test_placement_is_stable_across_releases() -> None:
    assert [engine_of_session(name, 4) for name in ("a", "b", "sensor-17", "x" * 128)] == [2, 2, 1, 0]
