"""A batch: the blocks and chunks that the engine runs together. Plain values, without a tensor library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.ipc.messages.inference import Returns
from service.ipc.messages.models import ModelKey


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

    @property
    def whole(self) -> bool:
        return self.read_slot == ZERO_SLOT and self.write_slot == DISCARD_SLOT


class Batch:
    """Blocks and chunks of one model that run in one forward pass, at least one. A block has a row for each sequence. Blocks come first.

    since: when the first of them could have run; formed: when the batcher had chosen them. Both are on the clock of time.monotonic, and
    infinite if unknown.
    rows, tokens: of all of them; longest: steps of the longest row; whole: whether every row is a whole sequence.
    returns_embedding, returns_sequence: whether any of them returns these outputs.
    timed: whether an answer to any of them tells how the batch ran.
    """

    __slots__ = (
        "blocks",
        "chunks",
        "formed",
        "longest",
        "model",
        "returns_embedding",
        "returns_sequence",
        "rows",
        "since",
        "timed",
        "tokens",
        "whole",
    )

    def __init__(
        self,
        model: ModelKey,
        chunks: Sequence[Chunk],
        since: float = math.inf,
        blocks: Sequence[QueuedBlock] = (),
        formed: float = math.inf,
    ) -> None:
        self.model = model
        self.chunks = chunks
        self.since = since
        self.formed = formed
        self.blocks = blocks
        parts: list[QueuedBlock | Chunk] = [*blocks, *chunks]
        self.rows = sum([block.sequences for block in blocks]) + len(chunks)
        self.tokens = sum([part.steps for part in parts])
        self.longest = max([part.longest for part in parts])
        self.timed = True in [part.timed for part in parts]
        self.whole = not chunks or False not in [chunk.whole for chunk in chunks]
        self.returns_embedding = True in [part.returns.embedding for part in parts]
        self.returns_sequence = True in [part.returns.sequence for part in parts]
