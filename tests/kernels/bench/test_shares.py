"""What a convolution multiplies is counted window by window, and its share is over a product that was timed in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.bench import report
from kernels.bench.report import SHARE, Row
from kernels.bench.shares import multiplications, shares
from kernels.bench.timing import Spread
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import tiny

PRODUCT = Workload("conv", 1, 10, 10, 10, kind="product")
DENSE = tiny("conv", "dense-conv", "equal", form="width 3")


def timed(workload: Workload, backend: str, median_us: float, timing: str = "kernel") -> Row:
    return Row(workload, backend, timing, Spread(median_us, median_us, median_us, 20), 0.0)


@pytest.mark.parametrize(
    "workload, expected",
    [
        (PRODUCT, 1000),
        (DENSE, 3 * 7 * 3 * 6 * 6),
        (tiny("conv", "dense-conv", "equal", form="width 5"), 3 * 7 * 5 * 6 * 6),
        (tiny("conv", "text-cnn", "equal"), 3 * (5 * 3 + 4 * 4 + 3 * 5) * 6 * 2),
        (tiny("conv", "text-cnn-ids", "equal"), 3 * (5 * 3 + 4 * 4 + 3 * 5) * 6 * 2),
        (tiny("conv", "tcn", "equal"), 8 * 3 * 7 * 3 * 6 * 6),
        (tiny("conv", "tcn-last", "equal"), None),
        (tiny("conv", "text-cnn-ids", "equal", form="folded"), None),
        (tiny("lstm"), None),
    ],
    ids=str,
)
def test_only_windows_that_come_out_are_counted(workload: Workload, expected: int | None) -> None:
    assert multiplications(workload) == expected


def test_a_row_that_is_shorter_than_a_filter_has_no_windows_of_it() -> None:
    assert multiplications(Workload("conv", 1, 4, 6, 6, kind="text-cnn")) == (2 * 3 + 1 * 4 + 0) * 6 * 2


def test_questions_are_counted_without_padding() -> None:
    questions = replace(DENSE, lengths="questions")
    assert multiplications(questions) == sum(questions.row_lengths()) * 3 * 6 * 6


def test_a_share_is_over_the_product_of_the_same_timing_and_dtype() -> None:
    rows = [
        timed(PRODUCT, "one product", 1.0),
        timed(PRODUCT, "one product", 2.0, "eager"),
        timed(DENSE, "quick", 4.536),
        timed(DENSE, "quick", 4.536, "eager"),
        timed(DENSE, "quick", 4.536, "replay"),
        timed(replace(DENSE, dtype="float16"), "quick", 4.536),
        timed(tiny("conv", "tcn-last"), "quick", 1.0),
    ]
    after = shares(rows)
    assert [row.extra for row in after] == [{}, {}, {SHARE: 0.5}, {SHARE: 1.0}, {}, {}, {}]
    assert [replace(row, extra={}) for row in after] == rows


def test_other_families_have_no_shares() -> None:
    rows = [timed(tiny("lstm"), "quick", 1.0), timed(tiny("sru", "copy"), "device copy", 1.0)]
    assert shares(rows) == rows


def test_what_was_known_of_a_row_stays_beside_its_share() -> None:
    row = replace(timed(DENSE, "im2col + product", 2.268), extra={report.MEMORY: 3.0})
    assert shares([timed(PRODUCT, "one product", 1.0), row])[1].extra == {report.MEMORY: 3.0, SHARE: 1.0}
