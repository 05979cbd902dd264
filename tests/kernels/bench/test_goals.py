"""Goals are met, missed or open by figures that can be checked by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kernels.bench import goals
from kernels.bench.goals.lstm import EQUAL, QUESTIONS, RECURRENCES
from kernels.bench.report import Row
from kernels.bench.timing import Spread
from kernels.bench.workload import Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import measured, tiny

BACKENDS = ("quick", "thorough", "reference")
ONE_ROW = Workload("lstm", 1, 64, 512, 512, dtype="float16")


def timed(workload: Workload, backend: str, timing: str, median_us: float) -> Row:
    return Row(workload, backend, timing, Spread(median_us, median_us, median_us, 20), 0.0)


def against(peer: str, timing: str, ratios: dict[Workload, float]) -> list[Row]:
    """A peer that takes so many times the 10 us that we take."""
    ours = [timed(one, "quick", timing, 10.0) for one in ratios]
    return ours + [timed(one, peer, timing, 10.0 * ratio) for one, ratio in ratios.items()]


def found(rows: Iterable[Row]) -> dict[str, str]:
    """What was found, the goal and the verdict, by what they are about."""
    cells = [re.split(" {2,}", line) for line in goals.table(rows, BACKENDS).splitlines()]
    return {what: " ".join(more) for what, *more in cells[1:]}


def test_the_goals_speak_of_the_workloads_of_a_whole_run() -> None:
    assert {(one.hidden, one.rows) for one in EQUAL} == {
        (hidden, rows) for hidden in (128, 256, 512, 768, 1024, 2048) for rows in (1, 8, 32, 64, 256)
    }
    assert {(one.hidden, one.rows) for one in QUESTIONS} == {
        (hidden, rows) for hidden in (128, 256, 512) for rows in (8, 32, 64)
    }
    assert {(one.hidden, one.rows) for one in RECURRENCES} == {(hidden, rows) for hidden in (128, 256, 512) for rows in (1, 8)}
    assert ONE_ROW in EQUAL


def test_every_ratio_met_on_every_size_is_met() -> None:
    shown = found(against("torch padded", "kernel", dict.fromkeys(EQUAL, 4.0)))
    what = "equal lengths, torch padded, kernel"
    assert shown[f"{what}, geometric mean"] == "4 over 30 of 30 >= 3.3 met"
    assert shown[f"{what}, smallest"] == "4 hidden 128, 1 row >= 1.2 met"
    assert shown[f"{what}, hidden 2048, quick"] == "4 at 1 row, 4 at 8 rows, 4 at 32 rows, 4 at 64 rows, 4 at 256 rows"
    assert len(shown) == 6 + 2


def test_one_slow_cell_misses_the_smallest_and_is_named() -> None:
    slow = replace(ONE_ROW, rows=64)
    shown = found(against("torch padded", "kernel", {**dict.fromkeys(EQUAL, 4.0), slow: 1.19}))
    assert shown["equal lengths, torch padded, kernel, smallest"] == "1.19 hidden 512, 64 rows >= 1.2 missed"


def test_the_mean_is_geometric_and_the_goal_open_while_sizes_are_missing() -> None:
    shown = found(against("torch padded", "kernel", {EQUAL[0]: 2.0, EQUAL[1]: 8.0}))
    assert shown["equal lengths, torch padded, kernel, geometric mean"] == "4 over 2 of 30 >= 3.3 open"
    assert shown["equal lengths, torch padded, kernel, smallest"] == "2 hidden 128, 1 row >= 1.2 open"


def test_a_goal_that_some_sizes_miss_already_is_missed() -> None:
    shown = found(against("torch padded", "kernel", {EQUAL[0]: 1.0}))
    assert shown["equal lengths, torch padded, kernel, geometric mean"] == "1 over 1 of 30 >= 3.3 missed"


@pytest.mark.parametrize(
    "hidden, of_64, of_320, step, fixed",
    [
        (256, 32.0, 134.4, "0.4 us <= 0.45 us met", "6.4 us <= 8 us met"),
        (256, 40.0, 168.0, "0.5 us <= 0.45 us missed", "8 us <= 8 us met"),
        (512, 40.0, 168.0, "0.5 us <= 0.6 us met", "8 us <= 8 us met"),
        (512, 40.0, 142.4, "0.4 us <= 0.6 us met", "14.4 us <= 8 us missed"),
    ],
)
def test_a_step_and_the_fixed_cost_come_from_two_lengths(
    hidden: int, of_64: float, of_320: float, step: str, fixed: str
) -> None:
    short = next(one for one in RECURRENCES if (one.hidden, one.rows) == (hidden, 8))
    shown = found([timed(short, "quick", "kernel", of_64), timed(replace(short, steps=320), "quick", "kernel", of_320)])
    what = f"recurrence, hidden {hidden}, 8 rows, quick"
    assert shown == {f"{what}, a step": step, f"{what}, fixed": fixed}


def test_one_length_alone_has_no_slope() -> None:
    assert found([timed(RECURRENCES[0], "quick", "kernel", 32.0)]) == {}


def test_questions_are_held_against_packed_rows_and_padded_ones_stand_beside() -> None:
    packed = against("torch packed", "eager", dict.fromkeys(QUESTIONS, 6.0))
    shown = found(packed + against("torch padded", "kernel", dict.fromkeys(QUESTIONS, 2.0)))
    assert shown["questions, torch packed, eager, geometric mean"] == "6 over 9 of 9 >= 5 met"
    assert shown["questions, torch packed, eager, hidden 256, 64 rows"] == "6 >= 8 missed"
    assert shown["questions, torch packed, eager, hidden 256, quick"] == "6 at 8 rows, 6 at 32 rows, 6 at 64 rows"
    assert shown["questions, torch padded, kernel, hidden 512, quick"] == "2 at 8 rows, 2 at 32 rows, 2 at 64 rows"


def test_loops_are_held_against_our_eager_time_of_one_row() -> None:
    ours, loops = timed(ONE_ROW, "quick", "eager", 50.0), {"torch by gate": 8000.0, "torch by step": 5000.0}
    shown = found([ours, *(timed(ONE_ROW, peer, "eager", median_us) for peer, median_us in loops.items())])
    assert shown == {
        "torch by gate, eager, hidden 512, 1 row": "160 >= 140 met",
        "torch by step, eager, hidden 512, 1 row": "100",
    }


def test_ours_is_the_backend_that_comes_first_in_the_order_even_when_another_is_faster() -> None:
    times = {"thorough": 50.0, "quick": 100.0, "reference": 10.0, "torch by gate": 15000.0}
    shown = found([timed(ONE_ROW, backend, "eager", median_us) for backend, median_us in times.items()])
    assert shown == {"torch by gate, eager, hidden 512, 1 row": "150 >= 140 met"}


def test_a_backend_that_is_not_timed_in_a_graph_is_not_stood_in_for_by_the_next() -> None:
    rows = [timed(ONE_ROW, "quick", "eager", 9.0), timed(ONE_ROW, "thorough", "kernel", 10.0)]
    assert found([*rows, timed(ONE_ROW, "torch padded", "kernel", 40.0)]) == {}


@pytest.mark.parametrize("family", ["lstm", "qrnn"])
def test_other_runs_have_no_goals(family: str) -> None:
    assert goals.table(measured(tiny(family)).rows, ["framework"]) == ""


def test_none_of_the_workloads_on_a_cpu_has_a_goal() -> None:
    assert not {*EQUAL, *QUESTIONS, *RECURRENCES} & set(workloads("lstm", "cpu", quick=False))
