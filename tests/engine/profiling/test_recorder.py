"""Traces of a real engine on a CPU, recorded with torch's profiler."""

from __future__ import annotations

import json
import subprocess
import sys
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
from service.engine.profiling.recorder import BatchRecorder
from service.ipc.messages import IDS, ModelKey, Returns
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models, traces

WORDS = ModelKey("words", "1")
SLACK = 100_000
"""Tolerance for the profiler's clock, in nanoseconds."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    root = tmp_path_factory.mktemp("models")
    spec = models.words(root)
    encoder = Encoder(spec, store.read_arrays(root / "words" / "1", spec), torch.device("cpu"))
    return DeviceEngine({WORDS: encoder}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)


@pytest.fixture
def watched(engine: DeviceEngine) -> Iterator[DeviceEngine]:
    yield engine
    engine.watch(None)


def recorder(batches: int, seconds: float = 60.0) -> BatchRecorder:
    return BatchRecorder(3, "cpu", batches, seconds)


def batch(*lengths: int) -> Batch:
    return Batch(WORDS, [Chunk(np.ones(steps, IDS).tobytes(), steps, Returns(), None) for steps in lengths])


def run(engine: DeviceEngine, next_batch: Batch, recording: BatchRecorder) -> None:
    """Run a batch as the engine's loop does."""
    recording.launching(next_batch, [time.monotonic()])
    engine.launch(next_batch)
    engine.finished()
    recording.replied()


def tracks(recording: BatchRecorder) -> dict[str, list[traces.DrawnSlice]]:
    trace: dict[str, Any] = {"traceEvents": json.loads(recording.stop())}
    assert list(traces.processes(trace)) == ["engine-3 cpu"]
    return traces.tracks(trace)


def test_requested_batches_are_recorded_with_their_operations(watched: DeviceEngine) -> None:
    recording = recorder(batches=2)
    watched.watch(recording.ended)
    for lengths in ((3, 1), (5,), (2, 2, 2)):
        assert recording.over == (lengths == (2, 2, 2))
        run(watched, batch(*lengths), recording)
    found = tracks(recording)
    assert list(found) == ["queue", "batches", "operations"]
    whole = [piece for piece in found["batches"] if piece.args]
    assert [(piece.args["rows"], piece.args["tokens"], piece.args["longest"]) for piece in whole] == [(2, 4, 3), (1, 5, 5)]
    computed = [piece for piece in found["batches"] if piece.name == "compute"]
    for piece in computed:
        assert any(piece.holds(operation, SLACK) for operation in found["operations"])
    for operation in found["operations"]:
        assert any(piece.holds(operation, SLACK) for piece in computed)


def test_recording_ends_after_its_time(watched: DeviceEngine) -> None:
    recording = recorder(batches=100, seconds=0.05)
    watched.watch(recording.ended)
    run(watched, batch(4), recording)
    while not recording.over:
        time.sleep(0.01)
    assert [piece.args["batch"] for piece in tracks(recording)["batches"] if piece.args] == [0]


def test_batch_that_began_before_is_not_recorded(watched: DeviceEngine) -> None:
    watched.launch(batch(4))
    recording = recorder(batches=1)
    watched.watch(recording.ended)
    watched.finished()
    recording.replied()
    assert not recording.over
    run(watched, batch(5), recording)
    assert [piece.args["tokens"] for piece in tracks(recording)["batches"] if piece.args] == [5]


def test_abandoned_recording_leaves_no_file(watched: DeviceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recorder(batches=1).abandon()
    recording = recorder(batches=1)
    watched.watch(recording.ended)
    run(watched, batch(2), recording)
    assert "operations" in tracks(recording)
    assert not list(tmp_path.iterdir())


def test_recording_without_a_writable_folder_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        recorder(batches=1)
    monkeypatch.undo()
    recorder(batches=1).abandon()


@pytest.mark.slow
def test_profiler_writes_nothing_to_standard_error() -> None:
    """In a separate process: the profiler's library reads its log level once, when it is first used."""
    code = "from service.engine.profiling.recorder import Profiler; assert Profiler('cpu').stop()"
    profiled = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert profiled.stderr == ""
