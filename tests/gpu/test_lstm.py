"""The LSTM's backends on a GPU against the float64 reference."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kernels.contract import LSTMState, LSTMWeights, Outputs, Ragged
from kernels.lstm import lstm

EVERYTHING = Outputs(steps=True, last=True, mean=True, max=True)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("storage", TOLERANCE, ids=str)
@pytest.mark.parametrize(("lengths", "hidden"), [([1], 1), ([7, 0, 3, 12], 33), ([0, 0], 3), ([65, 129], 151)])
def test_every_output_agrees_with_the_reference(storage: torch.dtype, lengths: list[int], hidden: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    inputs = 2 * hidden + 1
    matrices = (normal(inputs, 4 * hidden) * inputs**-0.5, normal(hidden, 4 * hidden) * hidden**-0.5, normal(4 * hidden))
    weights = LSTMWeights(*(matrix.to(storage) for matrix in matrices))
    assert weights.input is not None and weights.bias is not None
    data, state = normal(sum(lengths), inputs), LSTMState(normal(len(lengths), hidden).tanh(), normal(len(lengths), hidden))
    expected = lstm(
        Ragged(data.double(), offsets),
        LSTMWeights(weights.input.double(), weights.recurrent.double(), weights.bias.double()),
        LSTMState(state.hidden.double(), state.cell.double()),
        want=EVERYTHING,
        backend="reference",
    )
    actual = lstm(
        Ragged(data.cuda(), offsets.cuda()),
        LSTMWeights(weights.input.cuda(), weights.recurrent.cuda(), weights.bias.cuda()),
        LSTMState(state.hidden.cuda(), state.cell.cuda()),
        want=EVERYTHING,
    )
    for name in ("steps", "last", "mean", "max"):
        tolerance = TOLERANCE[storage]
        one, other = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.state.cell.cpu().double(), expected.state.cell, rtol=tolerance, atol=2 * tolerance)
