"""One model's way through a device: its buffers, and what a turn of it is expected to take."""

from __future__ import annotations

import statistics
import time

from kernels.contract import Ragged
from service.engine.batch import Batch
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import OutputCollector
from service.engine.execution.in_flight import BatchArrays, InFlightBatch
from service.engine.execution.staging import Staging
from service.ipc.messages import FIRST
from service.modeling.encoder import Encoder, Encoding

TRIED_STEPS = 16
"""Of a row, where warm-up measures what steps cost."""
TRIALS = 3


class ModelRunner:
    """Runs turns at once, as on a CPU: whoever launches one has waited for it."""

    why: str | None = None
    """What kept turns out of graphs, where there are such."""

    def __init__(
        self, encoder: Encoder, *, max_batch_sequences: int, max_batch_tokens: int, slots: int, places: int = 1
    ) -> None:
        shape = encoder.spec.input
        self.encoder = encoder
        if encoder.streams:
            encoder.remember(FIRST + slots)
        tokens = max(max_batch_tokens, shape.max_steps)
        self._staging = Staging(max_batch_sequences, tokens, shape.features, encoder.device, places)
        steps = max(min(TRIED_STEPS, shape.max_steps), encoder.spec.min_steps)
        self.cost = _measured(encoder, rows=max_batch_sequences, steps=steps, tokens=tokens)

    @property
    def graphs(self) -> int:
        """How many sizes of turns are captured."""
        return 0

    def predicted_seconds(self, batch: Batch) -> float:
        return self.cost.of(batch.longest, batch.tokens)

    @property
    def streams(self) -> bool:
        """Whether a sequence may come in chunks."""
        return self.encoder.streams

    def _encoded(self, rows: int, tokens: int, *, sequence: bool = False, whole: bool = True) -> tuple[Ragged, Encoding]:
        """What was laid last, as the encoder takes it, and what it gives; whole: every row begins and ends in it."""
        ragged = self._staging.ragged(rows, tokens)
        places = None if whole else self._staging.places(rows)
        return ragged, self.encoder(ragged, sequence=sequence, places=places)

    def launch(self, batch: Batch, place: OutputCollector | None = None) -> InFlightBatch:
        """Whatever the model raises passes through."""
        began = time.monotonic()
        ends = self._staging.lay(batch)
        staged = time.monotonic()
        encoding = self._encoded(batch.rows, batch.tokens, sequence=batch.returns_sequence, whole=batch.whole)[1]
        return InFlightBatch(batch, ends, _on_host(encoding), self.predicted_seconds(batch), began, staged, time.monotonic())


def _measured(encoder: Encoder, rows: int, steps: int, tokens: int) -> Cost:
    """One short and one longer row tell the cost of a turn and of a step, many rows what each further token adds.

    Before that every size is tried, on a GPU up to as many tokens as a turn may have: whatever a first batch of a size compiles or makes is
    then there before any caller.
    """
    for size in _doubling(rows):
        encoder.trial(size, steps)
    if encoder.device.type == "cuda":
        for longer in _doubling(max(1, tokens // (rows * steps)))[1:]:
            encoder.trial(rows, min(steps * longer, encoder.spec.input.max_steps))
    longer = max(steps, min(4 * steps, encoder.spec.input.max_steps))
    alone, long, together = (_trial(encoder, *size) for size in ((1, steps), (1, longer), (rows, steps)))
    per_step = max(0.0, long - alone) / (longer - steps) if longer > steps else alone / steps
    return Cost(max(0.0, alone - per_step * steps), per_step, max(0.0, together - alone) / (rows * steps))


def _trial(encoder: Encoder, rows: int, steps: int) -> float:
    """The median of a few."""
    return statistics.median(encoder.trial(rows, steps) for _ in range(TRIALS))


def _on_host(encoding: Encoding) -> BatchArrays:
    verdict = encoding.verdict
    given = (verdict.scores, verdict.picks, verdict.embedding, encoding.sequence)
    scores, picks, embedding, sequence = (None if array is None else array.numpy() for array in given)
    return BatchArrays(scores, picks, embedding, sequence, encoding.offsets.numpy(), verdict.per_step)


def _doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
