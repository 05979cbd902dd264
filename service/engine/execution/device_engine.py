"""The engine of one device: batches in, results out. Knows nothing of queues, clients or sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from service.engine.batch import Batch, Chunk
from service.engine.batching.session_state import State
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.execution.cost_model import NEWEST, Correction, Cost
from service.engine.execution.cuda_graph_runner import CudaGraphRunner
from service.engine.execution.device import (
    DeviceLost,
    DeviceMemory,
    OutputCollector,
    StreamPool,
    raise_if_lost,
    reserve_memory,
)
from service.engine.execution.graph_capture import GraphPool, RunBetweenBatches, run_now
from service.engine.execution.in_flight import Array, ChunkResult, EndObserver, FinishedPart, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.errors import OutOfMemory
from service.ipc.messages.inference import FEATURES, IDS, BatchRun, LoadedModel, Returns
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.metrics import Metrics
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec

IN_FLIGHT = 2
"""Batches on a GPU at once: the next batch is launched shortly before the running batch ends."""
COLLECTOR_BYTES = 64 << 20
"""Host memory for the outputs of one batch. Outputs that do not fit are copied while the host waits."""
ARENA_FACTOR = 1.5
"""Reserved memory for batches without a graph, as a multiple of the need of the largest batch: blocks of many sizes leave gaps."""
LEAD_FACTOR = 1.5
"""The next batch is launched this multiple of the host's launch time before the running batch should end."""

KNOWN_STEPS, KNOWN_STRIDE = 16, 7919
"""Length of the fixed input of a model, and the distance of its token ids, which are taken modulo the vocabulary."""


class PreparedModel(NamedTuple):
    """A loaded and warmed-up model. On a GPU: the stream of its preparation, and the memory of its largest batches without a graph."""

    runner: ModelRunner
    stream: torch.cuda.Stream | None = None
    largest_bytes: int = 0


class DeviceEngine:
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
        slots: int = 256,
        device: torch.device | None = None,
        place: int = 0,
        trial: Callable[[ModelKey], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Warm up a model per encoder, in the context `trial`. All encoders are on one device; `device` names it if there are none.

        On a GPU every batch runs on the current stream of this thread (`device.use_device`).
        slots: state slots per model that sequences hold between batches. A launch may use max_batch_sequences more.
        place: the number of this engine, counted from 0.
        """
        self._metrics = metrics
        self._place = place
        self._ended = 0
        """Number of batches that have ended."""
        self._slots = slots, max_batch_sequences
        self._limits: dict[str, Any] = {
            "max_batch_sequences": max_batch_sequences,
            "max_batch_tokens": max_batch_tokens,
            "slots": sum(self._slots),
        }
        self.device = next((encoder.device for encoder in encoders.values()), device or torch.device("cpu"))
        on_gpu = self.device.type == "cuda"
        self._collectors = [OutputCollector(index, COLLECTOR_BYTES) for index in range(IN_FLIGHT)] if on_gpu else []
        self._pool = GraphPool(self.device) if on_gpu else None
        self._streams = StreamPool(self.device)
        self._prepared_on: dict[ModelKey, torch.cuda.Stream] = {}
        self._runners: dict[ModelKey, ModelRunner] = {}
        self._corrections: dict[ModelKey, Correction] = {}
        self._costs: dict[ModelKey, Cost] = {}
        """The costs of the models' batches, as measured at warm-up and corrected by the batches that ran."""
        self._arena_bytes = 0
        self._in_flight: deque[InFlightBatch] = deque()
        self._done: list[FinishedPart] = []
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
        self._memory = DeviceMemory()
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

    # Models.

    def loaded(self) -> list[LoadedModel]:
        """Return the served models and the backends that run them."""
        return [
            LoadedModel(
                name=key.name,
                version=key.version,
                generation=key.generation,
                device=str(runner.encoder.device),
                backends=[f"{layer}: {backend}" for layer, backend in runner.encoder.backends().items()],
                streams=runner.streams,
                without_steps=runner.without_steps,
                **runner.cost._asdict(),
            )
            for key, runner in self._runners.items()
        ]

    def serves(self, key: ModelKey) -> bool:
        return key in self._runners

    def newest(self, name: str, version: str) -> ModelKey | None:
        """Return the newest generation of a model version, None if the version is not served."""
        return max((key for key in self._runners if key.labels == (name, version)), default=None)

    def spec(self, key: ModelKey) -> ModelSpec:
        return self._runners[key].encoder.spec

    def streams(self, key: ModelKey) -> bool:
        """Return whether sequences of a model may run in chunks that continue from a state."""
        return self._runners[key].streams

    def whole_only(self, key: ModelKey) -> tuple[str, ...]:
        """Return the parts of a model for which its sequences must not run in chunks."""
        return self._runners[key].encoder.whole_only

    @property
    def weight_bytes(self) -> int:
        """Weights of all models on the device."""
        return sum(runner.encoder.weight_bytes() for runner in list(self._runners.values()))

    def prepare(self, make: Callable[[], Encoder], run_between_batches: RunBetweenBatches) -> PreparedModel:
        """Warm up a model for `open` in a second thread, while this thread's engine serves others; raises whatever `make` raises."""
        if self._pool is None:
            return PreparedModel(self._warm_up(make()))
        torch.cuda.set_device(self.device)
        stream = self._streams.take()
        try:
            with torch.cuda.stream(stream):
                runner = self._warm_up(make(), run_between_batches)
                largest_bytes = runner.largest_bytes()
                stream.synchronize()
        except BaseException:
            self._streams.put_back(stream)
            raise
        return PreparedModel(runner, stream, largest_bytes)

    def open(self, key: ModelKey, prepared: PreparedModel) -> None:
        """Serve a prepared model from now on."""
        if prepared.stream is not None:
            self._prepared_on[key] = prepared.stream
        arena_bytes = int(ARENA_FACTOR * prepared.largest_bytes)
        if arena_bytes > self._arena_bytes:
            reserve_memory(self.device, arena_bytes)
            self._arena_bytes = arena_bytes
        self._runners[key] = prepared.runner
        self._corrections[key], self._costs[key] = Correction(), prepared.runner.cost
        self._report(key, prepared.runner)

    def close(self, key: ModelKey) -> None:
        """Stop serving a model that has no batch in flight."""
        assert not self.runs(key), f"a batch of {key} is in flight"
        del self._runners[key], self._corrections[key], self._costs[key]
        if key in self._prepared_on:
            self._streams.put_back(self._prepared_on.pop(key))
        if not any(served.labels == key.labels for served in self._runners):
            self._metrics.forget(*key.labels)

    # States.

    def slots(self, key: ModelKey) -> tuple[int, int]:
        """Return how many state slots sequences may hold between batches, and how many more a launch may use."""
        return self._slots

    def save(self, key: ModelKey, slot: int) -> State:
        """Return the state in a slot as a copy on the host, after all launched batches have written it."""
        with self._noticing_loss():
            return self._runners[key].encoder.save(slot)

    def restore(self, key: ModelKey, slot: int, state: State) -> None:
        """Write a state to a slot, for batches launched from now on."""
        with self._noticing_loss():
            self._runners[key].encoder.restore(slot, state)

    def state_vector(self, key: ModelKey, slot: int) -> bytes:
        """Return the model's states in a slot, joined in their order, as float32, after all launched batches have written them."""
        with self._noticing_loss():
            return self._runners[key].encoder.state_vector(slot).numpy().tobytes()

    def state_from(self, key: ModelKey, vector: bytes | memoryview) -> State:
        """Return the state for `restore` with these states, joined in their order, as float32. NaN stands for the usual initial state."""
        numbers = torch.frombuffer(bytearray(vector), dtype=torch.float32)
        return self._runners[key].encoder.state_from(numbers, ZERO_SLOT)

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Raise DeviceLost instead of an error after which the device does not work any more."""
        try:
            yield
        except RuntimeError as error:
            raise_if_lost(self.device, error)
            raise

    # Batches.

    def cost(self, key: ModelKey) -> Cost:
        """Return the expected cost of a model's batches."""
        return self._costs[key]

    def predicted_seconds(self, batch: Batch) -> float:
        return self._corrections[batch.model].seconds(self._runners[batch.model].predicted_seconds(batch))

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
        runner = self._runners[key]
        try:
            with self._noticing_loss():
                batch = Batch(key, [_known_question(runner.encoder.spec)])
                in_flight = runner.launch(batch, self._collectors[0] if self._collectors else None)
                in_flight.wait()
                [(_, result)] = in_flight.results()
                assert isinstance(result, ChunkResult)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{self.device} has no memory for one sequence") from error
        return [array.copy() for array in (result.scores, result.embedding, result.sequence) if array is not None]

    def launch(self, batch: Batch) -> None:
        """Launch a batch. Waits first for the oldest batch if too many are in flight.

        If the launch raises, no chunk of the batch will finish. Raises OutOfMemory if the device has too little memory for the batch,
        DeviceLost if the device does not work any more, and whatever the model raises on the host.
        """
        while len(self._in_flight) >= max(1, len(self._collectors)):
            self._in_flight[0].wait()
            self._collect()
        try:
            in_flight = self._runners[batch.model].launch(
                batch, self._collectors[self._launches % IN_FLIGHT] if self._collectors else None
            )
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device} has no memory for {batch.rows} sequences of {batch.tokens} steps: "
                "retry later, or send shorter sequences",
                retry_after=1,
            ) from error
        except Exception as error:
            raise_if_lost(self.device, error)
            raise
        self._launches += 1
        self._in_flight.append(in_flight)
        launch_seconds = in_flight.launched - max(self._accepted_at, self._launched_at)
        self._launch_seconds += NEWEST * (launch_seconds - self._launch_seconds)
        self._launched_at = in_flight.launched

    def finished(self) -> list[FinishedPart]:
        """Return the blocks and chunks that finished since the last call, with their results; raises DeviceLost if the device failed."""
        self._collect()
        done, self._done = self._done, []
        return done

    def watch(self, observer: EndObserver | None) -> None:
        """Call `observer` at each end of a batch, instead of the previous observer."""
        self._observer = observer

    def count_memory(self) -> None:
        """Update the memory metrics of the device."""
        now, before = DeviceMemory.of(self.device), self._memory
        self._metrics.device_mallocs.add(by=now.mallocs - before.mallocs)
        self._metrics.device_allocations.add(by=now.allocations - before.allocations)
        self._metrics.device_reserved_bytes.set(now.reserved_bytes)
        self._memory = now

    def _collect(self) -> None:
        """Take the results of the batches that have ended."""
        try:
            while self._in_flight:
                looked = time.monotonic()
                if not self._in_flight[0].ended:
                    self._seen_running = looked
                    return
                in_flight, ended = self._in_flight.popleft(), time.monotonic()
                self._done += in_flight.results()
                if self._observer is not None:
                    self._observer(in_flight, ended)
                self._count(in_flight, ended)
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} is lost: {str(error).splitlines()[0]}") from error

    def _predicted(self, in_flight: InFlightBatch) -> float:
        """Return the expected time of the device."""
        return in_flight.predicted * self._corrections[in_flight.batch.model].factor

    def _count(self, in_flight: InFlightBatch, ended: float) -> None:
        """Count a batch in the metrics, and correct the predictions for its model."""
        metrics, batch = self._metrics, in_flight.batch
        computed = in_flight.launched if in_flight.collector is None else ended
        started = max(in_flight.staged, self._last_ended)
        # The host's time counts as long as a request waited: the next batch will take it as well.
        labels = batch.model.labels
        began = max(min(batch.since, in_flight.began), self._last_ended)
        device = computed - started, computed - started
        if in_flight.collector is not None:
            # The host sees the ends of batches late, and of two batches perhaps at once.
            latest, earliest = max(in_flight.launched, self._last_ended), max(in_flight.staged, self._began_after)
            device = self._seen_running - latest, ended - earliest
        correction = self._corrections[batch.model]
        correction.observe(in_flight.predicted, computed - began, device)
        self._costs[batch.model] = correction.of(self._runners[batch.model].cost)
        self._last_ended, self._began_after = ended, self._seen_running
        self.busy_seconds += computed - started
        metrics.batch_sequences.observe(batch.rows, *labels)
        metrics.batch_tokens.observe(batch.tokens, *labels)
        metrics.batches.add(*labels, "graph" if in_flight.by_graph else "launches")
        metrics.tokens.add(*labels, by=batch.tokens)
        metrics.padded_tokens.add(*labels, by=in_flight.padded_tokens)
        metrics.padding_avoided.add(*labels, by=batch.rows * batch.longest - batch.tokens)
        stages = {
            "stage_in": in_flight.staged - min(batch.formed, in_flight.began),
            "device_wait": started - in_flight.staged,
            "compute": computed - started,
            "stage_out": time.monotonic() - computed,
        }
        for stage, seconds in stages.items():
            metrics.stage_seconds.observe_often(seconds, batch.rows, *labels, stage)
        self._ended += 1
        if batch.timed:
            in_flight.runs.append(self._run(in_flight, started, computed, computed + stages["stage_out"]))

    def _run(self, in_flight: InFlightBatch, started: float, computed: float, ended: float) -> BatchRun:
        """Return how a batch ran, from the moments of its stages."""
        batch = in_flight.batch
        return BatchRun(
            engine=self._place,
            device=str(self.device),
            number=self._ended,
            sequences=batch.rows,
            tokens=batch.tokens,
            padded_tokens=in_flight.padded_tokens,
            by_graph=in_flight.by_graph,
            formed=min(batch.formed, in_flight.began),
            staged=in_flight.staged,
            started=started,
            computed=computed,
            ended=ended,
        )

    def _warm_up(self, encoder: Encoder, run_between_batches: RunBetweenBatches = run_now) -> ModelRunner:
        """Warm up a model. On a GPU this captures its graphs and allocates the memory that they need."""
        if self._pool is None:
            return ModelRunner(encoder, **self._limits)
        return CudaGraphRunner(encoder, self._collectors, self._pool, **self._limits, run_between_batches=run_between_batches)

    def _report(self, key: ModelKey, runner: ModelRunner) -> None:
        """Show a model in the metrics, and log if some of its batches have no graph."""
        self._metrics.weight_bytes.set(runner.encoder.weight_bytes(), *key.labels)
        self._metrics.graphs.set(runner.graphs, *key.labels)
        for layer, backend in runner.encoder.backends().items():
            self._metrics.backend.set(1, *key.labels, layer, backend)
        if runner.fallback_reason:
            Log("engine").warning(
                "some batches run without a graph",
                model=key.name,
                version=key.version,
                graphs=runner.graphs,
                reason=runner.fallback_reason,
            )


def _known_question(spec: ModelSpec) -> Chunk:
    """Return a fixed input of a model, as a whole sequence."""
    steps = max(spec.min_steps, min(KNOWN_STEPS, spec.input.max_steps))
    if spec.input.kind == "features":
        assert spec.input.features is not None
        data = np.sin(np.arange(steps * spec.input.features)).astype(FEATURES)
    else:
        assert spec.input.vocabulary is not None
        data = (np.arange(1, steps + 1) * KNOWN_STRIDE % spec.input.vocabulary).astype(IDS)
    returns = Returns(embedding=spec.head.answer_vector == "embedding", sequence=spec.head.answer_vector == "sequence")
    return Chunk(data.tobytes(), steps, returns, None)
