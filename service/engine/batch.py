"""A batch: the blocks and chunks that the engine runs together. Plain values, without a tensor library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.ipc.messages.inference import Returns
from service.ipc.messages.models import ModelKey

SEQUENCES_OF = attrgetter("sequences")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The steps of one sequence that run in one batch.

    data: token ids or feature rows as bytes.
    owner: any object; the engine returns it with the result.
    read_slot, write_slot: the state slots from which the chunk continues and to which its state is written. A chunk that is a whole
        sequence reads ZERO_SLOT and writes DISCARD_SLOT.
    timed: whether the answer to its request tells how its batches ran.
    """

    data: bytes | memoryview
    steps: int
    returns: Returns
    owner: Any
    read_slot: int = ZERO_SLOT
    write_slot: int = DISCARD_SLOT
    timed: bool = False

    @property
    def longest(self) -> int:
        return self.steps


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks and chunks of one model that run in one forward pass, at least one. A block has a row for each sequence. Blocks come first.

    since: when the first of them could have run; formed: when the batcher had chosen them. Both are on the clock of time.monotonic, and
    infinite if unknown.
    rows, tokens: of all of them; longest: steps of the longest row; whole: whether every row is a whole sequence.
    returns_embedding, returns_sequence: whether any of them returns these outputs.
    timed: whether an answer to any of them tells how the batch ran.
    """

    model: ModelKey
    chunks: Sequence[Chunk]
    since: float = math.inf
    blocks: Sequence[QueuedBlock] = ()
    formed: float = math.inf
    rows: int = field(init=False)
    tokens: int = 0
    longest: int = 0
    timed: bool = False
    whole: bool = True
    returns_embedding: bool = False
    returns_sequence: bool = False

    def __post_init__(self) -> None:
        self.rows = sum(map(SEQUENCES_OF, self.blocks)) + len(self.chunks)
        parts: list[QueuedBlock | Chunk] = [*self.blocks, *self.chunks]
        for part in parts:
            self.tokens += part.steps
            self.longest = part.longest if part.longest > self.longest else self.longest  # cheaper than `max`
            self.timed |= part.timed
            self.returns_embedding |= part.returns.embedding
            self.returns_sequence |= part.returns.sequence
        for chunk in self.chunks:
            self.whole &= chunk.read_slot == ZERO_SLOT and chunk.write_slot == DISCARD_SLOT
