"""The scores in an answer, by the name of its format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

TOLERANCE = 1e-4
"""Largest difference between two scores that count as equal."""
STREAM_TOLERANCE = 0.01
"""The same for numbers in the answer to a chunk, which the rounding of a state in float16 changes. A wrong chunk changes them by more."""


def _infer(body: bytes, expected: Sequence[float]) -> Sequence[float]:
    """Read an answer of POST /infer."""
    return list(json.loads(body)["outputs"][0]["scores"].values())


def _last_floats(body: bytes, expected: Sequence[float]) -> Sequence[float]:
    """Read the raw scores that end a binary answer and a gRPC message."""
    return struct.unpack_from(f"<{len(expected)}f", body, len(body) - 4 * len(expected))


def _answer(body: bytes, expected: Sequence[float]) -> Sequence[float]:
    """Read no score. Raises ValueError for an answer of POST /infer without outputs."""
    body.index(b'"outputs":')
    return ()


def _session(body: bytes, expected: Sequence[float]) -> Sequence[float]:
    """Read no score: each chunk of a session has other scores. Raises ValueError for an answer without steps of a session."""
    body.index(b'"steps":')
    return ()


def stream(body: bytes, expected: Sequence[float] = ()) -> list[float]:
    """Read the steps of the session, and all numbers of a chunk's answer. Raises ValueError if `expected` has other steps."""
    answer = msgspec.json.decode(body)
    steps = answer["session"]["steps"]
    if expected and steps != expected[0]:
        raise ValueError(f"{steps} steps instead of {expected[0]:g}")
    return [steps, *_numbers(answer["outputs"])]


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in decoded JSON."""
    if isinstance(value, float | int):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


READERS: dict[str, Callable[[bytes, Sequence[float]], Sequence[float]]] = {
    "infer": _infer,
    "last floats": _last_floats,
    "answer": _answer,
    "session": _session,
    "stream": stream,
}


def refusal(status: int, body: bytes) -> str:
    """Return the status of an answer without scores, and the error code where the body has one."""
    try:
        return f"{status} {json.loads(body)['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def agree(scores: Sequence[float], expected: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Return whether the scores are equal within the tolerance, which is relative above 1; NaN never is."""
    pairs = zip(scores, expected, strict=True)
    return len(scores) == len(expected) and all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)
