"""Runs the batches of one model, and predicts how long they take. This runner is for a CPU; `CudaGraphRunner` extends it for a GPU."""

from __future__ import annotations

import time
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from kernels.ragged import Ragged
from service.engine.batch import Batch
from service.engine.batching.state_slots import FIRST_SLOT, ZERO_SLOT
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import OutputCollector
from service.engine.execution.in_flight import Array, BatchArrays, InFlightBatch
from service.engine.execution.resident_steps import ResidentSteps
from service.engine.execution.staging import Staging
from service.engine.execution.state_check import host_finite_rows
from service.ipc.messages.inference import Answer, AnswerWithoutSteps
from service.modeling.encoder import Encoder, Encoding

TRIAL_STEPS = 16
"""Steps per row in the trials of warm-up."""
TRIALS = 5
"""Runs of each size. The fastest counts: other processes only make a run slower."""
CACHED_VIEWS = 1024
"""How many views of the staging buffer are kept, each for batches of a size in rows and tokens."""


class ModelRunner:
    """Runs each batch to its end when it is launched."""

    fallback_reason: str | None = None
    """Why some batches run without a CUDA graph, on a GPU."""
    resident: ResidentSteps | None = None
    """Runs batches of a few next steps, on a GPU if the model fits."""

    def __init__(
        self, encoder: Encoder, *, max_batch_sequences: int, max_batch_tokens: int, slots: int, in_flight: int = 1
    ) -> None:
        """slots: state slots that sequences may own. in_flight: how many batches may be staged or running at once."""
        shape = encoder.spec.input
        self.encoder = encoder
        self.streams = encoder.streams
        """Whether sequences may run in chunks."""
        self.slots = slots
        if encoder.keeps_states:
            encoder.allocate_states(FIRST_SLOT + slots)
        tokens = max(max_batch_tokens, shape.max_steps)
        self._staging = Staging(max_batch_sequences, tokens, shape.features, encoder.device, in_flight)
        self._views = lru_cache(CACHED_VIEWS)(self._staging.ragged)
        steps = max(min(TRIAL_STEPS, shape.max_steps), encoder.spec.min_steps)
        self.cost = _measure_cost(encoder, rows=max_batch_sequences, steps=steps, tokens=tokens)
        self.without_steps = _answer_without_steps(encoder)
        """The answer to a sequence without steps, None for a model that needs a step."""

    @property
    def graphs(self) -> int:
        """Number of captured CUDA graphs."""
        return 0

    def largest_bytes(self) -> int:
        """Return the device memory to reserve for the largest batches: none on a CPU."""
        return 0

    def predicted_seconds(self, batch: Batch) -> float:
        return self.cost.of(batch.longest, batch.tokens)

    def launch(self, batch: Batch, collector: OutputCollector | None = None) -> InFlightBatch:
        """Run a batch; raises whatever the model raises."""
        began = time.monotonic()
        offsets = self._staging.stage(batch)
        staged = time.monotonic()
        ragged, encoding = self._encode(batch.rows, batch.tokens, sequence=batch.returns_sequence, whole=batch.whole)
        finite = None if batch.write_slots is None else host_finite_rows(self._states, batch.write_slots)
        arrays, predicted = _on_host(encoding, ragged), self.predicted_seconds(batch)
        return InFlightBatch(batch, offsets, arrays, predicted, began, staged, time.monotonic(), finite_states=finite)

    @cached_property
    def _states(self) -> list[Array]:
        return [slab.numpy() for slab in self.encoder.state_numbers()]

    def _encode(self, rows: int, tokens: int, *, sequence: bool = False, whole: bool = True) -> tuple[Ragged, Encoding]:
        """Run the encoder on the staged batch. whole: every row is a whole sequence. Returns the encoder's input and output."""
        views = self._views(rows, tokens)
        ragged = Ragged(views.data, views.offsets)  # with its own lengths: the views show every batch of this size
        slots = None if whole else self._staging.row_slots(rows)
        return ragged, self.encoder(ragged, sequence=sequence, slots=slots)


def _answer_without_steps(encoder: Encoder) -> AnswerWithoutSteps | None:
    encoding = encoder.run_without_steps()
    if encoding is None:
        return None
    head = encoding.head_output
    arrays = {"scores": head.scores, "picks": head.picks, "embedding": head.embedding, "sequence": encoding.sequence}
    if encoder.spec.states:
        arrays["state"] = encoder.state_vectors(np.array([ZERO_SLOT], np.int32))
    on_host = {name: array.cpu() for name, array in arrays.items() if array is not None}
    shapes: dict[str, Any] = {name: tuple(array.shape) for name, array in on_host.items()}
    return AnswerWithoutSteps(Answer(**shapes, steps=[0]), b"".join(array.numpy().tobytes() for array in on_host.values()))


def _measure_cost(encoder: Encoder, rows: int, steps: int, tokens: int) -> Cost:
    """Measure the cost model: a short and a longer row give the cost of a batch and of a step, many rows the cost of a further token.

    Runs every size once before, on a GPU up to the tokens of the largest batch: the first run of a size may compile kernels and allocate.
    """
    for size in _doubling(rows):
        encoder.time_batch(size, steps)
    if encoder.device.type == "cuda":
        for factor in _doubling(max(1, tokens // (rows * steps)))[1:]:
            encoder.time_batch(rows, min(steps * factor, encoder.spec.input.max_steps))
    longer = max(steps, min(4 * steps, encoder.spec.input.max_steps))
    sizes = (1, steps), (1, longer), (rows, steps)
    alone, long, together = (min(encoder.time_batch(*size) for _ in range(TRIALS)) for size in sizes)
    # On a busy machine the short row may take longer. A step is then predicted to take too much time rather than none.
    per_step = (long - alone) / (longer - steps) if long > alone and longer > steps else long / longer
    return Cost(max(0.0, alone - per_step * steps), per_step, max(0.0, together - alone) / (rows * steps))


def _on_host(encoding: Encoding, ragged: Ragged) -> BatchArrays:
    head, offsets = encoding.head_output, None if encoding.offsets is ragged.offsets else encoding.offsets
    arrays = (head.scores, head.picks, head.embedding, encoding.sequence, offsets)
    scores, picks, embedding, sequence, begins = [None if array is None else array.numpy() for array in arrays]
    return BatchArrays(scores, picks, embedding, sequence, begins, head.per_step)


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, and `most` itself."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
