"""A batch in flight, and the results of its blocks and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch, Chunk
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_slots import DISCARD_SLOT
from service.engine.execution.device import OutputCollector
from service.ipc.blocks import COUNT
from service.ipc.messages.inference import BatchRun, Returns

Array = NDArray[Any]


class ChunkResult(NamedTuple):
    """The result of one chunk. An array is None if the head does not produce it or the request does not ask for it.

    scores: (lines, n) float32, picks: (lines, m) int32. A line is one step if `per_step`, else the whole chunk.
    embedding: (1, width) float32, sequence: (steps, width) float32.
    steps: how many steps the encoder returned.
    finite: whether the outputs and the state that the chunk wrote are finite; True for a chunk that is a whole sequence.
    runs: the batch, if it is timed.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: int
    per_step: bool = False
    finite: bool = True
    runs: Sequence[BatchRun] = ()


class BlockResult(NamedTuple):
    """The result of a block: the arrays of a ChunkResult for all its sequences.

    steps: (sequences,) int32, how many steps the encoder returned of each, as bytes.
    runs: the batch, if it is timed.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: bytes | memoryview
    per_step: bool = False
    runs: Sequence[BatchRun] = ()


FinishedPart = tuple[Chunk, ChunkResult] | tuple[QueuedBlock, BlockResult]


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

    offsets: (rows + 1,) where each row begins in the staged tokens; valid until the buffer is staged again.
    arrays: the outputs; complete when `collector` is, or at once without one.
    predicted: seconds that the batch should take.
    began, staged, launched: moments on the clock of time.monotonic.
    by_graph: whether one CUDA graph ran the batch. The graph also computed `padded_tokens`, which belong to no chunk.
    finite: whether each row has written a finite state, complete with the outputs; None if every row has. A row without a state slot counts
        for nothing here.
    runs: filled with the batch itself at its end, if it is timed. The results share it.
    """

    batch: Batch
    offsets: NDArray[np.int32]
    arrays: BatchArrays
    predicted: float
    began: float
    staged: float
    launched: float
    collector: OutputCollector | None = None
    by_graph: bool = False
    padded_tokens: int = 0
    finite: Array | None = None
    runs: list[BatchRun] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.collector is None or self.collector.complete()

    def wait(self) -> None:
        if self.collector is not None:
            self.collector.wait()

    def results(self) -> list[FinishedPart]:
        """Return the result of each block and chunk, once the batch has ended."""
        batch, arrays = self.batch, self.arrays
        offsets: list[int] = []
        if arrays.per_step or batch.returns_sequence or batch.chunks:
            offsets = (self.offsets if arrays.offsets is None else arrays.offsets[: batch.rows + 1]).tolist()
        lines = offsets[batch.rows] if arrays.per_step else batch.rows
        kept = (
            self._kept(arrays.scores, lines),
            self._kept(arrays.picks, lines),
            self._kept(arrays.embedding, batch.rows) if batch.returns_embedding else None,
            self._kept(arrays.sequence, offsets[batch.rows]) if batch.returns_sequence else None,
        )
        all_finite = batch.whole or self._all_finite(kept)
        results: list[FinishedPart] = []
        first = 0
        for block in batch.blocks:
            end = first + block.sequences
            steps = block.columns.lengths
            if arrays.offsets is not None:
                steps = (arrays.offsets[first + 1 : end + 1] - arrays.offsets[first:end]).astype(COUNT).tobytes()
            slices = self._slices(kept, first, end, offsets, block.returns)
            results.append((block, BlockResult(*slices, steps, arrays.per_step, self.runs)))
            first = end
        for row, chunk in enumerate(batch.chunks, first):
            slices = self._slices(kept, row, row + 1, offsets, chunk.returns)
            finite = all_finite or self._is_finite(row, chunk, slices)
            steps_out = offsets[row + 1] - offsets[row]
            results.append((chunk, ChunkResult(*slices, steps_out, arrays.per_step, finite, self.runs)))
        return results

    def _all_finite(self, outputs: Sequence[Array | None]) -> bool:
        return (self.finite is None or bool(self.finite[: self.batch.rows].all())) and _are_finite(outputs)

    def _is_finite(self, row: int, chunk: Chunk, outputs: Sequence[Array | None]) -> bool:
        """Return whether the outputs of a chunk are finite, and the state that it wrote."""
        state_finite = self.finite is None or chunk.write_slot == DISCARD_SLOT or bool(self.finite[row])
        return state_finite and _are_finite(outputs)

    def _slices(
        self, kept: Sequence[Array | None], first: int, end: int, offsets: list[int], returns: Returns
    ) -> tuple[Array | None, Array | None, Array | None, Array | None]:
        """Return the part of each array that belongs to some rows."""
        scores, picks, embedding, sequence = kept
        rows = slice(first, end)
        steps = slice(offsets[first], offsets[end]) if offsets else rows
        lines = steps if self.arrays.per_step else rows
        return (
            None if scores is None else scores[lines],
            None if picks is None else picks[lines],
            embedding[rows] if embedding is not None and returns.embedding else None,
            sequence[steps] if sequence is not None and returns.sequence else None,
        )

    def _kept(self, array: Array | None, lines: int) -> Array | None:
        """Return the first lines of an array, copied if the next batch overwrites the array."""
        if array is None:
            return None
        return array[:lines] if self.collector is None else array[:lines].copy()


def _are_finite(arrays: Sequence[Array | None]) -> bool:
    return all(array is None or bool(np.isfinite(array).all()) for array in arrays)


EndObserver = Callable[[InFlightBatch, float], None]
"""Called at the end of each batch, with the moment at which the device had finished it and after its results were split."""
