"""Turns of a real engine on a CPU, recorded with torch's profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.batch import Batch, Chunk
from service.engine.execution.device_engine import DeviceEngine
from service.engine.profiling.recorder import Recorder
from service.ipc.messages import IDS, ModelKey, Returns
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models, traces

WORDS = ModelKey("words", "1")
SLACK = 100_000
"""Nanoseconds by which the profiler's clock may be wrong."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    root = tmp_path_factory.mktemp("models")
    spec = models.words(root)
    encoder = Encoder(spec, store.read_arrays(root / "words" / "1", spec), torch.device("cpu"), 1 << 20)
    return DeviceEngine({WORDS: encoder}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)


@pytest.fixture
def watched(engine: DeviceEngine) -> Iterator[DeviceEngine]:
    yield engine
    engine.watch(None)


def recorder(batches: int, seconds: float = 60.0) -> Recorder:
    return Recorder(3, "cpu", batches, seconds)


def batch(*lengths: int) -> Batch:
    return Batch(WORDS, [Chunk(np.ones(steps, IDS).tobytes(), steps, Returns(), None) for steps in lengths])


def run(engine: DeviceEngine, one: Batch, recording: Recorder) -> None:
    """A turn as the engine's loop runs it."""
    recording.take(one, [time.monotonic()])
    engine.launch(one)
    engine.finished()
    recording.answer()


def rows(recording: Recorder) -> dict[str, list[traces.Slice]]:
    found: dict[str, Any] = {"traceEvents": json.loads(recording.stop())}
    assert list(traces.processes(found)) == ["engine-3 cpu"]
    return traces.rows(found)


def test_as_many_turns_as_were_wanted_are_recorded_with_the_operations_in_them(watched: DeviceEngine) -> None:
    recording = recorder(batches=2)
    watched.watch(recording.end)
    for lengths in ((3, 1), (5,), (2, 2, 2)):
        assert recording.over == (lengths == (2, 2, 2))
        run(watched, batch(*lengths), recording)
    found = rows(recording)
    assert list(found) == ["queue", "batches", "operations"]
    whole = [one for one in found["batches"] if one.args]
    assert [(one.args["rows"], one.args["tokens"], one.args["longest"]) for one in whole] == [(2, 4, 3), (1, 5, 5)]
    computed = [one for one in found["batches"] if one.name == "compute"]
    for one in computed:
        assert any(one.holds(operation, SLACK) for operation in found["operations"])
    for operation in found["operations"]:
        assert any(one.holds(operation, SLACK) for one in computed)


def test_after_its_time_it_is_over_with_what_came(watched: DeviceEngine) -> None:
    recording = recorder(batches=100, seconds=0.05)
    watched.watch(recording.end)
    run(watched, batch(4), recording)
    while not recording.over:
        time.sleep(0.01)
    assert [one.args["batch"] for one in rows(recording)["batches"] if one.args] == [0]


def test_a_turn_that_began_before_is_not_recorded(watched: DeviceEngine) -> None:
    watched.launch(batch(4))
    recording = recorder(batches=1)
    watched.watch(recording.end)
    watched.finished()
    recording.answer()
    assert not recording.over
    run(watched, batch(5), recording)
    assert [one.args["tokens"] for one in rows(recording)["batches"] if one.args] == [5]


def test_what_is_abandoned_leaves_no_file_and_lets_the_next_one_begin(
    watched: DeviceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recorder(batches=1).abandon()
    recording = recorder(batches=1)
    watched.watch(recording.end)
    run(watched, batch(2), recording)
    assert "operations" in rows(recording)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_that_can_be_written_nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        recorder(batches=1)
    monkeypatch.undo()
    recorder(batches=1).abandon()


def test_the_profiler_says_nothing_on_standard_error(watched: DeviceEngine, capfd: pytest.CaptureFixture[str]) -> None:
    recording = recorder(batches=1)
    watched.watch(recording.end)
    run(watched, batch(2), recording)
    rows(recording)
    assert capfd.readouterr().err == ""
