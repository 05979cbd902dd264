"""A share refers to the measured peaks on a CPU, where the larger of two times is the bound, and to a product on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.bench.peaks import Peaks
from kernels.bench.report import FMA_SHARE, READ_SHARE, SHARE
from kernels.bench.shares import bound, with_shares_of_product
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import timed, tiny

PRODUCT = Workload("conv", 1, 10, 10, 10, kind="product")
DENSE = tiny("conv", "dense-conv", "equal", form="width 3")
"""2,268 multiplications."""
PEAKS = Peaks(1000.0, {1 << 18: 100.0, 1 << 20: 50.0})


def one_row(hidden: int, rows: int = 1) -> Workload:
    return Workload("lstm", rows, 10, hidden, hidden, kind="recurrence")


@pytest.mark.parametrize(
    "workload, name, least_us",
    [
        # 10 steps of 4 x 128 x 128 weights, 256 KiB: they are read in 26,214 us, and multiplied in 655 us for each row.
        (one_row(128), READ_SHARE, 10 * (1 << 18) / 100),
        (one_row(128, rows=39), READ_SHARE, 10 * (1 << 18) / 100),
        (one_row(128, rows=41), FMA_SHARE, 41 * 10 * (1 << 16) / 1000),
        (one_row(256), READ_SHARE, 10 * (1 << 20) / 50),
        (tiny("sru", "folded"), READ_SHARE, (2 * sum(tiny("sru").row_lengths()) + 2 * 3) * 6 * 4 / 100),
        # The matrix of 400 bytes is read in 4 us, and needs 1,000 multiplications.
        (PRODUCT, READ_SHARE, 4.0),
        (replace(PRODUCT, steps=100), FMA_SHARE, 10.0),
    ],
    ids=str,
)
def test_larger_of_two_times_is_the_bound(workload: Workload, name: str, least_us: float) -> None:
    lower = bound(workload, PEAKS)
    assert lower.share == name and lower.least_us == pytest.approx(least_us)


def test_share_is_relative_to_a_product_with_the_same_timing() -> None:
    measurements = [
        timed(PRODUCT, "one product", 1.0),
        timed(PRODUCT, "one product", 2.0, "eager"),
        timed(DENSE, "quick", 4.536),
        timed(DENSE, "quick", 4.536, "eager"),
        timed(DENSE, "quick", 4.536, "replay"),
        timed(replace(DENSE, dtype="float16"), "quick", 4.536),
        timed(tiny("conv", "text-cnn-ids", form="folded"), "quick", 1.0),
    ]
    after = with_shares_of_product(measurements)
    assert [one.extra for one in after] == [{}, {}, {SHARE: 0.5}, {SHARE: 1.0}, {}, {}, {}]
    assert [replace(one, extra={}) for one in after] == measurements
