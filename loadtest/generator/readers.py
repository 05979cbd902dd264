"""The scores in an answer, by the name of its format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence

TOLERANCE = 1e-4
"""Largest difference between two scores that count as equal."""


def _infer(body: bytes, count: int) -> Sequence[float]:
    """Read an answer of POST /infer."""
    return list(json.loads(body)["outputs"][0]["scores"].values())


def _last_floats(body: bytes, count: int) -> Sequence[float]:
    """Read the raw scores that end a binary answer and a gRPC message."""
    return struct.unpack_from(f"<{count}f", body, len(body) - 4 * count)


def _answer(body: bytes, count: int) -> Sequence[float]:
    """Read no score. Raises ValueError for an answer of POST /infer without outputs."""
    body.index(b'"outputs":')
    return ()


def _session(body: bytes, count: int) -> Sequence[float]:
    """Read no score: each chunk of a session has other scores. Raises ValueError for an answer without steps of a session."""
    body.index(b'"steps":')
    return ()


READERS: dict[str, Callable[[bytes, int], Sequence[float]]] = {
    "infer": _infer,
    "last floats": _last_floats,
    "answer": _answer,
    "session": _session,
}


def refusal(status: int, body: bytes) -> str:
    """Return the status of an answer without scores, and the error code where the body has one."""
    try:
        return f"{status} {json.loads(body)['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def agree(scores: Sequence[float], expected: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Return whether the scores are equal within the tolerance; NaN never is."""
    return len(scores) == len(expected) and all(abs(a - b) <= tolerance for a, b in zip(scores, expected, strict=True))
