"""A plain loop over the steps of a padded batch, as one writes it in torch without a fused layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import Call, last, pad
from kernels.bench.given import Given
from kernels.contract import GRUWeights, LSTMWeights, QRNNWeights, SRUWeights

State = TypeVar("State")
Step = Callable[[Tensor, State], tuple[Tensor, State]]


def lstm_steps(given: Given) -> Call:
    weights: LSTMWeights = given.weights[0]
    assert weights.input is not None and weights.bias is not None
    matrix, bias, recurrent = weights.input, weights.bias, weights.recurrent

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        i, f, g, o = (torch.addmm(bias, x, matrix) + hidden @ recurrent).chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return hidden, torch.stack((hidden, cell))

    data = pad(given)
    return _loop(given, lambda: data, step, data.new_zeros(2, data.shape[1], weights.hidden))


def lstm_gates(given: Given) -> Call:
    """As the formulas stand in a book: every gate has its own two products, a step has eight, and nothing is fused."""
    weights: LSTMWeights = given.weights[0]
    assert weights.input is not None and weights.bias is not None
    matrices, recurrents = (each.chunk(4, dim=1) for each in (weights.input, weights.recurrent))
    input_i, input_f, input_g, input_o = (matrix.contiguous() for matrix in matrices)
    hidden_i, hidden_f, hidden_g, hidden_o = (matrix.contiguous() for matrix in recurrents)
    bias_i, bias_f, bias_g, bias_o = weights.bias.chunk(4)

    def step(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = state
        i = torch.sigmoid(x @ input_i + hidden @ hidden_i + bias_i)
        f = torch.sigmoid(x @ input_f + hidden @ hidden_f + bias_f)
        g = torch.tanh(x @ input_g + hidden @ hidden_g + bias_g)
        o = torch.sigmoid(x @ input_o + hidden @ hidden_o + bias_o)
        cell = f * cell + i * g
        hidden = o * torch.tanh(cell)
        return hidden, (hidden, cell)

    data = pad(given)
    start = data.new_zeros(data.shape[1], weights.hidden)
    return _loop(given, lambda: data, step, (start, start))


def gru_steps(given: Given) -> Call:
    weights: GRUWeights = given.weights[0]
    assert weights.input is not None and weights.bias is not None and weights.recurrent_bias is not None
    matrix, bias, recurrent, recurrent_bias = weights.input, weights.bias, weights.recurrent, weights.recurrent_bias

    def step(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_hidden = torch.addmm(bias, x, matrix).chunk(3, dim=1), (hidden @ recurrent).chunk(3, dim=1)
        r, z = (one.add(other).sigmoid() for one, other in zip(of_input[:2], of_hidden[:2], strict=True))
        n = (of_input[2] + r * (of_hidden[2] + recurrent_bias)).tanh()
        hidden = (1 - z) * n + z * hidden
        return hidden, hidden

    data = pad(given)
    return _loop(given, lambda: data, step, data.new_zeros(data.shape[1], weights.hidden))


def sru_steps(given: Given) -> Call:
    """One product for all steps, as nothing in it waits for the cell."""
    weights: SRUWeights = given.weights[0]
    assert weights.input is not None and weights.cell is not None
    matrix, data, hidden = weights.input, pad(given), weights.hidden
    bias_forget, bias_reset = weights.bias.chunk(2)
    cell_forget, cell_reset = weights.cell.chunk(2)

    def blocks() -> Tensor:
        return torch.cat((data @ matrix, data), dim=2)

    def step(x: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        candidate, forget, reset, skip = x.chunk(4, dim=1)
        f = (forget + cell_forget * cell + bias_forget).sigmoid()
        r = (reset + cell_reset * cell + bias_reset).sigmoid()
        cell = f * cell + (1 - f) * candidate
        return r * cell + (1 - r) * skip, cell

    return _loop(given, blocks, step, data.new_zeros(data.shape[1], hidden))


def qrnn_steps(given: Given) -> Call:
    """One product for all steps, over each step and the one before it."""
    weights: QRNNWeights = given.weights[0]
    assert weights.input is not None and weights.window == 2
    data, matrix = pad(given), weights.input.reshape(-1, weights.input.shape[2])
    before = torch.cat((torch.zeros_like(data[:1]), data[:-1]))

    def blocks() -> Tensor:
        return torch.cat((data, before), dim=2) @ matrix + weights.bias

    def step(x: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        z, f, o = x.chunk(3, dim=1)
        f = f.sigmoid()
        cell = f * cell + (1 - f) * z.tanh()
        return o.sigmoid() * cell, cell

    return _loop(given, blocks, step, data.new_zeros(data.shape[1], weights.hidden))


def _loop(given: Given, data: Callable[[], Tensor], step: Step[State], start: State) -> Call:
    take = last(given)

    def run() -> Tensor:
        state, hidden = start, []
        for x in data():
            h, state = step(x, state)
            hidden.append(h)
        return take(torch.stack(hidden)) if given.ragged else h

    return Call(run)
