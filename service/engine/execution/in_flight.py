"""A turn on its way through the device, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from service.engine.batch import Batch, Chunk
from service.engine.execution.device import OutputCollector

Array = NDArray[Any]


class ChunkResult(NamedTuple):
    """One chunk's answer; None is what the head has not, or the caller did not ask for.

    scores: (lines, n) float32 and picks: (lines, m) int32, where a line is the whole chunk or one step; embedding: (1, width);
    sequence: (steps, width); steps: how many came out of the encoder; per_step: whether a line is one step.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: int
    per_step: bool = False


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """What a turn gives, on the host: as in Encoded, of all chunks, with a line for each step or each chunk. offsets: where each chunk's
    steps begin in what is given per step, or None when there are as many as came in. There may be more lines than the turn has.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    offsets: Array | None
    per_step: bool


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A turn that was launched. ends: where each chunk ends in what was laid; arrays: whole once `place` is reached, or at once where there
    is none. predicted: seconds; began, staged, launched: moments on the clock of time.monotonic; by_graph: as one CUDA graph,
    which also computed `padded_tokens` that belong to no chunk.
    """

    batch: Batch
    ends: list[int]
    arrays: BatchArrays
    predicted: float
    began: float
    staged: float
    launched: float
    place: OutputCollector | None = None
    by_graph: bool = False
    padded_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.place is None or self.place.reached()

    def wait(self) -> None:
        if self.place is not None:
            self.place.wait()

    def answers(self) -> list[tuple[Chunk, ChunkResult]]:
        """Chunk by chunk, once the flight has ended; what a caller did not ask for stays behind."""
        batch, arrays = self.batch, self.arrays
        offsets = [0, *self.ends] if arrays.offsets is None else arrays.offsets[: batch.rows + 1].tolist()
        lines = offsets[batch.rows] if arrays.per_step else batch.rows
        scores, picks = self._kept(arrays.scores, lines), self._kept(arrays.picks, lines)
        embedding = self._kept(arrays.embedding, batch.rows) if batch.returns_embedding else None
        sequence = self._kept(arrays.sequence, offsets[batch.rows]) if batch.returns_sequence else None
        parts = []
        for row, (chunk, (begin, end)) in enumerate(zip(batch.chunks, pairwise(offsets), strict=True)):
            own = slice(begin, end) if arrays.per_step else slice(row, row + 1)
            encoded = ChunkResult(
                None if scores is None else scores[own],
                None if picks is None else picks[own],
                embedding[row : row + 1] if embedding is not None and chunk.returns.embedding else None,
                sequence[begin:end] if sequence is not None and chunk.returns.sequence else None,
                end - begin,
                arrays.per_step,
            )
            parts.append((chunk, encoded))
        return parts

    def _kept(self, array: Array | None, lines: int) -> Array | None:
        """So many lines of it, which stay as they are when the place takes another turn."""
        if array is None:
            return None
        return array[:lines] if self.place is None else array[:lines].copy()
