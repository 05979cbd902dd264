"""Tests of ragged batches and of the compute dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.ragged import Ragged, compute_dtype, reversal_index
from tests.kernels import inputs

some_lengths = st.lists(st.integers(0, 9), max_size=9)


def numbered(lengths: list[int], offsets: torch.dtype = torch.int32) -> Ragged:
    """Return a batch whose tokens are numbered."""
    return inputs.ragged(torch.arange(sum(lengths)), lengths, offsets)


@pytest.mark.parametrize("lengths", [[], [0], [1], [7, 1, 3], [0, 4, 0, 0, 2, 0]], ids=str)
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_lengths_are_the_steps_of_each_row(lengths: list[int], offsets: torch.dtype) -> None:
    x = numbered(lengths, offsets)
    assert x.rows == len(lengths)
    assert x.lengths.tolist() == lengths


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_reversed_reverses_each_row_and_keeps_row_order(offsets: torch.dtype) -> None:
    assert numbered([3, 0, 1, 4], offsets).reversed().data.tolist() == [2, 1, 0, 3, 7, 6, 5, 4]


@given(some_lengths)
def test_reversed_reverses_each_row(lengths: list[int]) -> None:
    x = numbered(lengths)
    expected = [token for row in inputs.rows(x) for token in reversed(row.tolist())]
    assert x.reversed().data.tolist() == expected == reversal_index(x.offsets, len(x.data)).tolist()


@given(some_lengths)
def test_reversing_twice_restores_the_batch(lengths: list[int]) -> None:
    x = numbered(lengths)
    twice = x.reversed().reversed()
    assert torch.equal(twice.data, x.data)
    assert torch.equal(twice.offsets, x.offsets)


def test_reversed_moves_whole_steps() -> None:
    x = inputs.ragged(torch.arange(12).reshape(4, 3), [1, 3])
    assert x.reversed().data[:, 0].tolist() == [0, 9, 6, 3]


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_compute_dtype_is_float32_on_a_cpu(storage: torch.dtype) -> None:
    assert compute_dtype(storage, torch.device("cpu")) == torch.float32
    assert compute_dtype(storage, torch.device("cuda:0")) == storage
