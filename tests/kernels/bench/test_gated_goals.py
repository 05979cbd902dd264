"""Goals of the LSTM and the GRU against cuDNN are met, missed or open for figures computed by hand."""

from __future__ import annotations

from itertools import product

import pytest

from kernels.bench.goals.on_cuda import equal
from kernels.bench.report import Measurement
from kernels.bench.workload import Workload
from kernels.bench.workloads import bidirectional, deep, workloads
from tests.kernels.bench.conftest import judged, timed

BACKENDS = ("quick", "reference")
FAMILIES = ("lstm", "gru")
Sizes = set[tuple[int, int]]


def padded(ratios: dict[Workload, float]) -> list[Measurement]:
    """Return kernel times of 10 us for us, and of `ratios` times as long for padded cuDNN."""
    ours = [timed(workload, "quick", 10.0) for workload in ratios]
    return ours + [timed(workload, "torch padded", 10.0 * ratio) for workload, ratio in ratios.items()]


def lines(ratios: dict[Workload, float], family: str) -> dict[str, str]:
    """Return the results of the goals by name, without the common beginning of the names."""
    begin = f"{family}, torch padded, kernel, "
    shown, _ = judged(padded(ratios), BACKENDS)
    assert all(name.startswith(begin) for name in shown)
    return {name.removeprefix(begin): result for name, result in shown.items()}


def cell(family: str, hidden: int, rows: int, dtype: str = "float16") -> Workload:
    (found,) = (work for work in equal(family, dtype) if (work.hidden, work.rows) == (hidden, rows))
    return found


def sizes(layers: list[Workload]) -> Sizes:
    return {(workload.hidden, workload.rows) for workload in layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_goals_use_the_sizes_of_a_full_run(family: str) -> None:
    assert sizes(equal(family)) == {*product((128, 256, 512, 768, 1024, 2048), (1, 8, 32, 64, 256))}
    assert sizes(equal(family, "float32")) == {*product((128, 256, 512), (1, 8, 32, 64))}
    run = workloads(family, "cuda", quick=False)
    encoders = [bidirectional(family, 1), bidirectional(family, 32), deep(family, "float16")]
    assert [workload for workload in run if workload.kind == "encoder"] == encoders
    assert [(work.depth, work.directions, work.rows, work.steps) for work in encoders] == [
        (2, 2, 1, 64),
        (2, 2, 32, 64),
        (4, 1, 64, 100),
    ]
    assert {(work.hidden, work.dtype) for work in encoders} == {(512, "float16")}


@pytest.mark.parametrize("family", FAMILIES)
def test_goals_of_the_grid_are_met_by_every_size(family: str) -> None:
    ratios = dict.fromkeys(equal(family), 4.0)
    assert lines(ratios, family) == {
        "geometric mean": "4 over 30 of 30 >= 2.9 met",
        "smallest": "4 hidden 128, 1 x 64 >= 1.2 met",
        "at least 1024 units and 64 rows, smallest": "4 hidden 1024, 64 x 64 >= 1.5 met",
    }
    _, (grid,) = judged(padded(ratios), BACKENDS)
    assert grid[0] == [f"{family}, torch padded, kernel, smallest: quick", "128", "256", "512", "768", "1024", "2048"]
    assert grid[1:] == [[f"{rows} x 64", *["4"] * 6] for rows in (1, 8, 32, 64, 256)]


@pytest.mark.parametrize(
    "hidden, rows, ratio, smallest, large",
    [
        (512, 64, 1.19, "1.19 hidden 512, 64 x 64 >= 1.2 missed", "4 hidden 1024, 64 x 64 >= 1.5 met"),
        (1024, 256, 1.49, "1.49 hidden 1024, 256 x 64 >= 1.2 met", "1.49 hidden 1024, 256 x 64 >= 1.5 missed"),
        (1024, 32, 1.49, "1.49 hidden 1024, 32 x 64 >= 1.2 met", "4 hidden 1024, 64 x 64 >= 1.5 met"),
    ],
)
def test_slowest_size_is_named(hidden: int, rows: int, ratio: float, smallest: str, large: str) -> None:
    shown = lines({**dict.fromkeys(equal("lstm"), 4.0), cell("lstm", hidden, rows): ratio}, "lstm")
    assert shown["smallest"] == smallest and shown["at least 1024 units and 64 rows, smallest"] == large


def test_mean_is_geometric_and_open_without_all_sizes() -> None:
    shown = lines({cell("lstm", 128, 1): 2.0, cell("lstm", 128, 8): 8.0}, "lstm")
    assert shown == {"geometric mean": "4 over 2 of 30 >= 2.9 open", "smallest": "2 hidden 128, 1 x 64 >= 1.2 open"}


def test_goal_missed_by_some_sizes_is_missed() -> None:
    assert lines({cell("gru", 128, 1): 1.0}, "gru")["geometric mean"] == "1 over 1 of 30 >= 2.9 missed"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_has_goals_by_rows(family: str) -> None:
    by_rows = {1: 4.0, 8: 9.0, 32: 1.9, 64: 0.9}
    assert lines({layer: by_rows[layer.rows] for layer in equal(family, "float32")}, family) == {
        "float32, up to 8 rows, geometric mean": "6 over 6 of 6 >= 3 met",
        "float32, 32 rows, geometric mean": "1.9 over 3 of 3 >= 2 missed",
        "float32, smallest": "0.9 hidden 128, 64 x 64 >= 1 missed",
    }


@pytest.mark.parametrize("family, limit", [("lstm", " >= 2.5 missed"), ("gru", "")])
def test_encoders_have_goals_of_their_own(family: str, limit: str) -> None:
    assert lines({bidirectional(family, 1): 4.0, bidirectional(family, 32): 3.9, deep(family, "float16"): 2.4}, family) == {
        "2 levels, both directions, hidden 512, 1 x 64": "4 quick >= 4 met",
        "2 levels, both directions, hidden 512, 32 x 64": "3.9 quick >= 4 missed",
        "4 levels, hidden 512, 64 x 100": f"2.4 quick{limit}",
    }
