"""Traces of an engine: one at a time, recorded with torch's profiler, and drawn as a timeline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

from service.engine.batch import Batch, rows_block
from service.engine.execution.device_engine import DeviceEngine
from service.engine.profiling import session
from service.engine.profiling.recorder import BatchRecorder
from service.engine.profiling.session import ProfilingSession
from service.engine.profiling.timeline import ClockMark, ProfilerEvent, TracedBatch, events
from service.errors import Overloaded, Unavailable
from service.ipc.channel import Channel
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.inference import IDS, EngineStatus, RecordTrace
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models, traces
from tests.engine.batching.harness import BatcherHarness
from tests.traces import DrawnSlice

FIRST, SECOND = Mock(spec=Channel), Mock(spec=Channel)


class Harness(BatcherHarness):
    """A profiling session with its recorder, and its replies and refusals by id."""

    def __init__(self) -> None:
        super().__init__()
        self.heartbeat = Heartbeat()
        self.session = ProfilingSession(self.engine, self.batcher, EngineStatus([], 3, "cuda:1"), self.heartbeat)
        self.recorder = Mock(over=False, stop=Mock(return_value=b"[1]"))
        self.start = Mock(return_value=self.recorder)
        self.replies: dict[int, Any] = {}

    def request_trace(self, id: int, channel: Channel = FIRST) -> None:
        def reply(value: Any) -> None:
            self.replies[id] = value

        self.session.begin((channel, id), RecordTrace(batches=7, seconds=2.5), reply, reply)

    @property
    def watched(self) -> bool:
        assert (self.engine.observer is None) == (self.batcher._runs.observer is None) == (self.session.trace is None)
        return self.session.trace is not None


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    made = Harness()
    monkeypatch.setattr(session, "BatchRecorder", made.start)
    yield made
    made.heartbeat.close()


def test_one_trace_at_a_time_is_recorded_and_sent(harness: Harness) -> None:
    """The heartbeat covers the start of the profiler."""
    harness.request_trace(4)
    harness.start.assert_called_once_with(3, "cuda:1", 7, 2.5)
    assert harness.heartbeat.late_seconds() < -session.BLOCKED_SECONDS / 2 and harness.session.resumed > 0
    harness.request_trace(5, SECOND)
    assert isinstance(harness.replies[5], Overloaded) and harness.replies[5].retry_after == 1
    harness.session.step()
    assert harness.watched and 4 not in harness.replies
    harness.recorder.over = True
    harness.session.step()
    assert harness.replies[4] == b"[1]" and not harness.watched


def test_requester_may_cancel_its_trace(harness: Harness) -> None:
    harness.request_trace(4)
    harness.session.cancel(FIRST, 3)
    harness.session.cancel(SECOND, 4)
    harness.session.forget(SECOND)
    assert harness.watched
    harness.session.cancel(FIRST, 4)
    assert not harness.watched and harness.recorder.abandon.call_count == 1
    harness.request_trace(5)
    harness.session.forget(FIRST)
    assert not harness.watched and harness.recorder.abandon.call_count == 2 and not harness.replies


@pytest.mark.parametrize("starts", [False, True])
def test_trace_that_fails_is_refused_with_its_reason(harness: Harness, starts: bool) -> None:
    (harness.recorder.stop if starts else harness.start).side_effect = OSError("no room")
    harness.recorder.over = True
    harness.request_trace(4)
    harness.session.step()
    assert isinstance(harness.replies[4], Unavailable) and "no room" in harness.replies[4].message
    assert not harness.watched


WORDS = ModelKey("words", "1")
SLACK = 100_000
"""Tolerance for the profiler's clock, in nanoseconds."""


def run_batch(engine: DeviceEngine, recording: BatchRecorder, *lengths: int) -> None:
    """Run a batch as the engine's loop does."""
    batch = Batch(WORDS, [rows_block(WORDS, lengths, np.ones(sum(lengths), IDS).tobytes())])
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
    engine.launch(Batch(WORDS, [rows_block(WORDS, [4], np.ones(4, IDS).tobytes())]))
    recording = BatchRecorder(3, "cpu", batches=2, seconds=60.0)
    engine.watch(recording.ended)
    engine.finished()
    recording.replied()
    for lengths in ((3, 1), (5,), (2, 2, 2)):
        assert recording.over == (lengths == (2, 2, 2))
        run_batch(engine, recording, *lengths)
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


START = 5000.0
"""Seconds on the clock of time.monotonic."""
BEHIND = 4000.0
"""The profiler's clock, in seconds."""
STREAM, THREAD = 7, 321
MARKS = [
    ClockMark("slow", START - 3e-3, START - 1e-3),
    ClockMark("quick", START - 20e-6, START - 10e-6),
    ClockMark("lost", START, START),
]
STAGES = ["stage_in", "launch", "stage_out", "reply"]


def traced_batch(begin_us: float, *, free_us: float = 0.0, **others: Any) -> TracedBatch:
    """Return a batch on a GPU: staged after 10 us, launched after 30, ended after 200, split after 230, replied after 300."""
    began, names = START + 1e-6 * begin_us, ("staged", "launched", "ended", "split", "replied")
    moments = {name: began + 1e-6 * after for name, after in zip(names, (10, 30, 200, 230, 300), strict=True)}
    traced = TracedBatch(
        ModelKey("words", "2"),
        rows=3,
        tokens=20,
        longest=9,
        padded_tokens=4,
        by="graph",
        asynchronous=True,
        arrivals=[began - 100e-6, began - 40e-6, began - 10e-6],
        began=began,
        device_free=START + 1e-6 * free_us,
        **moments,
    )
    return replace(traced, **others)


def seen(cat: str, begin_us: float, us: float, name: str = "it", tid: int = THREAD, **args: Any) -> ProfilerEvent:
    """Return a profiler event at this many microseconds after START."""
    return ProfilerEvent(name, cat, 1e6 * (START - BEHIND) + begin_us, us, tid, args)


SEEN_MARKS = [
    seen("user_annotation", -2500, 900, "slow"),  # 50 us off the middle of its mark
    seen("user_annotation", -17, 4, "quick"),
]


def drawn(batches: list[TracedBatch], *profiled: ProfilerEvent) -> dict[str, list[DrawnSlice]]:
    """Return the tracks of a trace that went through JSON."""
    found = events(0, "cuda:0", batches, [*SEEN_MARKS, *profiled], MARKS)
    return traces.tracks({"traceEvents": msgspec.json.decode(msgspec.json.encode(found))})


def spans(slices: list[DrawnSlice]) -> list[tuple[float, float]]:
    """Return begin and end of slices in microseconds after START."""
    return [((piece.begin - 1e9 * START) / 1000, (piece.end - 1e9 * START) / 1000) for piece in slices]


def test_batch_is_drawn_with_its_stages_queue_and_device_time() -> None:
    tracks = drawn([traced_batch(0)])
    assert list(tracks) == ["queue", "batches", "device"]
    whole, *stages = tracks["batches"]
    assert whole.name == "words"
    numbers = {"batch": 0, "rows": 3, "tokens": 20, "longest": 9, "padded_tokens": 4}
    assert whole.args == {**numbers, "model": "words", "version": "2", "by": "graph"}
    assert [piece.name for piece in stages] == STAGES
    assert all(whole.holds(piece) for piece in stages)
    assert spans(tracks["batches"]) == [(0, 300), (0, 10), (10, 30), (200, 230), (230, 300)]
    assert spans(tracks["queue"]) == [(-100, 0)]
    assert tracks["queue"][0].args == {"batch": 0, "rows": 3, "mean_us": 50.0}
    assert spans(tracks["device"]) == [(10, 200)]


def test_launches_copies_and_kernels_have_their_tracks() -> None:
    tracks = drawn(
        [traced_batch(0)],
        seen("cuda_runtime", 15, 6, "cudaGraphLaunch", correlation=1),
        seen("cuda_driver", 22, 2, "cuLaunchKernel", correlation=2),
        seen("gpu_memcpy", 20, 3, "Memcpy HtoD", tid=STREAM, bytes=80),
        seen("kernel", 25, 60, "lstm", tid=STREAM, correlation=1),
        seen("kernel", 30, 10, "beside", tid=8, correlation=2),
        seen("gpu_memset", 90, 2, "Memset", tid=STREAM),
        seen("python_function", 20, 5),
        seen("cuda_runtime", 40, 1, "cudaEventQuery"),
    )
    streams = ["copies, stream 7", "kernels, stream 7", "kernels, stream 8"]
    assert list(tracks) == ["queue", "batches", "device", "launches", *streams]
    assert spans(tracks["launches"]) == [(15, 21), (22, 24)], "the clock follows the shortest mark"
    assert [piece.name for piece in tracks["copies, stream 7"]] == ["Memcpy HtoD", "Memset"]
    assert tracks["copies, stream 7"][0].args == {"bytes": 80}
    assert spans(tracks["kernels, stream 7"]) == [(25, 85)]
    device, launch = tracks["device"][0], tracks["batches"][2]
    assert all(launch.holds(piece) for piece in tracks["launches"])
    assert all(device.holds(piece) for name in tracks for piece in tracks[name] if name.startswith(("copies", "kernels")))


def test_batches_in_flight_have_two_tracks_and_share_the_device() -> None:
    tracks = drawn([traced_batch(0), traced_batch(150, free_us=200), traced_batch(310, free_us=350)])
    assert list(tracks) == ["queue", "batches", "batches (2)", "device"]
    assert [piece.args["batch"] for piece in tracks["batches"] if piece.args] == [0, 2]
    assert [piece.args["batch"] for piece in tracks["batches (2)"] if piece.args] == [1]
    assert spans(tracks["device"]) == [(10, 200), (200, 350), (350, 510)]


@pytest.mark.slow
def test_start_of_the_profiler_imports_no_compiler() -> None:
    """It would stall the queue for seconds."""
    program = "import sys; from service.engine.profiling.recorder import Profiler; Profiler('cpu').stop(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout.split() and not {"torch._dynamo", "sympy"} & set(done.stdout.split())
