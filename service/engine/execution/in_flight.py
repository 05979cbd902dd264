"""A batch in flight, and the results of its chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from service.engine.batch import Batch, Chunk
from service.engine.execution.device import OutputCollector

Array = NDArray[Any]


class ChunkResult(NamedTuple):
    """The result of one chunk. An array is None if the head does not produce it or the request does not ask for it.

    scores: (lines, n) float32, picks: (lines, m) int32. A line is one step if `per_step`, else the whole chunk.
    embedding: (1, width) float32, sequence: (steps, width) float32.
    steps: how many steps the encoder returned.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: int
    per_step: bool = False


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """The outputs of all chunks of a batch on the host, with the arrays of ChunkResult. They may have more lines than the batch.

    offsets: where the steps of each chunk begin in arrays with a line per step; None if the encoder returns every step.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    offsets: Array | None
    per_step: bool


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A launched batch.

    ends: where each chunk ends in the staged tokens.
    arrays: the outputs; complete when `collector` is, or at once without one.
    predicted: seconds that the batch should take.
    began, staged, launched: moments on the clock of time.monotonic.
    by_graph: whether one CUDA graph ran the batch. The graph also computed `padded_tokens`, which belong to no chunk.
    """

    batch: Batch
    ends: list[int]
    arrays: BatchArrays
    predicted: float
    began: float
    staged: float
    launched: float
    collector: OutputCollector | None = None
    by_graph: bool = False
    padded_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.collector is None or self.collector.complete()

    def wait(self) -> None:
        if self.collector is not None:
            self.collector.wait()

    def results(self) -> list[tuple[Chunk, ChunkResult]]:
        """Return the result of each chunk, once the batch has ended."""
        batch, arrays = self.batch, self.arrays
        offsets = [0, *self.ends] if arrays.offsets is None else arrays.offsets[: batch.rows + 1].tolist()
        lines = offsets[batch.rows] if arrays.per_step else batch.rows
        scores, picks = self._kept(arrays.scores, lines), self._kept(arrays.picks, lines)
        embedding = self._kept(arrays.embedding, batch.rows) if batch.returns_embedding else None
        sequence = self._kept(arrays.sequence, offsets[batch.rows]) if batch.returns_sequence else None
        results = []
        for row, (chunk, (begin, end)) in enumerate(zip(batch.chunks, pairwise(offsets), strict=True)):
            chunk_lines = slice(begin, end) if arrays.per_step else slice(row, row + 1)
            result = ChunkResult(
                None if scores is None else scores[chunk_lines],
                None if picks is None else picks[chunk_lines],
                embedding[row : row + 1] if embedding is not None and chunk.returns.embedding else None,
                sequence[begin:end] if sequence is not None and chunk.returns.sequence else None,
                end - begin,
                arrays.per_step,
            )
            results.append((chunk, result))
        return results

    def _kept(self, array: Array | None, lines: int) -> Array | None:
        """Return the first lines of an array, copied if the next batch overwrites the array."""
        if array is None:
            return None
        return array[:lines] if self.collector is None else array[:lines].copy()


EndObserver = Callable[[InFlightBatch, float], None]
"""Called at the end of each batch, with the moment at which the device had finished it and after its results were split."""
