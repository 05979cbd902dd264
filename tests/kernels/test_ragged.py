"""Ragged batches: rows in reverse order, windows over time, and outputs pooled by row."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.activations import FUNCTIONS, Activation
from kernels.norm import layer_norm
from kernels.pooling import pool_steps
from kernels.ragged import Outputs, Ragged, reversal_index
from kernels.windows import left_context, windows
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, encoding, joined, ragged

every_offset = pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
some_lengths, few = st.lists(st.integers(0, 7), max_size=6), st.integers(0, 5)


@every_offset
def test_reversed_reverses_each_row_and_keeps_row_order(offsets: torch.dtype) -> None:
    for lengths in ([], [0], [1], [0, 4, 0, 0, 2, 0], [3, 0, 1, 4]):
        x = inputs.ragged(torch.arange(3 * sum(lengths)).view(-1, 3), lengths, offsets)
        assert x.rows == len(lengths) and x.lengths.tolist() == lengths
        expected = [token for row in inputs.rows(x) for token in reversed(row.tolist())]
        assert x.reversed().data.tolist() == expected
        assert [3 * token for token in reversal_index(x.offsets, len(x.data)).tolist()] == [step[0] for step in expected]


# Pooling.


@every_offset
@pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 3], [0, 0], []], ids=str)
def test_outputs_are_pooled_by_row_and_zero_for_empty_rows(lengths: list[int], offsets: torch.dtype) -> None:
    x = inputs.ragged(torch.randn(sum(lengths), 6) - 3.0, lengths, offsets)
    encoded = pool_steps(x.data, x.offsets, EVERYTHING, directions=1)
    if lengths:
        by_hand = encoding(inputs.rows(x), None)
        for name in inputs.OUTPUTS:
            torch.testing.assert_close(getattr(encoded, name), getattr(by_hand, name))
    both = pool_steps(x.data, x.offsets, Outputs(last=True), directions=2)
    assert both.last is not None and both.last.shape == (len(lengths), 6)
    assert both.steps is None and both.mean is None and both.max is None
    for last, row in zip(both.last, inputs.rows(x), strict=True):
        # The output of each direction after the whole row.
        assert torch.equal(last, torch.cat((row[-1, :3], row[0, 3:])) if len(row) else row.new_zeros(6))


# Windows.


def column(row: list[int]) -> Tensor:
    """(steps, 1)"""
    return torch.tensor(row, dtype=torch.float32)[:, None]


@given(some_lengths, st.integers(1, 4), few, few, st.integers(1, 3), st.integers(1, 3), st.booleans())
@settings(max_examples=60)
def test_windows_match_those_of_each_padded_row(
    lengths: list[int], width: int, left: int, right: int, dilation: int, stride: int, with_context: bool
) -> None:
    """The context of the next chunk is the last steps of the context and the row. Steps are distinct numbers."""
    numbers = count(1)
    lengths = [*lengths, 1]  # a batch without rows has no context to stack
    rows = [[next(numbers) for _ in range(length)] for length in lengths]
    before = [[next(numbers) if with_context else 0 for _ in range(left)] for _ in rows]
    x, context = joined([column(row) for row in rows]), torch.stack([column(row) for row in before])
    windowed, kept = [], []
    for row, context_steps in zip(rows, before, strict=True):
        padded = [*context_steps, *row, *[0] * right]
        firsts = range(0, len(padded) - (width - 1) * dilation, stride)
        windowed += [[padded[first + tap * dilation] for tap in range(width)] for first in firsts]
        kept.append([*context_steps, *row][len(row) :])
    given_context = context.clone() if with_context else None
    seen = windows(x, width, left=left, right=right, dilation=dilation, stride=stride, context=given_context)
    assert seen.shape == (len(windowed), width, 1) and seen[..., 0].tolist() == windowed
    after = left_context(x, left, given_context)
    assert after[..., 0].tolist() == kept
    seen.zero_(), after.zero_()
    assert x.data[:, 0].tolist() == [number for row in rows for number in row], "the batch is not modified"
    assert given_context is None or torch.equal(given_context, context)


def test_windows_contain_whole_steps_of_one_row() -> None:
    x = ragged(torch.arange(12.0).reshape(4, 3), [1, 3])
    assert windows(x, 2).tolist() == [[[3, 4, 5], [6, 7, 8]], [[6, 7, 8], [9, 10, 11]]]
    empty = Ragged(x.data[:0], torch.zeros(1, dtype=torch.int32))
    assert windows(empty, 3, left=2).shape == (0, 3, 3) and left_context(empty, 2, None).shape == (0, 2, 3)


# Functions of every number.


@pytest.mark.parametrize(
    "kind, parameters, expected",
    [
        ("none", (), [-7.0, -1.0, 0.0, 0.5, 7.0]),
        ("relu6", (), [0.0, 0.0, 0.0, 0.5, 6.0]),
        ("leaky_relu", (0.1,), [-0.7, -0.1, 0.0, 0.5, 7.0]),
        ("thresholded_relu", (0.5,), [0.0, 0.0, 0.0, 0.0, 7.0]),
        ("elu", (2.0,), [-1.99818, -1.26424, 0.0, 0.5, 7.0]),
        ("softplus", (), [0.00091, 0.31326, 0.69315, 0.97408, 7.00091]),
        ("hard_sigmoid", (0.2, 0.5), [0.0, 0.3, 0.5, 0.6, 1.0]),
        ("hard_tanh", (), [-1.0, -1.0, 0.0, 0.5, 1.0]),
        ("clip", (-2.0, 0.25), [-2.0, -1.0, 0.0, 0.25, 0.25]),
        ("scaled_tanh", (2.0, 0.5), [-1.99636, -0.92423, 0.0, 0.48984, 1.99636]),
        ("affine", (2.0, 0.5), [-13.5, -1.5, 0.5, 1.5, 14.5]),
    ],
)
def test_activation_is_that_of_onnx(kind: str, parameters: tuple[float, ...], expected: list[float]) -> None:
    values = Activation(kind, parameters)(torch.tensor([-7.0, -1.0, 0.0, 0.5, 7.0]))
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert kind in FUNCTIONS


def test_layer_norm_is_that_of_torch() -> None:
    values, norm = torch.randn(3, 5), torch.randn(2, 5)
    module = torch.nn.LayerNorm(5, eps=0.1).requires_grad_(False)
    module.load_state_dict({"weight": norm[0], "bias": norm[1]})
    assert torch.equal(layer_norm(values, norm, 0.1), module(values))
