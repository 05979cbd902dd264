"""Traces of a real engine on a CPU, recorded with torch's profiler."""

from __future__ import annotations

import json
import tempfile
import time
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


def run(engine: DeviceEngine, recording: BatchRecorder, *lengths: int) -> None:
    """Run a batch as the engine's loop does."""
    batch = Batch(WORDS, [Chunk(np.ones(steps, IDS).tobytes(), steps, Returns(), None) for steps in lengths])
    recording.launching(batch, [time.monotonic()])
    engine.launch(batch)
    engine.finished()
    recording.replied()


def test_requested_batches_are_recorded_with_their_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that began before the recording is not recorded. No file is left behind."""
    spec = models.words(tmp_path / "models")
    encoder = Encoder(spec, store.read_arrays(tmp_path / "models" / "words" / "1", spec), torch.device("cpu"))
    engine = DeviceEngine({WORDS: encoder}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    engine.launch(Batch(WORDS, [Chunk(np.ones(4, IDS).tobytes(), 4, Returns(), None)]))
    recording = BatchRecorder(3, "cpu", batches=2, seconds=60.0)
    engine.watch(recording.ended)
    engine.finished()
    recording.replied()
    for lengths in ((3, 1), (5,), (2, 2, 2)):
        assert recording.over == (lengths == (2, 2, 2))
        run(engine, recording, *lengths)
    trace: dict[str, Any] = {"traceEvents": json.loads(recording.stop())}
    assert list(traces.processes(trace)) == ["engine-3 cpu"]
    found = traces.tracks(trace)
    assert list(found) == ["queue", "batches", "operations"]
    whole = [piece for piece in found["batches"] if piece.args]
    assert [(piece.args["rows"], piece.args["tokens"], piece.args["longest"]) for piece in whole] == [(2, 4, 3), (1, 5, 5)]
    computed = [piece for piece in found["batches"] if piece.name == "compute"]
    for piece in computed:
        assert any(piece.holds(operation, SLACK) for operation in found["operations"])
    for operation in found["operations"]:
        assert any(piece.holds(operation, SLACK) for piece in computed)
    brief = BatchRecorder(3, "cpu", batches=100, seconds=0.0)
    assert brief.over, "its time has passed"
    brief.abandon()
    assert not list((tmp_path / "scratch").glob("seqserve-*"))
