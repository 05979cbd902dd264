"""Multiplications are counted by window, and a share is relative to a product with the same timing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.bench import report
from kernels.bench.report import SHARE
from kernels.bench.shares import multiplications, with_shares
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import timed, tiny

PRODUCT = Workload("conv", 1, 10, 10, 10, kind="product")
DENSE = tiny("conv", "dense-conv", "equal", form="width 3")


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
def test_only_windows_in_the_output_are_counted(workload: Workload, expected: int | None) -> None:
    assert multiplications(workload) == expected


def test_row_shorter_than_a_filter_has_no_windows() -> None:
    assert multiplications(Workload("conv", 1, 4, 6, 6, kind="text-cnn")) == (2 * 3 + 1 * 4 + 0) * 6 * 2


def test_questions_are_counted_without_padding() -> None:
    questions = replace(DENSE, lengths="questions")
    assert multiplications(questions) == sum(questions.row_lengths()) * 3 * 6 * 6


def test_share_is_relative_to_a_product_with_the_same_timing() -> None:
    measurements = [
        timed(PRODUCT, "one product", 1.0),
        timed(PRODUCT, "one product", 2.0, "eager"),
        timed(DENSE, "quick", 4.536),
        timed(DENSE, "quick", 4.536, "eager"),
        timed(DENSE, "quick", 4.536, "replay"),
        timed(replace(DENSE, dtype="float16"), "quick", 4.536),
        timed(tiny("conv", "tcn-last"), "quick", 1.0),
    ]
    after = with_shares(measurements)
    assert [one.extra for one in after] == [{}, {}, {SHARE: 0.5}, {SHARE: 1.0}, {}, {}, {}]
    assert [replace(one, extra={}) for one in after] == measurements


def test_other_families_have_no_shares() -> None:
    measurements = [timed(tiny("lstm"), "quick", 1.0), timed(tiny("sru", "copy"), "device copy", 1.0)]
    assert with_shares(measurements) == measurements


def test_share_is_added_to_other_extra_values() -> None:
    measurement = replace(timed(DENSE, "im2col + product", 2.268), extra={report.MEMORY: 3.0})
    assert with_shares([timed(PRODUCT, "one product", 1.0), measurement])[1].extra == {report.MEMORY: 3.0, SHARE: 1.0}
