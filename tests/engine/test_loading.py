"""Versions that an engine loads and unloads: which errors are reported, what delays an unload, and whether memory and kernels are there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cpu.cache import NOT_COMPILED
from service.engine import build, kernel_compiler
from service.engine.execution.graph_capture import RunBetweenBatches
from service.engine.execution.served_models import PreparedModel
from service.engine.loading import CHECK_SECONDS, CLOSING_SECONDS, ModelLoader
from service.errors import InvalidModel, ModelError, NoRoom, ServiceError, SessionLost
from service.ipc.messages.control import CloseModel
from service.ipc.messages.models import ModelKey, ModelVersion
from service.log import Log
from service.modeling import store
from service.settings import load
from tests import models
from tests.engine.batching.harness import MODEL, BatcherHarness, FakeEngine
from tests.engine.test_loader_thread import wait_until_readable
from tests.serving import eventually

NEW = ModelVersion("words", "1", 7, "/models/words/1", "{}")
FRONTEND, OTHER_FRONTEND = "a channel", "another channel"
NO_RUNNER: Any = None


def load_nothing(model_version: ModelVersion, run_between_batches: RunBetweenBatches) -> PreparedModel:
    return PreparedModel(NO_RUNNER)


class LoadingEngine(FakeEngine):
    """An engine that notes which models it opens and closes, with their loader and a clock that the test moves."""

    def __init__(self, load: Callable[[ModelVersion, RunBetweenBatches], PreparedModel] = load_nothing) -> None:
        super().__init__()
        self.batching = BatcherHarness()
        self.opened: list[ModelKey] = []
        self.closed: list[ModelKey] = []
        self.outcomes: list[ServiceError | None] = []
        self.changes = self.freezes = 0
        self.loader = ModelLoader(
            self, self.batching.batcher, load, Log("engine-0"), lambda: self.batching.now, self._count_freeze
        )
        self.loader.changed = self._count_change

    def open(self, key: ModelKey, prepared: PreparedModel) -> None:
        self.opened.append(key)

    def close(self, key: ModelKey) -> None:
        self.closed.append(key)

    def serves(self, key: ModelKey) -> bool:
        return key not in self.closed

    def prepare_new(self) -> ServiceError | None:
        """Prepare NEW, and return the reported error."""
        self.loader.prepare(NEW, self.outcomes.append)
        return self.wait_for_outcome()

    def wait_for_outcome(self) -> ServiceError | None:
        """Wait until a version is prepared, and return the reported error."""
        while not self.outcomes:
            wait_until_readable(self.loader)
            self.loader.settle()
        return self.outcomes.pop()

    def unload(self, seconds: float, *channels: str) -> None:
        """Close MODEL while these channels have not released it. seconds: for its sessions."""
        self.loader.close(CloseModel(MODEL, seconds), set(channels), lambda: None)

    def wait(self, seconds: float = CHECK_SECONDS) -> None:
        self.batching.now += seconds
        self.loader.settle()

    def _count_change(self) -> None:
        self.changes += 1

    def _count_freeze(self) -> None:
        self.freezes += 1


@pytest.fixture
def engine() -> Iterator[LoadingEngine]:
    yield LoadingEngine()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ModelError("weights.safetensors is broken"), InvalidModel, "weights.safetensors is broken"),
        (ValueError("no such layer"), InvalidModel, "/models/words/1 cannot be served: ValueError: no such layer"),
        (MemoryError(), NoRoom, "not enough memory for words version 1 next to the models already served"),
        (torch.OutOfMemoryError("2 GiB"), NoRoom, "not enough memory for words version 1"),
        (NoRoom("5 bytes are left"), NoRoom, "5 bytes are left"),
    ],
)
def test_version_that_cannot_load_is_reported_with_its_reason(error: Exception, kind: type[ServiceError], message: str) -> None:
    def fail(model_version: ModelVersion, run_between_batches: RunBetweenBatches) -> PreparedModel:
        raise error

    engine = LoadingEngine(fail)
    reported = engine.prepare_new()
    assert type(reported) is kind
    assert message in str(reported)
    assert (engine.opened, engine.freezes, engine.changes) == ([], 0, 0)


def test_prepared_version_is_served_and_announced(engine: LoadingEngine) -> None:
    assert engine.prepare_new() is None
    assert (engine.opened, engine.freezes, engine.changes) == ([NEW.key], 1, 1)


@pytest.mark.parametrize("ended", [False, True])
def test_unload_waits_a_limited_time_for_a_frontend(engine: LoadingEngine, ended: bool) -> None:
    engine.unload(30.0, FRONTEND)
    if ended:
        engine.loader.forget(FRONTEND)
    engine.wait()
    assert engine.closed == [MODEL] * ended
    engine.wait(CLOSING_SECONDS)
    assert engine.closed == [MODEL]
    closed: list[bool] = []
    engine.loader.close(CloseModel(MODEL, 30.0), {FRONTEND}, lambda: closed.append(True))
    assert closed == [True], "it is not served any more"


def test_version_is_unloaded_after_every_frontend_released_it(engine: LoadingEngine) -> None:
    engine.loader.release(FRONTEND, MODEL)
    engine.unload(30.0, FRONTEND, OTHER_FRONTEND)
    engine.wait()
    assert not engine.closed
    engine.loader.release(OTHER_FRONTEND, MODEL)
    engine.wait()
    assert (engine.closed, engine.changes) == ([MODEL], 1)


def test_version_stays_until_its_queued_requests_are_answered(engine: LoadingEngine) -> None:
    engine.batching.call([1, 2])
    engine.unload(0.0)
    engine.wait()
    assert not engine.closed
    engine.batching.batcher.step()
    engine.batching.batcher.step()
    engine.wait()
    assert engine.closed == [MODEL]


def test_version_stays_for_its_sessions_until_the_time_limit(engine: LoadingEngine) -> None:
    engine.batching.call([1, 2], session="s")
    engine.batching.batcher.step()
    engine.unload(5.0)
    engine.wait(4.0)
    assert not engine.closed
    engine.wait(1.5)
    assert engine.closed == [MODEL]
    [error] = engine.batching.call([1], session="s").errors
    assert isinstance(error, SessionLost)


def test_version_closed_while_it_loads_is_not_served(engine: LoadingEngine) -> None:
    engine.closed.append(NEW.key)
    engine.loader.prepare(NEW, engine.outcomes.append)
    engine.loader.close(CloseModel(NEW.key, 0.0), {FRONTEND}, lambda: None)
    assert engine.wait_for_outcome() is None
    assert (engine.opened, engine.changes) == ([], 0)


def test_version_closed_after_it_failed_to_load_can_load_again() -> None:
    errors = [ModelError("weights.safetensors is broken")]

    def fail_once(model_version: ModelVersion, run_between_batches: RunBetweenBatches) -> PreparedModel:
        if errors:
            raise errors.pop()
        return PreparedModel(NO_RUNNER)

    engine = LoadingEngine(fail_once)
    engine.closed.append(NEW.key)
    assert engine.prepare_new() is not None
    engine.loader.close(CloseModel(NEW.key, 0.0), {FRONTEND}, lambda: None)
    assert engine.prepare_new() is None
    assert engine.opened == [NEW.key]


@pytest.mark.parametrize("device, bytes_per_value", [("cpu", {}), ("cuda:0", {"float16": 2, "bfloat16": 2, "int8": 2})])
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_weights_count_as_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, device: str, bytes_per_value: dict[str, int]
) -> None:
    described = models.words(tmp_path).model_copy(update={"precision": precision})
    arrays = models.weights(described)
    described = store.write(tmp_path / "words" / "2", described, arrays, card="made up", tokenizer=models.tokenizer())
    version = ModelVersion("words", "2", 1, str(tmp_path / "words" / "2"), described.model_dump_json())
    engine: Any = SimpleNamespace(device=torch.device(device), weight_bytes=0, prepare=lambda load, _: load())
    needed = bytes_per_value.get(precision, 4) * sum(array.numel() for array in arrays.values())
    monkeypatch.setattr(build, "Encoder", lambda *_: "the encoder")

    def prepare(free: int) -> Any:
        monkeypatch.setattr(build, "available_bytes", lambda _: free)
        return build.prepare_model(load({"models": tmp_path}, {}), engine, version, lambda run: run())

    assert prepare(needed) == "the encoder"
    with pytest.raises(NoRoom, match=f"words version 2 needs {needed} bytes"):
        prepare(needed - 1)


class Events(Log):
    """Keeps the events instead of printing them."""

    def __init__(self) -> None:
        super().__init__("engine-0")
        self.events: list[tuple[str, dict[str, Any]]] = []

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        self.events.append((f"{level}: {event}", values))


def compiler(monkeypatch: pytest.MonkeyPatch, reasons: list[str | None], status: int = 0) -> list[list[str]]:
    """Replace the compiler by a command that ends with a status; return the commands. reasons: what `missing` returns in turn."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, stderr="no space left on device\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(kernel_compiler, "missing", lambda: reasons.pop(0))
    return commands


@pytest.mark.parametrize(
    ("reasons", "status", "events"),
    [
        ([None], 0, []),
        ([NOT_COMPILED, None], 0, ["warning: cpu kernels not compiled", "info: cpu kernels compiled"]),
        ([NOT_COMPILED], 1, ["warning: cpu kernels not compiled", "error: cpu kernels not compiled"]),
        (["the folder of compiled kernels cannot be written: set SEQSERVE_CACHE"], 0, ["warning: cpu kernels not compiled"]),
    ],
    ids=["compiled", "missing", "compiler fails", "cannot be kept"],
)
def test_missing_kernels_are_compiled_for_the_next_start(
    reasons: list[str | None], status: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, log = compiler(monkeypatch, reasons.copy(), status), Events()
    kernel_compiler.compile_in_background(log)
    eventually(lambda: len(log.events) == len(events))
    assert [event for event, _ in log.events] == events
    assert [command[1:] for command in commands] == [["-m", "kernels.cpu", "--low-priority"]] * (NOT_COMPILED in reasons)
    assert status == 0 or log.events[1][1] == {"reason": "no space left on device"}
