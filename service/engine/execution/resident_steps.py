"""The next steps of few live streams, in a kernel that stays on the device between them."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import torch

from service.engine.batch import Batch
from service.engine.batching.state_slots import Numbers
from service.engine.execution.in_flight import Array, BatchArrays, InFlightBatch
from service.engine.execution.staging import VALUES_OF, write_offsets
from service.ipc.messages.inference import FEATURES
from service.modeling.encoder import Encoder

RESIDENT = "resident"
"""How its batches run, as in the metric `batches`."""
MOST_STEPS = 4
"""Steps of a batch. The kernel runs them in turn, and up to this number takes no longer than the launch of a graph."""


class ResidentSteps:
    """Runs the steps of a model in turn, and waits for each.

    While the kernel stays, nothing else may run on the device or use the model's states: `stop` ends it. The next batch starts it again.
    """

    def __init__(self, encoder: Encoder) -> None:
        """Compile the kernel on the allocated states; raises ContractError for a model that it does not run."""
        self._encoder = encoder
        self._kernel = encoder.resident()

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch has a few next steps, at least one in each row, and returns answers alone."""
        if batch.whole or batch.tokens > MOST_STEPS or batch.returns_embedding or batch.returns_sequence:
            return False
        return all(block.shortest and not block.returns.state for block in batch.blocks)

    def run(self, batch: Batch, predicted: float) -> InFlightBatch:
        """Run a batch; raises RuntimeError if the device does not answer."""
        began = time.monotonic()
        data = np.frombuffer(bytearray().join(map(VALUES_OF, batch.blocks)), FEATURES)
        vectors = self._kernel.vectors(torch.from_numpy(data.reshape(batch.tokens, -1)))
        offsets = np.zeros(batch.rows + 1, np.int32)
        write_offsets(batch, offsets)
        staged = time.monotonic()
        arrays = self._answers(self._logits(batch, vectors, offsets), offsets)
        return InFlightBatch(batch, offsets, arrays, predicted, began, staged, time.monotonic(), by=RESIDENT)

    def stop(self) -> None:
        """End the kernel if it runs, and wait until it has ended."""
        self._kernel.stop()

    def _logits(self, batch: Batch, vectors: Array, offsets: Numbers) -> Array:
        """Return the scores of the head's linear layer after each step, (tokens, outputs)."""
        assert batch.read_slots is not None and batch.write_slots is not None
        logits = []
        for (first, end), before, after in zip(pairwise(offsets.tolist()), batch.read_slots, batch.write_slots, strict=True):
            slots = before, *[after] * (end - first - 1)
            logits += [self._kernel.step(vectors[first + n], slot, after) for n, slot in enumerate(slots)]
        return np.stack(logits)

    def _answers(self, logits: Array, offsets: Numbers) -> BatchArrays:
        """Return the answers of the head: for each step, or for the last step of each row."""
        lines = logits if self._encoder.spec.answers_steps else logits[offsets[1:] - 1]
        head = self._encoder.answers(torch.from_numpy(lines), torch.from_numpy(offsets))
        scores, picks = (None if array is None else array.numpy() for array in (head.scores, head.picks))
        return BatchArrays(scores, picks, None, None, None, head.per_step)
