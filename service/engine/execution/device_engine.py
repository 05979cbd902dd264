"""One device: turns in, encodings out. Nothing here knows a queue, a caller or a socket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from service.engine.batch import Batch, Chunk
from service.engine.execution.cost_model import NEWEST, Correction, Cost
from service.engine.execution.cuda_graph_runner import Between, CudaGraphRunner, Pool
from service.engine.execution.device import DeviceLost, DeviceMemory, OutputCollector, Streams, raise_if_lost, reserve
from service.engine.execution.in_flight import ChunkResult, InFlightBatch
from service.engine.execution.model_runner import ModelRunner
from service.engine.session_state import State
from service.errors import OutOfMemory
from service.ipc.messages import LoadedModel, ModelKey
from service.log import Log
from service.metrics import Metrics
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec

IN_FLIGHT = 2
"""Turns on a GPU: one runs, and the next one is laid and asked for shortly before it ends."""
PLACE_BYTES = 64 << 20
"""On the host, for what one turn gives; of a turn that gives more, some is waited for."""
ARENA_FACTOR = 1.5
"""Memory for turns without a graph, as a multiple of what the largest takes: blocks of many sizes leave gaps."""
LEAD_FACTOR = 1.5
"""The next turn is laid so much earlier than laying and asking take."""
Watcher = Callable[[InFlightBatch, float], None]


class Prepared(NamedTuple):
    """A model that is ready to be served. stream: on which it was made ready, and largest_bytes: what its largest turns take when no graph
    serves them, both on a GPU only."""

    runner: ModelRunner
    stream: torch.cuda.Stream | None = None
    largest_bytes: int = 0


class DeviceEngine:
    """Runs turns on a device. A turn is launched, then collected from `finished`; turns end in the order of their launches."""

    def __init__(
        self,
        encoders: Mapping[ModelKey, Encoder],
        metrics: Metrics,
        *,
        max_batch_sequences: int,
        max_batch_tokens: int,
        slots: int = 256,
        device: torch.device | None = None,
    ) -> None:
        """The encoders are on one device, `device` if there are none; on a GPU all turns go to the stream that is this thread's
        (`device.hold`). slots: of each model, for the states of sequences that are kept from turn to turn; a turn has as many again as it
        has rows."""
        self._metrics = metrics
        self._slots = slots, max_batch_sequences
        self._limits: dict[str, Any] = {
            "max_batch_sequences": max_batch_sequences,
            "max_batch_tokens": max_batch_tokens,
            "slots": sum(self._slots),
        }
        self.device = next((encoder.device for encoder in encoders.values()), device or torch.device("cpu"))
        self._places = [OutputCollector(index, PLACE_BYTES) for index in range(IN_FLIGHT)] if self.device.type == "cuda" else []
        self._arena_bytes = 0
        self._pool: Pool | None = None
        self._runners = self._opened(encoders)
        self._streams = Streams(self.device)
        self._made_ready_on: dict[ModelKey, torch.cuda.Stream] = {}
        self._corrections = {key: Correction() for key in self._runners}
        self._in_flight: deque[InFlightBatch] = deque()
        self._done: list[tuple[Chunk, ChunkResult]] = []
        self._launches = 0
        self._launch_seconds = 0.0
        self._taken_at = 0.0
        """When the engine last said that it takes a turn: from then on one is made for it."""
        self._launched_at = 0.0
        self._free_at = 0.0
        self._last_ended = 0.0
        self._memory = DeviceMemory()
        self._watcher: Watcher | None = None
        metrics.max_batch_sequences.set(max_batch_sequences)
        for key, runner in self._runners.items():
            self._show(key, runner)

    def loaded(self) -> list[LoadedModel]:
        """What is served, and what runs it."""
        return [
            LoadedModel(
                name=key.name,
                version=key.version,
                generation=key.generation,
                device=str(runner.encoder.device),
                backends=[f"{layer}: {backend}" for layer, backend in runner.encoder.backends().items()],
                weight_bytes=runner.encoder.weight_bytes(),
                streams=runner.streams,
                **runner.cost._asdict(),
            )
            for key, runner in self._runners.items()
        ]

    def serves(self, key: ModelKey) -> bool:
        return key in self._runners

    def newest(self, name: str, version: str) -> ModelKey | None:
        """What was opened last under this name and version, if anything."""
        return max((key for key in self._runners if key.labels == (name, version)), default=None)

    @property
    def weight_bytes(self) -> int:
        """Of all models."""
        return sum(runner.encoder.weight_bytes() for runner in list(self._runners.values()))

    def prepared(self, make: Callable[[], Encoder], between_batches: Between) -> Prepared:
        """A model made ready for `open`, in another thread than the one that launches turns, and while that goes on; raises whatever making
        it raises."""
        if not self._places:
            return Prepared(ModelRunner(make(), **self._limits))
        torch.cuda.set_device(self.device)
        stream = self._streams.take()
        try:
            with torch.cuda.stream(stream):
                assert self._pool is not None, "a GPU has one"
                runner = CudaGraphRunner(make(), self._places, self._pool, **self._limits, between_batches=between_batches)
                largest = runner.largest_bytes()
                stream.synchronize()
        except BaseException:
            self._streams.give_back(stream)
            raise
        return Prepared(runner, stream, largest)

    def open(self, key: ModelKey, prepared: Prepared) -> None:
        """Serve it from now on."""
        if prepared.stream is not None:
            self._made_ready_on[key] = prepared.stream
            self._reserve(prepared.largest_bytes)
        self._runners[key] = prepared.runner
        self._corrections[key] = Correction()
        self._show(key, prepared.runner)

    def runs(self, key: ModelKey) -> bool:
        """Whether a turn of it is in flight."""
        return any(in_flight.batch.model == key for in_flight in self._in_flight)

    def close(self, key: ModelKey) -> None:
        """Serve it no more; none of its turns is in flight."""
        assert not self.runs(key), f"a turn of {key} is in flight"
        del self._runners[key], self._corrections[key]
        if key in self._made_ready_on:
            self._streams.give_back(self._made_ready_on.pop(key))
        if not any(other.labels == key.labels for other in self._runners):
            self._metrics.forget(*key.labels)

    def streams(self, key: ModelKey) -> bool:
        """Whether a sequence of this model may come in chunks, each of which goes on from where the one before it was kept."""
        return self._runners[key].streams

    def slots(self, key: ModelKey) -> tuple[int, int]:
        """How many states may be kept from turn to turn, and how many more places a turn may use."""
        return self._slots

    def save(self, key: ModelKey, place: int) -> State:
        """The state in a place, on the host, once all that was launched has written it; raises DeviceLost."""
        try:
            return self._runners[key].encoder.save(place)
        except RuntimeError as fault:
            raise_if_lost(self.device, fault)
            raise

    def restore(self, key: ModelKey, place: int, state: State) -> None:
        """A state into a place, for turns that are launched from now on; raises DeviceLost."""
        try:
            self._runners[key].encoder.restore(place, state)
        except RuntimeError as fault:
            raise_if_lost(self.device, fault)
            raise

    def cost(self, key: ModelKey) -> Cost:
        """What turns of a model take, as measured at warm-up and corrected by those that ran."""
        return self._runners[key].cost.times(self._corrections[key].factor)

    def predicted_seconds(self, batch: Batch) -> float:
        return self._runners[batch.model].predicted_seconds(batch) * self._corrections[batch.model].factor

    @property
    def running(self) -> tuple[float, float] | None:
        """Since when the device has had its turn, on the clock of time.monotonic, and the seconds that this was predicted to take."""
        if not self._in_flight:
            return None
        in_flight = self._in_flight[0]
        return max(in_flight.launched, self._last_ended), self._predicted(in_flight)

    @property
    def remaining_seconds(self) -> float:
        """What is left of the turns in flight, as they were predicted."""
        return max(0.0, self._free_at - time.monotonic()) if self._in_flight else 0.0

    @property
    def accepts_batch(self) -> bool:
        """Whether to launch one now: the device is free, or will be by the time that it has been asked for another.

        Not sooner: what comes until then may still be in that turn.
        """
        takes = not self._in_flight or (
            len(self._in_flight) < IN_FLIGHT and self.remaining_seconds <= LEAD_FACTOR * self._launch_seconds
        )
        if takes:
            self._taken_at = time.monotonic()
        return takes

    def launch(self, batch: Batch) -> None:
        """Run a turn. Whatever the model raises on the host passes through, and nothing of the turn is then finished; raises OutOfMemory
        when the device has too little for it, and DeviceLost when the device does not work any more."""
        while len(self._in_flight) >= max(1, len(self._places)):
            self._in_flight[0].wait()
            self._collect()
        try:
            in_flight = self._runners[batch.model].launch(
                batch, self._places[self._launches % IN_FLIGHT] if self._places else None
            )
        except torch.OutOfMemoryError as fault:
            raise OutOfMemory(_no_memory(batch, self.device), retry_after=1) from fault
        except Exception as fault:
            raise_if_lost(self.device, fault)
            raise
        self._launches += 1
        self._in_flight.append(in_flight)
        self._free_at = max(self._free_at, in_flight.launched) + self._predicted(in_flight)
        self._launch_seconds += NEWEST * (in_flight.launched - max(self._taken_at, self._launched_at) - self._launch_seconds)
        self._launched_at = in_flight.launched

    def spec(self, key: ModelKey) -> ModelSpec:
        return self._runners[key].encoder.spec

    def watch(self, watcher: Watcher | None) -> None:
        """Have each turn told from now on, with the moment at which the device had done it, once its answers are apart."""
        self._watcher = watcher

    def finished(self) -> list[tuple[Chunk, ChunkResult]]:
        """The chunks that ended since the last call, each with its answer; raises DeviceLost when the device failed."""
        self._collect()
        done, self._done = self._done, []
        return done

    def count_memory(self) -> None:
        """Bring the counts of the device's memory up to date."""
        now, before = DeviceMemory.of(self.device), self._memory
        self._metrics.device_mallocs.add(by=now.mallocs - before.mallocs)
        self._metrics.device_allocations.add(by=now.allocations - before.allocations)
        self._metrics.device_reserved_bytes.set(now.reserved_bytes)
        self._memory = now

    def _collect(self) -> None:
        try:
            while self._in_flight and self._in_flight[0].ended:
                in_flight, ended = self._in_flight.popleft(), time.monotonic()
                self._done += in_flight.answers()
                if self._watcher is not None:
                    self._watcher(in_flight, ended)
                self._count(in_flight, ended)
        except RuntimeError as fault:
            raise DeviceLost(f"{self.device} is lost: {str(fault).splitlines()[0]}") from fault

    def _predicted(self, in_flight: InFlightBatch) -> float:
        return in_flight.predicted * self._corrections[in_flight.batch.model].factor

    def _count(self, in_flight: InFlightBatch, ended: float) -> None:
        metrics, batch = self._metrics, in_flight.batch
        computed = in_flight.launched if in_flight.place is None else ended
        stages = {
            "stage_in": in_flight.staged - in_flight.began,
            "compute": computed - max(in_flight.staged, self._last_ended),
            "stage_out": time.monotonic() - ended,
        }
        # What the host takes while somebody waits counts too: it will take as long with the next.
        labels = batch.model.labels
        began = max(min(batch.since, in_flight.began), self._last_ended)
        self._corrections[batch.model].observe(in_flight.predicted, computed - began)
        self._last_ended = ended
        for stage, seconds in stages.items():
            metrics.stage_seconds.observe(seconds, *labels, stage)
            metrics.sequence_seconds.add(*labels, stage, by=batch.rows * seconds)
        metrics.batch_sequences.observe(batch.rows, *labels)
        metrics.batch_tokens.observe(batch.tokens, *labels)
        metrics.batches.add(*labels, "graph" if in_flight.by_graph else "launches")
        metrics.tokens.add(*labels, by=batch.tokens)
        metrics.padded_tokens.add(*labels, by=in_flight.padded_tokens)
        metrics.padding_avoided.add(*labels, by=batch.rows * batch.longest - batch.tokens)

    def _opened(self, encoders: Mapping[ModelKey, Encoder]) -> dict[ModelKey, ModelRunner]:
        """The lane of every model. On a GPU all of it is asked for here that turns will need."""
        if not self._places:
            return {key: ModelRunner(encoder, **self._limits) for key, encoder in encoders.items()}
        self._pool = pool = Pool(self.device)
        runners = {key: CudaGraphRunner(encoder, self._places, pool, **self._limits) for key, encoder in encoders.items()}
        largest = max((runner.largest_bytes() for runner in runners.values()), default=0)
        torch.cuda.empty_cache()
        self._reserve(largest)
        return dict(runners)

    def _reserve(self, largest_bytes: int) -> None:
        """Room for turns without a graph that take so much, if there is not as much."""
        wanted = int(ARENA_FACTOR * largest_bytes)
        if wanted > self._arena_bytes:
            reserve(self.device, wanted)
            self._arena_bytes = wanted

    def _show(self, key: ModelKey, runner: ModelRunner) -> None:
        self._metrics.weight_bytes.set(runner.encoder.weight_bytes(), *key.labels)
        self._metrics.graphs.set(runner.graphs, *key.labels)
        for layer, backend in runner.encoder.backends().items():
            self._metrics.backend.set(1, *key.labels, layer, backend)
        if runner.why:
            Log("engine").warning(
                "not all turns by graphs", model=key.name, version=key.version, graphs=runner.graphs, why=runner.why
            )


def _no_memory(batch: Batch, device: torch.device) -> str:
    return f"{device} has no memory for {batch.rows} sequences of {batch.tokens} steps: retry later, or send shorter ones"
