"""Windows over time: each has only the steps and the padding of its row."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.windows import left_context, windows
from tests.kernels.inputs import joined, ragged

some_lengths = st.lists(st.integers(0, 7), max_size=6)
few = st.integers(0, 5)


class NumberedRows(NamedTuple):
    """NumberedRows of distinct non-zero numbers, and the context before them."""

    steps: list[list[int]]
    before: list[list[int]]

    @property
    def data(self) -> list[Tensor]:
        return [column(row) for row in self.steps]

    @property
    def context(self) -> Tensor:
        return torch.stack([column(row) for row in self.before])


def column(row: list[int]) -> Tensor:
    """(steps, 1)"""
    return torch.tensor(row, dtype=torch.float32)[:, None]


def numbered(lengths: list[int], left: int) -> NumberedRows:
    numbers = count(1)
    return NumberedRows(
        *([[next(numbers) for _ in range(length)] for length in each] for each in (lengths, [left] * len(lengths)))
    )


@given(some_lengths, st.integers(1, 4), few, few, st.integers(1, 3), st.integers(1, 3))
def test_windows_match_those_of_each_padded_row(
    lengths: list[int], width: int, left: int, right: int, dilation: int, stride: int
) -> None:
    rows = numbered([*lengths, 1], left)  # a batch without rows has no context to stack
    for context, before in ((None, [[0] * left for _ in rows.steps]), (rows.context, rows.before)):
        expected = []
        for row, context_steps in zip(rows.steps, before, strict=True):
            padded = [*context_steps, *row, *[0] * right]
            firsts = range(0, len(padded) - (width - 1) * dilation, stride)
            expected += [[padded[first + tap * dilation] for tap in range(width)] for first in firsts]
        seen = windows(joined(rows.data), width, left=left, right=right, dilation=dilation, stride=stride, context=context)
        assert seen.shape == (len(expected), width, 1)
        assert seen[..., 0].tolist() == expected


@given(some_lengths, few)
def test_left_context_is_the_last_steps_of_context_and_row(lengths: list[int], left: int) -> None:
    rows = numbered([*lengths, 1], left)
    for context, before in ((None, [[0] * left for _ in rows.steps]), (rows.context, rows.before)):
        expected = [[*context_steps, *row][len(row) :] for row, context_steps in zip(rows.steps, before, strict=True)]
        assert left_context(joined(rows.data), left, context)[..., 0].tolist() == expected


def test_row_shorter_than_the_filter_has_no_window() -> None:
    assert windows(ragged(torch.ones(6, 2), [2, 0, 3, 1]), 3).shape == (1, 3, 2)


def test_batch_without_rows_has_no_windows() -> None:
    x = ragged(torch.zeros(0, 2), [])
    assert windows(x, 3, left=2).shape == (0, 3, 2)
    assert left_context(x, 2, None).shape == (0, 2, 2)


def test_windows_contain_whole_steps() -> None:
    x = ragged(torch.arange(12.0).reshape(4, 3), [1, 3])
    assert windows(x, 2).tolist() == [[[3, 4, 5], [6, 7, 8]], [[6, 7, 8], [9, 10, 11]]]


def test_batch_and_context_are_not_modified() -> None:
    x, context = ragged(torch.ones(4, 3), [1, 3]), torch.ones(2, 2, 3)
    windows(x, 2, left=2, right=1, context=context).zero_()
    left_context(x, 2, context).zero_()
    assert x.data.all() and context.all()
