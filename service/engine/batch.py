"""What the scheduler hands to the engine: which sequences run next, of one model. Plain values, no tensor library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from service.ipc.messages import SCRAP, ZEROS, ModelKey, Returns


@dataclass(frozen=True, slots=True)
class Chunk:
    """The steps of one sequence that run in one turn; `data` are its ids or feature rows as bytes, `owner` is the batcher's.

    source, slot: the places from which the sequence goes on, and where it is kept for its next chunk; a whole sequence begins from ZEROS
    and ends in SCRAP.
    """

    data: bytes | memoryview
    steps: int
    returns: Returns
    owner: Any
    source: int = ZEROS
    slot: int = SCRAP

    @property
    def whole(self) -> bool:
        return self.source == ZEROS and self.slot == SCRAP


@dataclass(frozen=True)
class Batch:
    """Chunks that run together. Never empty, all of one model. since: when the first of them could have run, on the clock of
    time.monotonic, if that is known."""

    model: ModelKey
    chunks: list[Chunk]
    since: float = math.inf

    # Asked for many times a turn, and each a walk over all chunks.

    @cached_property
    def rows(self) -> int:
        return len(self.chunks)

    @cached_property
    def tokens(self) -> int:
        return sum([chunk.steps for chunk in self.chunks])

    @cached_property
    def longest(self) -> int:
        return max([chunk.steps for chunk in self.chunks])

    @cached_property
    def whole(self) -> bool:
        """Whether every sequence begins and ends in it."""
        return all(chunk.whole for chunk in self.chunks)

    @cached_property
    def returns_embedding(self) -> bool:
        return any(chunk.returns.embedding for chunk in self.chunks)

    @cached_property
    def returns_sequence(self) -> bool:
        return any(chunk.returns.sequence for chunk in self.chunks)
