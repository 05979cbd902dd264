"""A batch: the chunks that the engine runs together. Plain values, without a tensor library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.ipc.messages import ModelKey, Returns


@dataclass(frozen=True, slots=True)
class Chunk:
    """The steps of one sequence that run in one batch.

    data: token ids or feature rows as bytes.
    owner: any object; the engine returns it with the result.
    read_slot, write_slot: the state slots from which the chunk continues and to which its state is written. A chunk that is a whole
        sequence reads ZERO_SLOT and writes DISCARD_SLOT.
    """

    data: bytes | memoryview
    steps: int
    returns: Returns
    owner: Any
    read_slot: int = ZERO_SLOT
    write_slot: int = DISCARD_SLOT

    @property
    def whole(self) -> bool:
        return self.read_slot == ZERO_SLOT and self.write_slot == DISCARD_SLOT


@dataclass(frozen=True)
class Batch:
    """One or more chunks of one model that run in one forward pass.

    since: when the first chunk could have run, on the clock of time.monotonic; infinite if unknown.
    """

    model: ModelKey
    chunks: list[Chunk]
    since: float = math.inf

    # Cached: each of these walks over all chunks and is read several times per batch.

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
        """Whether every chunk is a whole sequence."""
        return all(chunk.whole for chunk in self.chunks)

    @cached_property
    def returns_embedding(self) -> bool:
        return any(chunk.returns.embedding for chunk in self.chunks)

    @cached_property
    def returns_sequence(self) -> bool:
        return any(chunk.returns.sequence for chunk in self.chunks)
