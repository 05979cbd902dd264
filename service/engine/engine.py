"""The interface of an engine, as the engine process uses it."""

from __future__ import annotations

from typing import Protocol

from service.engine.batch import Batch
from service.engine.batching.session_state import State
from service.engine.execution.cost_model import Cost
from service.engine.execution.device_engine import PreparedModel
from service.engine.execution.in_flight import Array, EndObserver, FinishedPart
from service.ipc.messages import LoadedModel, ModelKey
from service.modeling.spec import ModelSpec


class Engine(Protocol):
    """Runs batches and keeps states. `DeviceEngine` implements it on a device; tests have a fake."""

    # Models.

    def loaded(self) -> list[LoadedModel]:
        """Return the served models and the backends that run them."""

    def serves(self, key: ModelKey) -> bool: ...

    def newest(self, name: str, version: str) -> ModelKey | None:
        """Return the newest generation of a model version, None if the version is not served."""

    def spec(self, key: ModelKey) -> ModelSpec: ...

    def streams(self, key: ModelKey) -> bool:
        """Return whether sequences of a model may run in chunks that continue from a state."""

    def whole_only(self, key: ModelKey) -> tuple[str, ...]:
        """Return the parts of a model for which its sequences must not run in chunks."""

    def open(self, key: ModelKey, prepared: PreparedModel) -> None:
        """Serve a prepared model from now on."""

    def close(self, key: ModelKey) -> None:
        """Stop serving a model that has no batch in flight."""

    # States.

    def slots(self, key: ModelKey) -> tuple[int, int]:
        """Return how many state slots sequences may hold between batches, and how many more a launch may use."""

    def save(self, key: ModelKey, slot: int) -> State:
        """Return the state in a slot as a copy on the host, after all launched batches have written it."""

    def restore(self, key: ModelKey, slot: int, state: State) -> None:
        """Write a state to a slot, for batches launched from now on."""

    def state_vector(self, key: ModelKey, slot: int) -> bytes:
        """Return the model's states in a slot, joined in their order, as float32, after all launched batches have written them."""

    def state_from(self, key: ModelKey, vector: bytes | memoryview) -> State:
        """Return the state for `restore` with these states, joined in their order, as float32. NaN stands for the usual
        initial state."""

    # Batches.

    def known_answer(self, key: ModelKey) -> list[Array]:
        """Return the arrays of a model's answer to a fixed input. The metrics do not count it. No batch may be in flight.

        Raises OutOfMemory, and DeviceLost if the device does not work any more.
        """

    @property
    def device(self) -> object: ...

    @property
    def accepts_batch(self) -> bool:
        """Whether to launch a batch now."""

    @property
    def running(self) -> tuple[float, float] | None:
        """When the device began its current batch, on the clock of time.monotonic, and the predicted seconds; None without one."""

    @property
    def busy_seconds(self) -> float:
        """Time in which the device ran the batches that have ended."""

    @property
    def remaining_seconds(self) -> float:
        """Predicted time until the batches in flight end."""

    def runs(self, key: ModelKey) -> bool:
        """Return whether a batch of a model is in flight."""

    def cost(self, key: ModelKey) -> Cost: ...

    def predicted_seconds(self, batch: Batch) -> float: ...

    def launch(self, batch: Batch) -> None:
        """Launch a batch. If the launch raises, no part of the batch will finish."""

    def finished(self) -> list[FinishedPart]:
        """Return the blocks and chunks that finished since the last call."""

    def watch(self, observer: EndObserver | None) -> None:
        """Call `observer` at each end of a batch, instead of the previous observer."""

    def count_memory(self) -> None:
        """Update the memory metrics of the device."""
