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


def on_cpu(begin_us: float) -> TracedBatch:
    traced = batch(begin_us, asynchronous=False, by="launches", padded_tokens=0)
    return replace(traced, launched=traced.ended)


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


def test_cpu_batch_has_a_compute_stage_and_nested_operations() -> None:
    outer, inner, beside = seen("cpu_op", 20, 100, "outer"), seen("cpu_op", 30, 90, "inner"), seen("cpu_op", 120, 5, "beside")
    tracks = drawn([on_cpu(0)], inner, beside, outer)
    assert list(tracks) == ["queue", "batches", "operations"]
    assert [piece.name for piece in tracks["batches"]] == ["words", "stage_in", "compute", "stage_out", "reply"]
    assert [piece.name for piece in tracks["operations"]] == ["outer", "inner", "beside"]
    assert all(tracks["batches"][2].holds(piece) for piece in tracks["operations"])


def test_operation_that_outlasts_its_caller_is_cut() -> None:
    tracks = drawn([on_cpu(0)], seen("cpu_op", 20, 50, "outer"), seen("cpu_op", 30, 40.001, "inner"))
    assert spans(tracks["operations"]) == [(20, 70), (30, 70)]


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


def test_overlapping_kernels_of_a_stream_have_two_tracks() -> None:
    tracks = drawn([batch(0)], *(seen("kernel", 30 + 20 * number, 30, str(number), tid=STREAM) for number in range(4)))
    assert [piece.name for piece in tracks["kernels, stream 7"]] == ["0", "2"]
    assert [piece.name for piece in tracks["kernels, stream 7 (2)"]] == ["1", "3"]


def test_batches_in_flight_have_two_tracks_and_share_the_device() -> None:
    tracks = drawn([batch(0), batch(150, free_us=200), batch(310, free_us=350)])
    assert list(tracks) == ["queue", "batches", "batches (2)", "device"]
    assert [piece.args["batch"] for piece in tracks["batches"] if piece.args] == [0, 2]
    assert [piece.args["batch"] for piece in tracks["batches (2)"] if piece.args] == [1]
    assert spans(tracks["device"]) == [(10, 200), (200, 350), (350, 510)]


def test_batches_that_waited_together_have_two_queue_tracks() -> None:
    tracks = drawn([batch(0), batch(310, arrivals=[START - 60e-6])])
    assert spans(tracks["queue"]) == [(-100, 0)]
    assert spans(tracks["queue (2)"]) == [(-60, 310)]


def test_batches_answered_together_are_not_nested() -> None:
    together = batch(0).replied
    tracks = drawn([batch(0), batch(50, free_us=200, ended=together, split=together, replied=together)])
    assert [piece.args["batch"] for piece in tracks["batches"] if piece.args] == [0]
    assert [piece.args["batch"] for piece in tracks["batches (2)"] if piece.args] == [1]


def test_late_seen_end_does_not_take_the_next_kernels() -> None:
    batches = [batch(0), batch(100, free_us=200)]
    asked = [seen("cuda_runtime", at, 5, "cudaGraphLaunch", correlation=number) for number, at in enumerate((15, 115))]
    ran = [seen("kernel", at, 30, tid=STREAM, correlation=number) for number, at in enumerate((40, 150))]
    tracks = drawn(batches, *asked, *ran)
    assert spans(tracks["device"]) == [(10, 150), (150, 300)]
    assert all(device.holds(kernel) for device, kernel in zip(tracks["device"], tracks["kernels, stream 7"], strict=True))


def test_events_of_other_batches_are_not_drawn() -> None:
    before = [seen("cuda_runtime", -5, 3, "before"), seen("kernel", 2, 3, "of the previous batch", tid=STREAM)]
    after = [seen("cuda_runtime", 210, 3, "after"), seen("kernel", 220, 3, "after", tid=STREAM)]
    within = [seen("cuda_runtime", 15, 3, "within"), seen("kernel", 20, 3, "within", tid=STREAM)]
    tracks = drawn([batch(0)], *before, *within, *after)
    assert [piece.name for piece in tracks["launches"]] == [piece.name for piece in tracks["kernels, stream 7"]] == ["within"]


def test_batch_that_runs_again_has_no_queue_slice() -> None:
    assert list(drawn([batch(0, arrivals=())])) == ["batches", "device"]


def test_profiler_events_need_a_clock_mark() -> None:
    found = events(2, "cuda:0", [batch(0)], [seen("kernel", 20, 3)], MARKS)
    assert [*traces.processes({"traceEvents": found})["engine-2 cuda:0"]] == ["queue", "batches", "device"]


def test_each_engine_is_a_named_process() -> None:
    both = events(0, "cuda:0", [batch(0)], [], []) + events(1, "cuda:1", [], SEEN_MARKS, MARKS)
    found = traces.processes({"traceEvents": both})
    assert list(found) == ["engine-0 cuda:0", "engine-1 cuda:1"]
    assert found["engine-1 cuda:1"] == {}
