"""The engine of one device: batches in, results out. Knows nothing of queues, clients or sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice

import numpy as np
import torch

from service.engine.batch import Batch, rows_block
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.cost_model import NEWEST, Cost
from service.engine.execution.device import DeviceLost, memory_counts, raise_if_lost
from service.engine.execution.in_flight import Array, EndObserver, FinishedBatch, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.resident_steps import RESIDENT, ResidentSteps
from service.engine.execution.served_models import IN_FLIGHT, LEAST_SLOTS, PreparedModel, ServedModels
from service.errors import OutOfMemory
from service.ipc.messages.inference import FEATURES, IDS, BatchRun, Returns
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec

LEAD_FACTOR = 1.5
"""The next batch is launched this multiple of the host's launch time before the running batch should end."""

KNOWN_STEPS, KNOWN_STRIDE = 16, 7919
"""Length of the fixed input of a model, and the distance of its token ids, which are taken modulo the vocabulary."""


class DeviceEngine(ServedModels):
    """Runs batches on one device and keeps states. Batches end in the order of their launches.

    All calls come from one thread, except that `prepare` may run in a second thread. Calls raise DeviceLost once the device has failed.
    """

    def __init__(
        self,
        encoders: Mapping[ModelKey, Encoder],
        metrics: Metrics,
        *,
        max_batch_sequences: int,
        max_batch_tokens: int,
        slots: tuple[int, int] = (LEAST_SLOTS, LEAST_SLOTS),
        device: torch.device | None = None,
        place: int = 0,
        resident: bool = False,
        trial: Callable[[ModelKey], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Warm up a model per encoder, in the context `trial`. All encoders are on one device; `device` names it if there are none.

        On a GPU every batch runs on the current stream of this thread (`device.use_device`).
        slots: the fewest and the most state slots per model that sequences hold between batches: see SLOTS_BYTES.
        place: the number of this engine, counted from 0. resident: whether kernels may stay on the device: see ResidentSteps.
        """
        device = next((encoder.device for encoder in encoders.values()), device or torch.device("cpu"))
        limits = {"max_batch_sequences": max_batch_sequences, "max_batch_tokens": max_batch_tokens}
        super().__init__(device, metrics, slots, **limits, resident=resident)
        self._place = place
        self._in_flight: deque[InFlightBatch] = deque()
        self._done: list[FinishedBatch] = []
        self._uncounted: list[tuple[InFlightBatch, float, float, float]] = []
        """Batches that have ended, and are counted when their answers have left: when each ended, when its results were split, and
        `_seen_running` at its end."""
        self._launches = 0
        self._launch_seconds = 0.0
        """Running mean of the host's time from accepting a batch to its launch."""
        self._accepted_at = 0.0
        self._launched_at = 0.0
        self._last_ended = 0.0
        self._seen_running = 0.0
        """When the host last saw that the oldest batch in flight had not ended."""
        self._began_after = 0.0
        """The same moment for the batch that ended last: the batch behind it has begun later."""
        self.busy_seconds = 0.0
        """Time in which the device ran the batches that have ended."""
        self._observer: EndObserver | None = None
        metrics.max_batch_sequences.set(max_batch_sequences)
        runners: dict[ModelKey, ModelRunner] = {}
        for key, encoder in encoders.items():
            with trial(key):
                runners[key] = self._warm_up(encoder)
        largest_bytes = max((runner.largest_bytes() for runner in runners.values()), default=0)
        torch.cuda.empty_cache()  # of the blocks that only warm-up used, so that there is room for the reserved memory
        for key, runner in runners.items():
            self.open(key, PreparedModel(runner, largest_bytes=largest_bytes))

    def cost(self, key: ModelKey) -> Cost:
        """Return the expected cost of a model's batches."""
        return self._served[key].cost

    def predicted_seconds(self, batch: Batch) -> float:
        model = self._served[batch.model]
        return model.correction.seconds(model.runner.predicted_seconds(batch))

    def runs(self, key: ModelKey) -> bool:
        """Return whether a batch of a model is in flight."""
        return any(in_flight.batch.model == key for in_flight in self._in_flight)

    @property
    def running(self) -> tuple[float, float] | None:
        """When the device began its current batch, on the clock of time.monotonic, and the predicted seconds; None without one."""
        if not self._in_flight:
            return None
        in_flight = self._in_flight[0]
        return max(in_flight.launched, self._last_ended), self._predicted(in_flight)

    @property
    def remaining_seconds(self) -> float:
        """Predicted time until the batches in flight end."""
        running = self.running
        if running is None:
            return 0.0
        began, predicted = running
        behind = [self._predicted(in_flight) for in_flight in islice(self._in_flight, 1, None)]
        return max(0.0, began + predicted - time.monotonic()) + sum(behind)

    @property
    def accepts_batch(self) -> bool:
        """Whether to launch a batch now: the device is free, or will be by the time that the host has launched the batch.

        Requests that arrive until then may still join the batch, so a batch is not accepted earlier.
        """
        accepts = not self._in_flight or (
            len(self._in_flight) < IN_FLIGHT and self.remaining_seconds <= LEAD_FACTOR * self._launch_seconds
        )
        if accepts:
            self._accepted_at = time.monotonic()
        return accepts

    def known_answer(self, key: ModelKey) -> list[Array]:
        """Return the arrays of a model's answer to a fixed input. The metrics do not count it. No batch may be in flight.

        Raises OutOfMemory, and DeviceLost if the device does not work any more.
        """
        assert not self._in_flight, "its collector may be in use"
        with self._using_device():
            in_flight = self._start(Batch(key, [_known_question(key, self.spec(key))]))
            in_flight.wait()
            [result] = in_flight.results()
        return [array.copy() for array in (result.scores, result.embedding, result.sequence) if array is not None]

    def launch(self, batch: Batch) -> None:
        """Launch a batch. Waits first for the oldest batch if too many are in flight.

        If the launch raises, the batch will not finish. Raises OutOfMemory if the device has too little memory for the batch,
        DeviceLost if the device does not work any more, and whatever the model raises on the host.
        """
        while len(self._in_flight) >= max(1, len(self._collectors)):
            self._in_flight[0].wait()
            self._collect()
        in_flight = self._start(batch)
        self._launches += 1
        self._in_flight.append(in_flight)
        launch_seconds = in_flight.launched - max(self._accepted_at, self._launched_at)
        self._launch_seconds += NEWEST * (launch_seconds - self._launch_seconds)
        self._launched_at = in_flight.launched

    def _start(self, batch: Batch) -> InFlightBatch:
        collector = self._collectors[self._launches % IN_FLIGHT] if self._collectors else None
        runner = self._served[batch.model].runner
        try:
            resident = self._resident_for(batch, runner)
            return runner.launch(batch, collector) if resident is None else resident.run(batch, runner.predicted_seconds(batch))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device} has no memory for {batch.rows} sequences of {batch.tokens} steps: "
                "retry later, or send shorter sequences",
                retry_after=1,
            ) from error
        except Exception as error:
            with suppress(RuntimeError):
                self.end_resident()
            raise_if_lost(self.device, error)
            raise

    def _resident_for(self, batch: Batch, runner: ModelRunner) -> ResidentSteps | None:
        """Return the resident kernel that runs a batch, if one does. It needs a device without other work."""
        resident = runner.resident
        if resident is not None:
            busy = self._preparing or any(in_flight.collector for in_flight in self._in_flight)
            if busy or not resident.takes(batch):
                resident = None
        if resident is not self._resident:
            self.end_resident()
            self._resident = resident
        return resident

    def finished(self) -> list[FinishedBatch]:
        """Return the batches that ended since the last call; raises DeviceLost if the device failed."""
        self._collect()
        done, self._done = self._done, []
        return done

    def watch(self, observer: EndObserver | None) -> None:
        """Call `observer` at each end of a batch, instead of the previous observer."""
        self._observer = observer

    def count_memory(self) -> None:
        """Update the memory metrics of the device."""
        mallocs, allocations, reserved_bytes = memory_counts(self.device)
        self._metrics.device_mallocs.raise_to(mallocs)
        self._metrics.device_allocations.raise_to(allocations)
        self._metrics.device_reserved_bytes.set(reserved_bytes)

    def _collect(self) -> None:
        """Take the results of the batches that have ended."""
        self.count_ended()
        try:
            while self._in_flight:
                looked = time.monotonic()
                if not self._in_flight[0].ended:
                    self._seen_running = looked
                    return
                in_flight, ended = self._in_flight.popleft(), time.monotonic()
                self._done.append(FinishedBatch(in_flight.batch, in_flight.results(), in_flight.finite()))
                if self._observer is not None:
                    self._observer(in_flight, ended)
                self._uncounted.append((in_flight, ended, time.monotonic(), self._seen_running))
                if in_flight.batch.timed:  # its answers tell what is counted
                    self.count_ended()
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} is lost: {str(error).splitlines()[0]}") from error

    def _predicted(self, in_flight: InFlightBatch) -> float:
        """Return the expected time of the device."""
        return in_flight.predicted * self._served[in_flight.batch.model].correction.factor

    def count_ended(self) -> None:
        """Count the batches that have ended in the metrics, and correct the predictions for their models."""
        for ended in self._uncounted:
            self._count(*ended)
        self._uncounted.clear()

    def close(self, key: ModelKey) -> None:
        self.count_ended()  # while the model is served
        super().close(key)

    def _count(self, in_flight: InFlightBatch, ended: float, split: float, seen_running: float) -> None:
        metrics, batch = self._metrics, in_flight.batch
        computed = in_flight.launched if in_flight.collector is None else ended
        started = min(computed, max(in_flight.staged, self._last_ended))
        # The host's time counts as long as a request waited: the next batch will take it as well.
        labels = batch.model.labels
        began = max(min(batch.since, in_flight.began), self._last_ended)
        device = computed - started, computed - started
        if in_flight.collector is not None:
            # The host sees the ends of batches late, and of two batches perhaps at once.
            latest, earliest = max(in_flight.launched, self._last_ended), max(in_flight.staged, self._began_after)
            device = seen_running - latest, ended - earliest
        model = self._served[batch.model]
        if in_flight.by != RESIDENT:  # its time says nothing of others
            model.correction.observe(in_flight.predicted, computed - began, device)
            model.cost = model.correction.of(model.runner.cost)
        self._last_ended, self._began_after = ended, seen_running
        self.busy_seconds += computed - started
        metrics.batch_sequences.observe(batch.rows, *labels)
        metrics.batch_tokens.observe(batch.tokens, *labels)
        metrics.batches.add(*labels, in_flight.by)
        metrics.tokens.add(*labels, by=batch.tokens)
        metrics.padded_tokens.add(*labels, by=in_flight.padded_tokens)
        metrics.padding_avoided.add(*labels, by=batch.rows * batch.longest - batch.tokens)
        stages = {
            "stage_in": in_flight.staged - min(batch.formed, in_flight.began),
            "device_wait": started - in_flight.staged,
            "compute": computed - started,
            "stage_out": split - computed,
        }
        for stage, seconds in stages.items():
            metrics.stage_seconds.observe_often(seconds, batch.rows, *labels, stage)
        if batch.timed:
            in_flight.runs.append(self._run(in_flight, started, computed, computed + stages["stage_out"]))

    def _run(self, in_flight: InFlightBatch, started: float, computed: float, ended: float) -> BatchRun:
        """Return how a batch ran, from the moments of its stages."""
        batch = in_flight.batch
        return BatchRun(
            engine=self._place,
            device=str(self.device),
            number=self._launches - len(self._in_flight),
            sequences=batch.rows,
            tokens=batch.tokens,
            padded_tokens=in_flight.padded_tokens,
            by=in_flight.by,
            formed=min(batch.formed, in_flight.began),
            staged=in_flight.staged,
            started=started,
            computed=computed,
            ended=ended,
        )


def _known_question(key: ModelKey, spec: ModelSpec) -> QueuedBlock:
    """Return a fixed input of a model, as a whole sequence."""
    steps = max(spec.min_steps, min(KNOWN_STEPS, spec.input.max_steps))
    if spec.input.kind == "features":
        assert spec.input.features is not None
        data = np.sin(np.arange(steps * spec.input.features)).astype(FEATURES)
    else:
        assert spec.input.vocabulary is not None
        data = (np.arange(1, steps + 1) * KNOWN_STRIDE % spec.input.vocabulary).astype(IDS)
    returns = Returns(embedding=spec.head.answer_vector == "embedding", sequence=spec.head.answer_vector == "sequence")
    return rows_block(key, [steps], data.tobytes(), returns)
