"""The models of one device: warmed up, served and closed, with the states in their slots. Knows no batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.compile import CompileError
from kernels.ragged import ContractError
from service.engine.batching.session_state import State
from service.engine.batching.state_slots import ZERO_SLOT, Numbers
from service.engine.execution.cost_model import Correction, Cost
from service.engine.execution.cuda_graph_runner import CudaGraphRunner
from service.engine.execution.device import OutputCollector, raise_if_lost, reserve_memory
from service.engine.execution.graph_capture import GraphPool, RunBetweenBatches, run_now
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.resident_steps import ResidentSteps
from service.ipc.messages.inference import LoadedModel
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.metrics import Metrics
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec

SPARE_FACTOR = 3
"""State slots in addition to the slots that sequences hold, as a multiple of the largest batch: two batches in flight write some, and the
states to which the chunks that begin in a batch of pieces may return take others."""
LEAST_SLOTS = 256
"""The fewest state slots of a model by default."""
SLOTS_BYTES = 64 << 20
"""The states of a model in slots take no more memory than this, unless the fewest slots do."""
IN_FLIGHT = 2
"""Batches on a GPU at once: the next batch is launched shortly before the running batch ends."""
COLLECTOR_BYTES = 64 << 20
"""Host memory for the outputs of one batch. Outputs that do not fit are copied while the host waits."""
ARENA_FACTOR = 1.5
"""Reserved memory for batches without a graph, as a multiple of the need of the largest batch: blocks of many sizes leave gaps."""


class PreparedModel(NamedTuple):
    """A loaded and warmed-up model. On a GPU: the stream of its preparation, and the memory of its largest batches without a graph."""

    runner: ModelRunner
    stream: torch.cuda.Stream | None = None
    largest_bytes: int = 0


@dataclass(slots=True)
class _ServedModel:
    """cost: of its batches, as measured at warm-up and corrected by the batches that ran."""

    runner: ModelRunner
    stream: torch.cuda.Stream | None
    cost: Cost
    correction: Correction = field(default_factory=Correction)


class ServedModels:
    """The models that one device serves."""

    _resident: ResidentSteps | None = None
    """The steps of the model whose kernel may stay on the device now."""

    def __init__(
        self,
        device: torch.device,
        metrics: Metrics,
        slots: tuple[int, int],
        *,
        max_batch_sequences: int,
        max_batch_tokens: int,
        resident: bool,
    ) -> None:
        self.device = device
        self._allows_resident = resident
        self._preparing = False
        self._metrics = metrics
        self._slots, self._spare_slots = slots, SPARE_FACTOR * max_batch_sequences
        self._limits = {"max_batch_sequences": max_batch_sequences, "max_batch_tokens": max_batch_tokens}
        on_gpu = device.type == "cuda"
        self._collectors = [OutputCollector(index, COLLECTOR_BYTES) for index in range(IN_FLIGHT)] if on_gpu else []
        self._pool = GraphPool(device) if on_gpu else None
        self._free_streams: list[torch.cuda.Stream] = []
        """For the preparation of models. A library keeps workspaces per stream, and a captured graph continues to use them: no two served
        models share a stream."""
        self._arena_bytes = 0
        self._served: dict[ModelKey, _ServedModel] = {}

    def loaded(self) -> list[LoadedModel]:
        """Return the served models and the backends that run them."""
        return [
            LoadedModel(
                name=key.name,
                version=key.version,
                generation=key.generation,
                device=str(self.device),
                backends=[f"{layer}: {backend}" for layer, backend in model.runner.encoder.backends().items()],
                streams=model.runner.streams,
                without_steps=model.runner.without_steps,
                **model.runner.cost._asdict(),
            )
            for key, model in self._served.items()
        ]

    def serves(self, key: ModelKey) -> bool:
        return key in self._served

    def newest(self, name: str, version: str) -> ModelKey | None:
        """Return the newest generation of a model version, None if the version is not served."""
        return max((key for key in self._served if key.labels == (name, version)), default=None)

    def spec(self, key: ModelKey) -> ModelSpec:
        return self._served[key].runner.encoder.spec

    def streams(self, key: ModelKey) -> bool:
        """Return whether sequences of a model may run in chunks that continue from a state."""
        return self._served[key].runner.streams

    def whole_only(self, key: ModelKey) -> tuple[str, ...]:
        """Return the parts of a model for which its sequences must not run in chunks."""
        return self._served[key].runner.encoder.whole_only

    @property
    def weight_bytes(self) -> int:
        """Weights of all models on the device."""
        return sum(model.runner.encoder.weight_bytes() for model in list(self._served.values()))

    def prepare(self, make: Callable[[], Encoder], run_between_batches: RunBetweenBatches) -> PreparedModel:
        """Warm up a model for `open` in a second thread, while this thread's engine serves others; raises whatever `make` raises."""
        if self._pool is None:
            return PreparedModel(self._warm_up(make()))
        torch.cuda.set_device(self.device)
        stream = self._free_streams.pop() if self._free_streams else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._preparing = True
        try:
            run_between_batches(self.end_resident)
            with torch.cuda.stream(stream):
                runner = self._warm_up(make(), run_between_batches)
                largest_bytes = runner.largest_bytes()
                stream.synchronize()
        except BaseException:
            self._free_streams.append(stream)
            raise
        finally:
            with suppress(RuntimeError):  # of a lost device, which the engine's next batch reports
                stream.synchronize()
            self._preparing = False
        return PreparedModel(runner, stream, largest_bytes)

    def open(self, key: ModelKey, prepared: PreparedModel) -> None:
        """Serve a prepared model from now on. Logs if some of its batches have no graph."""
        self.end_resident()
        arena_bytes = int(ARENA_FACTOR * prepared.largest_bytes)
        if arena_bytes > self._arena_bytes:
            reserve_memory(self.device, arena_bytes)
            self._arena_bytes = arena_bytes
        self._served[key] = _ServedModel(prepared.runner, prepared.stream, prepared.runner.cost)
        self._metrics.weight_bytes.set(prepared.runner.encoder.weight_bytes(), *key.labels)
        self._metrics.graphs.set(prepared.runner.graphs, *key.labels)
        for layer, backend in prepared.runner.encoder.backends().items():
            self._metrics.backend.set(1, *key.labels, layer, backend)
        if prepared.runner.fallback_reason:
            Log("engine").warning(
                "some batches run without a graph",
                model=key.name,
                version=key.version,
                graphs=prepared.runner.graphs,
                reason=prepared.runner.fallback_reason,
            )

    def close(self, key: ModelKey) -> None:
        """Stop serving a model that has no batch in flight."""
        self.end_resident()
        stream = self._served.pop(key).stream
        if stream is not None:
            self._free_streams.append(stream)
        if not any(served.labels == key.labels for served in self._served):
            self._metrics.forget(*key.labels)

    def slots(self, key: ModelKey) -> tuple[int, int]:
        """Return how many state slots sequences may hold between batches, and how many more a launch may use."""
        return self._served[key].runner.slots - self._spare_slots, self._spare_slots

    def save(self, key: ModelKey, slot: int) -> State:
        """Return the state in a slot as a copy on the host, after all launched batches have written it."""
        with self._using_device():
            states = self._served[key].runner.encoder.save(np.array([slot], np.int32))
        return {name: tensor[0] for name, tensor in states.items()}

    def restore(self, key: ModelKey, slot: int, state: State) -> None:
        """Write a state to a slot, for batches launched from now on."""
        with self._using_device():
            states = {name: tensor[None] for name, tensor in state.items()}
            self._served[key].runner.encoder.restore(np.array([slot], np.int32), states)

    def state_vectors(self, key: ModelKey, slots: Numbers) -> bytes:
        """Return the model's states in some slots, joined in their order: (slots, numbers) float32."""
        with self._using_device():
            return self._served[key].runner.encoder.state_vectors(slots).numpy().tobytes()

    def state_from(self, key: ModelKey, vector: bytes | memoryview) -> State:
        """Return the state for `restore` with these states, joined in their order, as float32. NaN stands for the usual initial state."""
        numbers = torch.frombuffer(bytearray(vector), dtype=torch.float32)
        with self._using_device():
            return self._served[key].runner.encoder.state_from(numbers, ZERO_SLOT)

    def end_resident(self) -> None:
        """End the kernel that stays on the device, if there is one. Everything else that uses the device comes after it."""
        if self._resident is not None:
            self._resident.stop()
            self._resident = None

    @contextmanager
    def _using_device(self) -> Iterator[None]:
        """Use the device between batches. Raise DeviceLost instead of an error after which the device does not work any more."""
        try:
            self.end_resident()
            yield
        except RuntimeError as error:
            raise_if_lost(self.device, error)
            raise

    def _warm_up(self, encoder: Encoder, run_between_batches: RunBetweenBatches = run_now) -> ModelRunner:
        """Warm up a model. On a GPU this captures its graphs and allocates the memory that they need."""
        limits = self._limits | {"slots": self._slot_count(encoder) + self._spare_slots}
        if self._pool is None:
            return ModelRunner(encoder, **limits)
        runner = CudaGraphRunner(encoder, self._collectors, self._pool, **limits, run_between_batches=run_between_batches)
        if self._allows_resident:
            runner.resident = _resident_steps(encoder)
        return runner

    def _slot_count(self, encoder: Encoder) -> int:
        """Return how many state slots the sequences of a model may hold between batches."""
        least, most = self._slots
        if least == most or not encoder.keeps_states:
            return least
        return max(least, min(most, SLOTS_BYTES // max(1, encoder.state_bytes())))


def _resident_steps(encoder: Encoder) -> ResidentSteps | None:
    """Return the resident kernel of a model; logs why there is none for a model that it does not run."""
    try:
        return ResidentSteps(encoder)
    except (ContractError, CompileError) as refusal:
        Log("engine").info("the model has no resident kernel", model=encoder.spec.name, reason=str(refusal))
        return None
