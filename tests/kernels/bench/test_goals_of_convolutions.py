"""Goals of the convolutions, by figures that can be checked by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from kernels.bench import goals
from kernels.bench.convolutions import LARGE, PRODUCT
from kernels.bench.goals.conv import MANY_ROWS, ONE_ROW, TEMPORAL, VECTORS
from kernels.bench.report import Row
from kernels.bench.timing import Spread
from kernels.bench.workload import Workload
from kernels.bench.workloads import workloads

BACKENDS = ("quick", "framework")

LARGE_OPERATIONS = 2 * 256 * 512 * 512 * (126 * 3 + 125 * 4 + 124 * 5)
"""Of 256 rows of 128 steps, 512 -> 3 x 512: windows times width of each of the three."""


def timed(workload: Workload, backend: str, median_us: float, timing: str = "kernel") -> Row:
    return Row(workload, backend, timing, Spread(median_us, median_us, median_us, 20), 0.0)


def multiplied(tera: float) -> Row:
    """A product of 8,192 cubed at so many operations a second, in 1e12."""
    return timed(PRODUCT["cuda"], "one product", 2 * 8192**3 / tera / 1e6)


def found(rows: Iterable[Row]) -> dict[str, str]:
    """What was found, the goal and the verdict, by what they are about."""
    cells = [re.split(" {2,}", line) for line in goals.table(rows, BACKENDS).splitlines()]
    return {what: " ".join(more) for what, *more in cells[1:]}


def test_the_goals_speak_of_the_workloads_of_a_whole_run() -> None:
    every = workloads("conv", "cuda", quick=False)
    assert {LARGE, PRODUCT["cuda"], VECTORS, TEMPORAL, *ONE_ROW, *MANY_ROWS} <= set(every)
    assert [str(one) for one in (LARGE, TEMPORAL, ONE_ROW[0])] == [
        "conv text-cnn 256 x 128, 512 -> 1536, float16",
        "conv tcn 1 x 256, 256 -> 256, float16",
        "conv text-cnn-ids embedded 1 x 64, 300 -> 300, float16",
    ]


@pytest.mark.parametrize("share, shown", [(0.85, "0.85 >= 0.85 met"), (0.8, "0.8 >= 0.85 missed")])
def test_a_large_text_cnn_is_held_against_the_rate_of_a_product(share: float, shown: str) -> None:
    ours = timed(LARGE, "quick", LARGE_OPERATIONS / (share * 600.0) / 1e6)
    assert found([ours, multiplied(600.0)]) == {
        "one product": "600 TFLOP/s",
        "conv text-cnn 256 x 128, 512 -> 1536, float16, share of the product rate": shown,
    }


def test_without_the_rate_of_a_product_or_with_it_alone_there_is_no_share() -> None:
    assert goals.table([timed(LARGE, "quick", 1000.0)], BACKENDS) == ""
    assert goals.table([multiplied(600.0)], BACKENDS) == ""


@pytest.mark.parametrize(
    "embedded, folded, shown",
    [
        (11.0, 9.5, "9.5 us folded <= 10 us met"),
        (9.0, 12.0, "9 us embedded <= 10 us met"),
        (12.0, 10.5, "10.5 us folded <= 10 us missed"),
    ],
)
def test_of_two_forms_over_token_ids_the_faster_one_counts(embedded: float, folded: float, shown: str) -> None:
    rows = [timed(one, "quick", taken) for one, taken in zip(ONE_ROW, (embedded, folded), strict=True)]
    assert found(rows) == {"conv text-cnn-ids 1 x 64, 300 -> 300, float16": shown}


def test_one_form_alone_leaves_the_goal_open_unless_it_would_be_missed() -> None:
    (name,) = found([timed(ONE_ROW[1], "quick", 9.0)]).values()
    assert name == "9 us folded <= 10 us open"


@pytest.mark.parametrize("theirs, shown", [(90.0, "3 folded >= 3 met"), (60.0, "2 folded >= 3 missed")])
def test_many_rows_of_token_ids_are_held_against_the_library_beside_the_embedded_form(theirs: float, shown: str) -> None:
    rows = [timed(one, "quick", taken) for one, taken in zip(MANY_ROWS, (50.0, 30.0), strict=True)]
    assert found([*rows, timed(MANY_ROWS[0], "torch conv1d", theirs)]) == {
        "conv text-cnn-ids 1024 x 64, 300 -> 300, float16, torch conv1d": shown
    }
    assert found(rows) == {}


@pytest.mark.parametrize(
    "workload, limit, name",
    [(VECTORS, 3, "text-cnn 1024 x 64, 300 -> 300"), (TEMPORAL, 4, "tcn 1 x 256, 256 -> 256")],
)
def test_vectors_and_a_stack_are_held_against_the_library(workload: Workload, limit: int, name: str) -> None:
    for ratio, verdict in ((limit, "met"), (limit - 0.5, "missed")):
        rows = [timed(workload, "quick", 10.0), timed(workload, "torch conv1d", 10.0 * ratio)]
        assert found(rows) == {f"conv {name}, float16, torch conv1d": f"{ratio} >= {limit} {verdict}"}


def test_only_kernel_times_of_the_backend_that_a_caller_gets_count() -> None:
    eager = [timed(TEMPORAL, "quick", 1.0, "eager"), timed(TEMPORAL, "framework", 1.0), timed(TEMPORAL, "torch conv1d", 9.0)]
    assert found(eager) == {}


def test_none_of_the_workloads_on_a_cpu_has_a_goal() -> None:
    rows = [timed(one, backend, 1.0) for one in workloads("conv", "cpu", quick=False) for backend in ("quick", "torch conv1d")]
    assert goals.table(rows, BACKENDS) == ""
