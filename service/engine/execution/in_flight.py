"""A batch in flight, and the results of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.batching.state_slots import DISCARD_SLOT
from service.engine.execution.device import OutputCollector
from service.ipc.blocks import COUNT, COUNT_BYTES, Buffer
from service.ipc.messages.inference import BatchRun

Array = NDArray[Any]


class BlockResult(NamedTuple):
    """The result of a block. An array is None if the head does not produce it or the block does not return it.

    scores: (lines, n) float32, picks: (lines, m) int32. A line is one step if `per_step`, else one sequence.
    embedding: (sequences, width) float32, sequence: (steps, width) float32.
    steps: (sequences,) int32, how many steps the encoder returned of each, as bytes.
    runs: the batch, if it is timed.
    session_steps: (requests,) int64, the steps of each session after its chunk. state: the states after each sequence, float32, as bytes.
    is_finite: false for requests with states that led to values that are not finite. They have no arrays.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    steps: Buffer
    per_step: bool = False
    runs: Sequence[BatchRun] = ()
    session_steps: Array | None = None
    state: bytes = b""
    is_finite: bool = True


class FinishedBatch(NamedTuple):
    """A batch that has ended, with the results of its blocks in their order.

    finite: (rows,) bool, whether the outputs of each row and the state that it wrote are finite; None if all are. Not checked in a batch
        of whole sequences.
    """

    batch: Batch
    results: list[BlockResult]
    finite: Array | None


class BatchArrays(Struct, frozen=True, eq=False):
    """The outputs of a whole batch on the host, with the arrays of BlockResult. They may have more lines than the batch.

    offsets: where the steps of each row begin in arrays with a line per step; None if the encoder returns every step.
    """

    scores: Array | None
    picks: Array | None
    embedding: Array | None
    sequence: Array | None
    offsets: Array | None
    per_step: bool


class InFlightBatch(Struct, eq=False):
    """A launched batch.

    offsets: (rows + 1,) where each row begins in the staged tokens; valid until the buffer is staged again.
    arrays: the outputs; complete when `collector` is, or at once without one.
    predicted: seconds that the batch should take.
    began, staged, launched: moments on the clock of time.monotonic.
    by: how the batch ran: as in the metric `batches`. A graph also computed `padded_tokens`, which belong to no row.
    finite_states: whether the slot that each row wrote is finite, complete with the outputs; None if every slot is.
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
    by: str = "launches"
    padded_tokens: int = 0
    finite_states: Array | None = None
    runs: list[BatchRun] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.collector is None or self.collector.complete()

    def wait(self) -> None:
        if self.collector is not None:
            self.collector.wait()

    def results(self) -> list[BlockResult]:
        """Return the result of each block, once the batch has ended."""
        arrays, per_step, runs = self.arrays, self.arrays.per_step, self.runs
        outputs = self._outputs()
        if self.collector is not None:  # the next batch overwrites its arrays
            outputs = [None if array is None else array.copy() for array in outputs]
        scores, picks, embedding, sequence = outputs
        begins: list[int] = self._begins.tolist() if per_step or sequence is not None else []
        steps_out = None if arrays.offsets is None else memoryview(np.diff(self._begins).astype(COUNT).tobytes())
        results: list[BlockResult] = []
        first = 0
        for block in self.batch.blocks:
            end = first + block.sequences
            rows = slice(first, end)
            steps = slice(begins[first], begins[end]) if begins else rows
            lines = steps if per_step else rows
            results.append(
                BlockResult(
                    None if scores is None else scores[lines],
                    None if picks is None else picks[lines],
                    embedding[rows] if embedding is not None and block.returns.embedding else None,
                    sequence[steps] if sequence is not None and block.returns.sequence else None,
                    block.columns.lengths if steps_out is None else steps_out[COUNT_BYTES * first : COUNT_BYTES * end],
                    per_step,
                    runs,
                )
            )
            first = end
        return results

    def finite(self) -> Array | None:
        """Return the `finite` of FinishedBatch, once the batch has ended."""
        batch = self.batch
        if batch.whole:
            return None
        states = None if self.finite_states is None else self.finite_states[: batch.rows]
        scores, _, embedding, sequence = self._outputs()
        if (states is None or states.all()) and all(
            array is None or np.isfinite(array).all() for array in (scores, embedding, sequence)
        ):
            return None
        finite: Array = np.ones(batch.rows, bool) if states is None else states | (batch.write_slots == DISCARD_SLOT)
        returns = [block.returns for block in batch.blocks for _ in range(block.sequences)]
        returned = np.array([(True, row.embedding, row.sequence) for row in returns])
        for column, (array, per_step) in enumerate(((scores, self.arrays.per_step), (embedding, False), (sequence, True))):
            if array is not None:
                wrong = np.flatnonzero(~np.isfinite(array).all(1))
                wrong = self._begins.searchsorted(wrong, "right") - 1 if per_step else wrong
                finite[wrong[returned[wrong, column]]] = False
        return None if finite.all() else finite

    @property
    def _begins(self) -> Array:
        """Where the steps of each row begin in arrays with a line per step, (rows + 1,)."""
        return self.offsets if self.arrays.offsets is None else self.arrays.offsets[: self.batch.rows + 1]

    def _outputs(self) -> list[Array | None]:
        """Return the scores, picks, embedding and sequence without the lines behind the batch; None if no block returns them."""
        batch, arrays = self.batch, self.arrays
        rows, steps = batch.rows, self._begins[-1]
        lines = steps if arrays.per_step else rows
        return [
            None if arrays.scores is None else arrays.scores[:lines],
            None if arrays.picks is None else arrays.picks[:lines],
            arrays.embedding[:rows] if arrays.embedding is not None and batch.returns_embedding else None,
            arrays.sequence[:steps] if arrays.sequence is not None and batch.returns_sequence else None,
        ]


EndObserver = Callable[[InFlightBatch, float], None]
"""Called at the end of each batch, with the moment at which the device had finished it and after its results were split."""
