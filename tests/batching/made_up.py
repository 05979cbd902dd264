"""Chunks and requests in a few words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.engine.turn import Chunk
from service.sequence import IDS, ModelKey, Request, Returns

MODEL = ModelKey("words", "1")
OTHER = ModelKey("sensors", "1")
PLAIN = Returns()


def chunks(*steps: int, owner: object = None) -> list[Chunk]:
    return [Chunk(b"", one, PLAIN, owner) for one in steps]


def request(
    lengths: Sequence[int],
    *,
    model: ModelKey = MODEL,
    deadline: float = 1e9,
    priority: int = 0,
    returns: Returns = PLAIN,
) -> Request:
    return Request(model.name, model.version, list(lengths), deadline, sent=0.0, priority=priority, returns=returns)


def ids(sequences: Sequence[Sequence[int]]) -> bytes:
    """Sequences of token ids as a front sends them."""
    return b"".join(np.array(one, IDS).tobytes() for one in sequences)
