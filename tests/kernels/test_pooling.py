"""Tests of `pool_steps` against pooling row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.pooling import pool_steps
from kernels.ragged import Outputs
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, encoding

every_batch = pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 3], [0, 0], []], ids=str)


@every_batch
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_outputs_are_pooled_by_row_and_zero_for_empty_rows(lengths: list[int], offsets: torch.dtype) -> None:
    x = inputs.ragged(torch.randn(sum(lengths), 6) - 3.0, lengths, offsets)
    encoded = pool_steps(x.data, x.offsets, EVERYTHING, directions=1)
    if lengths:
        by_hand = encoding(inputs.rows(x), None)
        for name in inputs.OUTPUTS:
            torch.testing.assert_close(getattr(encoded, name), getattr(by_hand, name))
    assert encoded.last is not None and encoded.last.shape == (len(lengths), 6)


@every_batch
def test_last_is_each_directions_output_after_the_row(lengths: list[int]) -> None:
    x = inputs.ragged(torch.randn(sum(lengths), 6), lengths)
    encoded = pool_steps(x.data, x.offsets, Outputs(last=True), directions=2)
    assert encoded.last is not None and encoded.steps is None and encoded.mean is None and encoded.max is None
    for last, row in zip(encoded.last, inputs.rows(x), strict=True):
        expected = torch.cat((row[-1, :3], row[0, 3:])) if len(row) else row.new_zeros(6)
        assert torch.equal(last, expected)
