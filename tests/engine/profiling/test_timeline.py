"""Turns and a profiler's events in, slices out: all of them made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from service.engine.profiling.timeline import Mark, Profiled, TracedBatch, events
from service.ipc.messages import ModelKey
from tests import traces
from tests.traces import Slice

START = 5000.0
"""Seconds on the clock of time.monotonic."""
BEHIND = 4000.0
"""The profiler's clock, in seconds."""
STREAM, THREAD = 7, 321
MARKS = [Mark("slow", START - 3e-3, START - 1e-3), Mark("quick", START - 20e-6, START - 10e-6), Mark("lost", START, START)]
STAGES = ["stage_in", "launch", "stage_out", "reply"]


def batch(begin_us: float, *, free_us: float = 0.0, **others: Any) -> TracedBatch:
    """A turn on a GPU: laid in 10 us, asked for in 20 more, ended after 200, apart after 230 and answered after 300."""
    began, names = START + 1e-6 * begin_us, ("staged", "launched", "ended", "apart", "replied")
    moments = {name: began + 1e-6 * after for name, after in zip(names, (10, 30, 200, 230, 300), strict=True)}
    made = TracedBatch(
        ModelKey("words", "2"),
        rows=3,
        tokens=20,
        longest=9,
        padded_tokens=4,
        by="graph",
        asynchronous=True,
        arrivals=[began - 100e-6, began - 40e-6, began - 10e-6],
        began=began,
        free=START + 1e-6 * free_us,
        **moments,
    )
    return replace(made, **others)


def on_cpu(begin_us: float) -> TracedBatch:
    made = batch(begin_us, asynchronous=False, by="launches", padded_tokens=0)
    return replace(made, launched=made.ended)


def seen(cat: str, begin_us: float, us: float, name: str = "it", tid: int = THREAD, **args: Any) -> Profiled:
    """What the profiler saw so many microseconds after START."""
    return Profiled(name, cat, 1e6 * (START - BEHIND) + begin_us, us, tid, args)


SEEN_MARKS = [
    seen("user_annotation", -2500, 900, "slow"),  # 50 us beside the middle of what is known of it
    seen("user_annotation", -17, 4, "quick"),
]


def drawn(batches: list[TracedBatch], *profiled: Profiled) -> dict[str, list[Slice]]:
    """The rows of a trace that has been through a file."""
    found = events(0, "cuda:0", batches, [*SEEN_MARKS, *profiled], MARKS)
    return traces.rows({"traceEvents": msgspec.json.decode(msgspec.json.encode(found))})


def spans(slices: list[Slice]) -> list[tuple[float, float]]:
    """When they begin and end, in microseconds after START."""
    return [((one.begin - 1e9 * START) / 1000, (one.end - 1e9 * START) / 1000) for one in slices]


def test_a_turn_is_a_slice_that_holds_its_stages_beside_its_queue_and_its_time_on_the_device() -> None:
    rows = drawn([batch(0)])
    assert list(rows) == ["queue", "batches", "device"]
    whole, *stages = rows["batches"]
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
    assert [one.name for one in stages] == STAGES
    assert all(whole.holds(one) for one in stages)
    assert spans(rows["batches"]) == [(0, 300), (0, 10), (10, 30), (200, 230), (230, 300)]
    assert spans(rows["queue"]) == [(-100, 0)]
    assert rows["queue"][0].args == {"batch": 0, "rows": 3, "mean_us": 50.0}
    assert spans(rows["device"]) == [(10, 200)]


def test_on_a_cpu_a_turn_is_computed_where_it_was_asked_for_and_operations_are_nested() -> None:
    outer, inner, beside = seen("cpu_op", 20, 100, "outer"), seen("cpu_op", 30, 90, "inner"), seen("cpu_op", 120, 5, "beside")
    rows = drawn([on_cpu(0)], inner, beside, outer)
    assert list(rows) == ["queue", "batches", "operations"]
    assert [one.name for one in rows["batches"]] == ["words", "stage_in", "compute", "stage_out", "reply"]
    assert [one.name for one in rows["operations"]] == ["outer", "inner", "beside"]
    assert all(rows["batches"][2].holds(one) for one in rows["operations"])


def test_what_the_profiler_s_clock_lets_stand_out_of_its_caller_is_cut() -> None:
    rows = drawn([on_cpu(0)], seen("cpu_op", 20, 50, "outer"), seen("cpu_op", 30, 40.001, "inner"))
    assert spans(rows["operations"]) == [(20, 70), (30, 70)]


def test_launches_copies_and_kernels_are_on_rows_of_their_own_on_the_clock_of_the_turns() -> None:
    rows = drawn(
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
    assert list(rows) == [
        "queue",
        "batches",
        "device",
        "launches",
        "copies, stream 7",
        "kernels, stream 7",
        "kernels, stream 8",
    ]
    assert spans(rows["launches"]) == [(15, 21), (22, 24)], "by the mark of which most is known"
    assert [one.name for one in rows["copies, stream 7"]] == ["Memcpy HtoD", "Memset"]
    assert rows["copies, stream 7"][0].args == {"bytes": 80}
    assert spans(rows["kernels, stream 7"]) == [(25, 85)]
    device, launch = rows["device"][0], rows["batches"][2]
    assert all(launch.holds(one) for one in rows["launches"])
    assert all(device.holds(one) for name in rows for one in rows[name] if name.startswith(("copies", "kernels")))


def test_kernels_of_a_stream_that_overlap_have_a_row_each() -> None:
    rows = drawn([batch(0)], *(seen("kernel", 30 + 20 * number, 30, str(number), tid=STREAM) for number in range(4)))
    assert [one.name for one in rows["kernels, stream 7"]] == ["0", "2"]
    assert [one.name for one in rows["kernels, stream 7 (2)"]] == ["1", "3"]


def test_turns_in_flight_together_are_on_two_rows_and_one_after_the_other_on_the_device() -> None:
    rows = drawn([batch(0), batch(150, free_us=200), batch(310, free_us=350)])
    assert list(rows) == ["queue", "batches", "batches (2)", "device"]
    assert [one.args["batch"] for one in rows["batches"] if one.args] == [0, 2]
    assert [one.args["batch"] for one in rows["batches (2)"] if one.args] == [1]
    assert spans(rows["device"]) == [(10, 200), (200, 350), (350, 510)]


def test_turns_that_waited_at_the_same_time_are_on_two_rows_of_the_queue() -> None:
    rows = drawn([batch(0), batch(310, arrivals=[START - 60e-6])])
    assert spans(rows["queue"]) == [(-100, 0)]
    assert spans(rows["queue (2)"]) == [(-60, 310)]


def test_turns_answered_together_are_not_drawn_one_within_the_other() -> None:
    together = batch(0).replied
    rows = drawn([batch(0), batch(50, free_us=200, ended=together, apart=together, replied=together)])
    assert [one.args["batch"] for one in rows["batches"] if one.args] == [0]
    assert [one.args["batch"] for one in rows["batches (2)"] if one.args] == [1]


def test_an_end_that_was_seen_late_does_not_take_the_next_turn_s_kernels() -> None:
    batches = [batch(0), batch(100, free_us=200)]
    asked = [seen("cuda_runtime", at, 5, "cudaGraphLaunch", correlation=number) for number, at in enumerate((15, 115))]
    ran = [seen("kernel", at, 30, tid=STREAM, correlation=number) for number, at in enumerate((40, 150))]
    rows = drawn(batches, *asked, *ran)
    assert spans(rows["device"]) == [(10, 150), (150, 300)]
    assert all(device.holds(kernel) for device, kernel in zip(rows["device"], rows["kernels, stream 7"], strict=True))


def test_what_was_not_of_these_turns_is_not_drawn() -> None:
    before = [seen("cuda_runtime", -5, 3, "before"), seen("kernel", 2, 3, "of the turn before", tid=STREAM)]
    after = [seen("cuda_runtime", 210, 3, "after"), seen("kernel", 220, 3, "after", tid=STREAM)]
    within = [seen("cuda_runtime", 15, 3, "within"), seen("kernel", 20, 3, "within", tid=STREAM)]
    rows = drawn([batch(0)], *before, *within, *after)
    assert [one.name for one in rows["launches"]] == [one.name for one in rows["kernels, stream 7"]] == ["within"]


def test_a_turn_that_was_run_again_row_by_row_has_no_queue() -> None:
    assert list(drawn([batch(0, arrivals=())])) == ["batches", "device"]


def test_without_a_mark_nothing_of_the_profiler_is_drawn() -> None:
    found = events(2, "cuda:0", [batch(0)], [seen("kernel", 20, 3)], MARKS)
    assert [*traces.processes({"traceEvents": found})["engine-2 cuda:0"]] == ["queue", "batches", "device"]


def test_engines_are_processes_and_one_without_a_turn_has_a_name() -> None:
    both = events(0, "cuda:0", [batch(0)], [], []) + events(1, "cuda:1", [], SEEN_MARKS, MARKS)
    found = traces.processes({"traceEvents": both})
    assert list(found) == ["engine-0 cuda:0", "engine-1 cuda:1"]
    assert found["engine-1 cuda:1"] == {}
