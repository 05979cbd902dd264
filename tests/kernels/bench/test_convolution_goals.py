"""Goals of the convolutions are met, missed or open for figures computed by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kernels.bench import goals
from kernels.bench.convolutions import LARGE, PRODUCT
from kernels.bench.goals.on_cuda import GOALS, MANY_ROWS, ONE_ROW, TEMPORAL, VECTORS
from kernels.bench.report import Measurement
from kernels.bench.workload import Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import judged, timed

BACKENDS = ("quick", "framework")

LARGE_OPERATIONS = 2 * 256 * 512 * 512 * (126 * 3 + 125 * 4 + 124 * 5)
"""256 rows of 128 steps, 512 -> 3 x 512: the windows of each filter width, times the width."""


def product(teraflops: float) -> Measurement:
    """Return the time of a product of 8,192 cubed at this rate."""
    return timed(PRODUCT["cuda"], "one product", 2 * 8192**3 / teraflops / 1e6)


def lines(measurements: Iterable[Measurement]) -> dict[str, str]:
    return judged(measurements, BACKENDS)[0]


def test_goals_use_the_workloads_of_a_full_run() -> None:
    everything = workloads("conv", "cuda", quick=False)
    assert {LARGE, PRODUCT["cuda"], VECTORS, TEMPORAL, *ONE_ROW, *MANY_ROWS} <= set(everything)
    assert [str(workload) for workload in (LARGE, TEMPORAL, ONE_ROW[0])] == [
        "conv text-cnn 256 x 128, 512 -> 1536, float16",
        "conv tcn 1 x 256, 256 -> 256, float16",
        "conv text-cnn-ids embedded 1 x 64, 300 -> 300, float16",
    ]


@pytest.mark.parametrize("share, shown", [(0.85, "0.85 >= 0.85 met"), (0.8, "0.8 >= 0.85 missed")])
def test_large_text_cnn_is_compared_with_the_rate_of_a_product(share: float, shown: str) -> None:
    ours = timed(LARGE, "quick", LARGE_OPERATIONS / (share * 600.0) / 1e6)
    assert lines([ours, product(600.0)]) == {
        "one product": "600 TFLOP/s",
        "conv text-cnn 256 x 128, 512 -> 1536, float16, share of the product rate": shown,
    }


def test_share_needs_both_rates() -> None:
    assert goals.table(GOALS, [timed(LARGE, "quick", 1000.0)], BACKENDS) == ""
    assert goals.table(GOALS, [product(600.0)], BACKENDS) == ""


@pytest.mark.parametrize(
    "embedded, folded, shown",
    [
        (11.0, 9.5, "9.5 us folded <= 10 us met"),
        (9.0, 12.0, "9 us embedded <= 10 us met"),
        (12.0, 10.5, "10.5 us folded <= 10 us missed"),
    ],
)
def test_faster_of_two_forms_over_token_ids_counts(embedded: float, folded: float, shown: str) -> None:
    measurements = [timed(form, "quick", median) for form, median in zip(ONE_ROW, (embedded, folded), strict=True)]
    assert lines(measurements) == {"conv text-cnn-ids 1 x 64, 300 -> 300, float16": shown}


def test_goal_with_one_of_two_forms_is_open() -> None:
    (line,) = lines([timed(ONE_ROW[1], "quick", 9.0)]).values()
    assert line == "9 us folded <= 10 us open"


@pytest.mark.parametrize("library_us, shown", [(90.0, "3 folded >= 3 met"), (60.0, "2 folded >= 3 missed")])
def test_many_rows_of_token_ids_are_compared_with_the_library(library_us: float, shown: str) -> None:
    ours = [timed(form, "quick", median) for form, median in zip(MANY_ROWS, (50.0, 30.0), strict=True)]
    assert lines([*ours, timed(MANY_ROWS[0], "torch conv1d", library_us)]) == {
        "conv text-cnn-ids 1024 x 64, 300 -> 300, float16, torch conv1d": shown
    }
    assert lines(ours) == {}


@pytest.mark.parametrize(
    "workload, limit, name", [(VECTORS, 3, "text-cnn 1024 x 64, 300 -> 300"), (TEMPORAL, 4, "tcn 1 x 256, 256 -> 256")]
)
def test_vectors_and_a_stack_are_compared_with_the_library(workload: Workload, limit: int, name: str) -> None:
    for ratio, verdict in ((limit, "met"), (limit - 0.5, "missed")):
        measurements = [timed(workload, "quick", 10.0), timed(workload, "torch conv1d", 10.0 * ratio)]
        assert lines(measurements) == {f"conv {name}, float16, torch conv1d": f"{ratio} >= {limit} {verdict}"}


def test_only_kernel_times_of_the_first_backend_count() -> None:
    eager = [timed(TEMPORAL, "quick", 1.0, "eager"), timed(TEMPORAL, "framework", 1.0), timed(TEMPORAL, "torch conv1d", 9.0)]
    assert lines(eager) == {}


def test_no_workload_on_a_cpu_has_a_goal_of_a_gpu() -> None:
    on_cpu = workloads("conv", "cpu", quick=False)
    measurements = [timed(workload, backend, 1.0) for workload in on_cpu for backend in ("quick", "torch conv1d")]
    assert goals.table(GOALS, measurements, BACKENDS) == ""
