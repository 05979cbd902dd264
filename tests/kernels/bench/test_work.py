"""The least work of a workload, counted by hand: rows of 10, 17, ... steps are not padded, and folded layers multiply no inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.bench.work import ReadArray, multiplications, weights_read
from kernels.bench.workload import VOCABULARY, Workload
from tests.kernels.bench.conftest import ENCODERS, RECURRENCE, tiny

PRODUCT = Workload("conv", 1, 10, 10, 10, kind="product")
WINDOWS = 3 * (5 * 3 + 4 * 4 + 3 * 5)
"""Taps of the windows of widths 3, 4 and 5 in three rows of 7 steps."""
TOKENS = sum(tiny("lstm").row_lengths())
LONGEST = max(tiny("lstm").row_lengths())


def folded(family: str, form: str | None = None, lengths: str = "questions") -> Workload:
    return replace(tiny(family, "folded", lengths, form=form), inputs=VOCABULARY)


@pytest.mark.parametrize(
    "workload, expected",
    [
        (PRODUCT, 1000),
        (tiny("conv", "dense-conv", "equal", form="width 3"), 3 * 7 * 3 * 6 * 6),
        (tiny("conv", "dense-conv", "equal", form="width 5"), 3 * 7 * 5 * 6 * 6),
        (tiny("conv", "dense-conv", form="width 5"), TOKENS * 5 * 6 * 6),
        (tiny("conv", "text-cnn", "equal"), WINDOWS * 6 * 2),
        (tiny("conv", "text-cnn-ids", "equal"), WINDOWS * 6 * 2),
        (tiny("conv", "text-cnn-ids", "equal", form="folded"), 0),
        (tiny("conv", "tcn", "equal"), 8 * 3 * 7 * 3 * 6 * 6),
        # Layers with gaps of 8 steps or more see one step; layers with gaps of 4, 2 and 1 are needed at 1, 2 and 4 of 7 steps.
        (tiny("conv", "tcn-last", "equal"), 3 * (5 + 1 + 2 + 4) * 3 * 6 * 6),
        (tiny("lstm"), TOKENS * 4 * 6 * (6 + 6)),
        (tiny("gru", lengths="equal"), 21 * 3 * 6 * (6 + 6)),
        (folded("lstm"), TOKENS * 4 * 6 * 6),
        (RECURRENCE, TOKENS * 4 * 6 * 6),
        # Two directions of two levels, which read 5 and 12 columns.
        (ENCODERS[0], 21 * 2 * 4 * 6 * (2 * 6 + 5 + 12)),
        (ENCODERS[1], 21 * 4 * 6 * (3 * 6 + 5 + 6 + 6)),
        # Two blocks of gates decide the cell; the third is needed where the answer is.
        (tiny("sru"), (2 * TOKENS + 3) * 6 * 6),
        (tiny("sru", "every-step", "equal"), 3 * 21 * 6 * 6),
        (tiny("qrnn", lengths="equal", form="window 1"), (2 * 21 + 3) * 6 * 6),
        (tiny("qrnn", lengths="equal", form="window 2"), (2 * 21 + 3) * 6 * 12),
        (folded("sru"), 0),
        (folded("qrnn", "window 1"), 0),
    ],
    ids=str,
)
def test_needed_multiplications_are_counted(workload: Workload, expected: int) -> None:
    assert multiplications(workload) == expected


@pytest.mark.parametrize(
    "workload, expected",
    [
        (PRODUCT, [(400, 1)]),
        (tiny("lstm"), [(4 * 6 * 6 * 4, LONGEST), (4 * 6 * 6 * 4, 1)]),
        (replace(tiny("gru"), dtype="bfloat16"), [(3 * 6 * 6 * 2, LONGEST), (3 * 6 * 6 * 2, 1)]),
        (replace(tiny("gru"), dtype="int8"), [(3 * 6 * 6, LONGEST), (3 * 6 * 6, 1)]),
        (folded("lstm"), [(4 * 6 * 6 * 4, LONGEST), (TOKENS * 4 * 6 * 4, 1)]),
        (RECURRENCE, [(4 * 6 * 6 * 4, LONGEST)]),
        (ENCODERS[0], [*[(4 * 6 * 6 * 4, 7)] * 4, *[(4 * 6 * 5 * 4, 1)] * 2, *[(4 * 6 * 12 * 4, 1)] * 2]),
        (tiny("sru"), [(3 * 6 * 6 * 4, 1)]),
        (tiny("qrnn", form="window 2"), [(3 * 6 * 12 * 4, 1)]),
        # The table of a folded SRU also has the skip.
        (folded("sru"), [((2 * TOKENS + 2 * 3) * 6 * 4, 1)]),
        (folded("qrnn", "window 1"), [((2 * TOKENS + 3) * 6 * 4, 1)]),
        (tiny("conv", "text-cnn", "equal"), [(12 * 6 * 2 * 4, 1)]),
        (tiny("conv", "text-cnn-ids", "equal"), [(12 * 6 * 2 * 4, 1), (21 * 6 * 4, 1)]),
        (tiny("conv", "text-cnn-ids", "equal", form="folded"), [(WINDOWS * 2 * 4, 1)]),
        (tiny("conv", "tcn", "equal"), [(8 * 3 * 6 * 6 * 4, 1)]),
    ],
    ids=str,
)
def test_recurrent_weights_are_read_in_every_step(workload: Workload, expected: list[tuple[int, int]]) -> None:
    assert weights_read(workload) == [ReadArray(*array) for array in expected]
