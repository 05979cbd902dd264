"""A batch: the blocks that the engine runs together. Plain values, without a tensor library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from service.engine.batching.request_block import PLAIN, QueuedBlock
from service.engine.batching.state_slots import Numbers
from service.ipc.blocks import COUNT, DEADLINE_BYTES, ID_BYTES, Buffer, Columns
from service.ipc.messages.inference import Returns
from service.ipc.messages.models import ModelKey


class Batch(Struct, eq=False):
    """Blocks of one model that run in one forward pass, at least one. A block has a row for each sequence.

    since: when the first of them could have run; formed: when the batcher had chosen them. Both are on the clock of time.monotonic, and
    infinite if unknown.
    read_slots, write_slots: (rows,) the state slots from which the rows continue, and to which their states are written, in the order of
        the blocks. A row that continues nothing reads ZERO_SLOT, a row that nothing continues writes DISCARD_SLOT. Both are None if every
        row is a whole sequence.
    rows, tokens: of all blocks; longest: steps of the longest row.
    returns_embedding, returns_sequence: whether any of them returns these outputs.
    timed: whether an answer to any of them tells how the batch ran.
    """

    model: ModelKey
    blocks: Sequence[QueuedBlock]
    since: float = math.inf
    formed: float = math.inf
    read_slots: Numbers | None = None
    write_slots: Numbers | None = None
    rows: int = 0
    tokens: int = 0
    longest: int = 0
    timed: bool = False
    returns_embedding: bool = False
    returns_sequence: bool = False

    def __post_init__(self) -> None:
        for block in self.blocks:
            self.rows += block.sequences
            self.tokens += block.steps
            self.longest = block.longest if block.longest > self.longest else self.longest  # cheaper than `max`
            self.timed |= block.timed
            self.returns_embedding |= block.returns.embedding
            self.returns_sequence |= block.returns.sequence

    @property
    def whole(self) -> bool:
        """Whether every row is a whole sequence, and no state is read or kept."""
        return self.read_slots is None


def rows_block(model: ModelKey, lengths: Sequence[int], values: Buffer, returns: Returns = PLAIN) -> QueuedBlock:
    """Return a block of sequences with these lengths that belongs to no frontend. values: of all steps."""
    count = len(lengths)
    ids, deadlines, counts = bytes(ID_BYTES * count), bytes(DEADLINE_BYTES * count), np.ones(count, COUNT).tobytes()
    return QueuedBlock(
        model,
        Columns(ids, deadlines, counts, np.array(lengths, COUNT).tobytes(), values),
        steps=sum(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        deadline=math.inf,
        returns=returns,
    )
