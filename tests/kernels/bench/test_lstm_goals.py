"""Goals of the LSTM are met, missed or open for figures computed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kernels.bench import goals
from kernels.bench.goals.on_cuda import GOALS, QUESTIONS, RECURRENCES, equal
from kernels.bench.report import Measurement
from kernels.bench.workload import Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import judged, measured, timed, tiny

BACKENDS = ("quick", "thorough", "reference")
ONE_ROW = Workload("lstm", 1, 64, 512, 512, dtype="float16")


def against(baseline: str, timing: str, ratios: dict[Workload, float]) -> list[Measurement]:
    """Return times of 10 us for us, and of `ratios` times as long for a baseline."""
    ours = [timed(workload, "quick", 10.0, timing) for workload in ratios]
    return ours + [timed(workload, baseline, 10.0 * ratio, timing) for workload, ratio in ratios.items()]


def lines(measurements: Iterable[Measurement]) -> dict[str, str]:
    return judged(measurements, BACKENDS)[0]


def sizes(workloads: Iterable[Workload]) -> set[tuple[int, int]]:
    return {(workload.hidden, workload.rows) for workload in workloads}


def test_goals_use_the_workloads_of_a_full_run() -> None:
    assert sizes(QUESTIONS) == {(hidden, rows) for hidden in (128, 256, 512) for rows in (8, 32, 64)}
    assert sizes(RECURRENCES) == {(hidden, rows) for hidden in (128, 256, 512) for rows in (1, 8)}
    assert ONE_ROW in equal("lstm")


@pytest.mark.parametrize(
    "hidden, of_64, of_320, step, fixed",
    [
        (256, 32.0, 134.4, "0.4 us quick <= 0.45 us met", "6.4 us quick <= 8 us met"),
        (256, 40.0, 168.0, "0.5 us quick <= 0.45 us missed", "8 us quick <= 8 us met"),
        (512, 40.0, 168.0, "0.5 us quick <= 0.6 us met", "8 us quick <= 8 us met"),
        (512, 40.0, 142.4, "0.4 us quick <= 0.6 us met", "14.4 us quick <= 8 us missed"),
    ],
)
def test_step_and_fixed_cost_come_from_two_lengths(hidden: int, of_64: float, of_320: float, step: str, fixed: str) -> None:
    short = next(workload for workload in RECURRENCES if (workload.hidden, workload.rows) == (hidden, 8))
    shown = lines([timed(short, "quick", of_64), timed(replace(short, steps=320), "quick", of_320)])
    size = f"hidden {hidden}, 8 x 64"
    assert shown == {f"recurrence, a step, {size}": step, f"recurrence, fixed, {size}": fixed}


def test_one_length_has_no_slope() -> None:
    assert lines([timed(RECURRENCES[0], "quick", 32.0)]) == {}


def test_questions_are_compared_with_packed_and_padded_rows() -> None:
    packed = against("torch packed", "eager", dict.fromkeys(QUESTIONS, 6.0))
    shown, grids = judged(packed + against("torch padded", "kernel", dict.fromkeys(QUESTIONS, 2.0)), BACKENDS)
    assert shown["questions, torch packed, eager, geometric mean"] == "6 over 9 of 9 >= 5 met"
    assert shown["questions, torch packed, eager, hidden 256, 64 questions"] == "6 quick >= 8 missed"
    assert shown["questions, torch padded, kernel, smallest"] == "2 hidden 128, 8 questions"
    assert [grid[1:] for grid in grids] == [
        [[f"{rows} questions", *[value] * 3] for rows in (8, 32, 64)] for value in ("6", "2")
    ]


def test_loops_are_compared_with_our_eager_time_of_one_row() -> None:
    ours, loops = timed(ONE_ROW, "quick", 50.0, "eager"), {"torch by gate": 8000.0, "torch by step": 5000.0}
    shown = lines([ours, *(timed(ONE_ROW, baseline, median_us, "eager") for baseline, median_us in loops.items())])
    assert shown == {
        "torch by gate, eager, hidden 512, 1 x 64": "160 quick >= 140 met",
        "torch by step, eager, hidden 512, 1 x 64": "100 quick",
    }


def test_our_time_is_that_of_the_first_backend() -> None:
    times = {"thorough": 50.0, "quick": 100.0, "reference": 10.0, "torch by gate": 15000.0}
    shown = lines([timed(ONE_ROW, backend, median_us, "eager") for backend, median_us in times.items()])
    assert shown == {"torch by gate, eager, hidden 512, 1 x 64": "150 quick >= 140 met"}


def test_first_backend_without_a_kernel_time_is_not_replaced() -> None:
    ours = [timed(ONE_ROW, "quick", 9.0, "eager"), timed(ONE_ROW, "thorough", 10.0)]
    assert lines([*ours, timed(ONE_ROW, "torch padded", 40.0)]) == {}


@pytest.mark.parametrize("family", ["lstm", "qrnn"])
def test_other_runs_have_no_goals(family: str) -> None:
    assert goals.table(GOALS, measured(tiny(family)).measurements, ["framework"]) == ""


def test_no_workload_on_a_cpu_has_a_goal_of_a_gpu() -> None:
    assert not {*equal("lstm"), *QUESTIONS, *RECURRENCES} & set(workloads("lstm", "cpu", quick=False))
