"""What the scheduler hands to the engine: which sequences run next, of one model. Plain values, no tensor library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.sequence import ModelKey, Returns


@dataclass(frozen=True, slots=True)
class Chunk:
    """The steps of one sequence that run in one turn; `data` are its ids or feature rows as bytes, `owner` is the batcher's."""

    data: bytes | memoryview
    steps: int
    returns: Returns
    owner: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """Chunks that run together. Never empty, all of one model."""

    model: ModelKey
    chunks: list[Chunk]

    @property
    def rows(self) -> int:
        return len(self.chunks)

    @property
    def tokens(self) -> int:
        return sum(chunk.steps for chunk in self.chunks)

    @property
    def longest(self) -> int:
        return max(chunk.steps for chunk in self.chunks)
