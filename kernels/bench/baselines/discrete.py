"""An LSTM as plain loops over the steps of a padded batch, in torch without a fused layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, pad
from kernels.bench.case import BenchCase
from kernels.lstm.types import LSTMWeights

State = TypeVar("State")
Step = Callable[[Tensor, State], tuple[Tensor, State]]


def lstm_steps(case: BenchCase) -> TimedCall:
    weights: LSTMWeights = case.weights[0]
    assert weights.input is not None and weights.bias is not None
    matrix, bias, recurrent = weights.input, weights.bias, weights.recurrent

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        i, f, g, o = (torch.addmm(bias, x, matrix) + hidden @ recurrent).chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return hidden, torch.stack((hidden, cell))

    data = pad(case)
    return _loop(data, step, data.new_zeros(2, data.shape[1], weights.hidden))


def lstm_gates(case: BenchCase) -> TimedCall:
    """As in a textbook: two products for each gate, eight for each step, and nothing is fused."""
    weights: LSTMWeights = case.weights[0]
    assert weights.input is not None and weights.bias is not None
    matrices, recurrents = (
        [matrix.contiguous() for matrix in each.chunk(4, dim=1)] for each in (weights.input, weights.recurrent)
    )
    biases = weights.bias.chunk(4)

    def step(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = state
        hidden, cell = lstm_cell([x @ each for each in matrices], [hidden @ each for each in recurrents], biases, cell)
        return hidden, (hidden, cell)

    data = pad(case)
    start = data.new_zeros(data.shape[1], weights.hidden)
    return _loop(data, step, (start, start))


def lstm_cell(
    inputs: Sequence[Tensor],
    products: Sequence[Tensor],
    biases: Sequence[Tensor],
    cell: Tensor,
    *,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return the hidden vectors and the cells after a step, with an operation for each sign of the formulas.

    inputs, products: for each gate, its product with the inputs and with the hidden vectors; into: where the results are written.
    """
    i, f, g, o = (x + h + bias for x, h, bias in zip(inputs, products, biases, strict=True))
    cell = torch.add(torch.sigmoid(f) * cell, torch.sigmoid(i) * torch.tanh(g), out=into[1])
    return torch.mul(torch.sigmoid(o), torch.tanh(cell), out=into[0]), cell


def _loop(data: Tensor, step: Step[State], start: State) -> TimedCall:
    """Return a call that runs all steps of rows with equal lengths, and returns the last hidden vectors."""

    def run() -> Tensor:
        state = start
        for x in data:
            hidden, state = step(x, state)
        return hidden

    return TimedCall(run)
