"""The timeline of synthetic batches and profiler events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from service.engine.profiling.timeline import ClockMark, ProfilerEvent, TracedBatch, events
from service.ipc.messages import ModelKey
from tests import traces
from tests.traces import DrawnSlice

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


def batch(begin_us: float, *, free_us: float = 0.0, **others: Any) -> TracedBatch:
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
    tracks = drawn([batch(0)])
    assert list(tracks) == ["queue", "batches", "device"]
    whole, *stages = tracks["batches"]
    assert whole.name == "words"
    assert whole.args == {
        "batch": 0,
        "model": "words",
        "version": "2",
        "rows": 3,
        "tokens": 20,
        "longest": 9,
        "by": "graph",
        "padded_tokens": 4,
    }
    assert [piece.name for piece in stages] == STAGES
    assert all(whole.holds(piece) for piece in stages)
    assert spans(tracks["batches"]) == [(0, 300), (0, 10), (10, 30), (200, 230), (230, 300)]
    assert spans(tracks["queue"]) == [(-100, 0)]
    assert tracks["queue"][0].args == {"batch": 0, "rows": 3, "mean_us": 50.0}
    assert spans(tracks["device"]) == [(10, 200)]


def test_launches_copies_and_kernels_have_their_tracks() -> None:
    tracks = drawn(
        [batch(0)],
        seen("cuda_runtime", 15, 6, "cudaGraphLaunch", correlation=1),
        seen("cuda_driver", 22, 2, "cuLaunchKernel", correlation=2),
        seen("gpu_memcpy", 20, 3, "Memcpy HtoD", tid=STREAM, bytes=80),
        seen("kernel", 25, 60, "lstm", tid=STREAM, correlation=1),
        seen("kernel", 30, 10, "beside", tid=8, correlation=2),
        seen("gpu_memset", 90, 2, "Memset", tid=STREAM),
        seen("python_function", 20, 5),
        seen("cuda_runtime", 40, 1, "cudaEventQuery"),
    )
    assert list(tracks) == [
        "queue",
        "batches",
        "device",
        "launches",
        "copies, stream 7",
        "kernels, stream 7",
        "kernels, stream 8",
    ]
    assert spans(tracks["launches"]) == [(15, 21), (22, 24)], "the clock follows the shortest mark"
    assert [piece.name for piece in tracks["copies, stream 7"]] == ["Memcpy HtoD", "Memset"]
    assert tracks["copies, stream 7"][0].args == {"bytes": 80}
    assert spans(tracks["kernels, stream 7"]) == [(25, 85)]
    device, launch = tracks["device"][0], tracks["batches"][2]
    assert all(launch.holds(piece) for piece in tracks["launches"])
    assert all(device.holds(piece) for name in tracks for piece in tracks[name] if name.startswith(("copies", "kernels")))


def test_batches_in_flight_have_two_tracks_and_share_the_device() -> None:
    tracks = drawn([batch(0), batch(150, free_us=200), batch(310, free_us=350)])
    assert list(tracks) == ["queue", "batches", "batches (2)", "device"]
    assert [piece.args["batch"] for piece in tracks["batches"] if piece.args] == [0, 2]
    assert [piece.args["batch"] for piece in tracks["batches (2)"] if piece.args] == [1]
    assert spans(tracks["device"]) == [(10, 200), (200, 350), (350, 510)]
