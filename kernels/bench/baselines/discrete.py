"""Plain loops over the steps of a padded batch, in torch without a fused layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, last, pad
from kernels.bench.case import BenchCase
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMWeights
from kernels.qrnn.types import ACTIVATIONS, QRNNWeights
from kernels.sru.types import SRUWeights

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
    return _loop(case, lambda: data, step, data.new_zeros(2, data.shape[1], weights.hidden))


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
    return _loop(case, lambda: data, step, (start, start))


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


def gru_steps(case: BenchCase) -> TimedCall:
    weights: GRUWeights = case.weights[0]
    assert weights.input is not None and weights.bias is not None and weights.recurrent_bias is not None
    matrix, bias, recurrent, recurrent_bias = weights.input, weights.bias, weights.recurrent, weights.recurrent_bias

    def step(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_hidden = torch.addmm(bias, x, matrix).chunk(3, dim=1), (hidden @ recurrent).chunk(3, dim=1)
        r, z = (blocks[0].add(blocks[1]).sigmoid() for blocks in zip(of_input[:2], of_hidden[:2], strict=True))
        n = (of_input[2] + r * (of_hidden[2] + recurrent_bias)).tanh()
        hidden = (1 - z) * n + z * hidden
        return hidden, hidden

    data = pad(case)
    return _loop(case, lambda: data, step, data.new_zeros(data.shape[1], weights.hidden))


def scan_steps(case: BenchCase) -> TimedCall:
    """Of an SRU, or of a QRNN and the families that share its weights."""
    return (sru_steps if isinstance(case.weights[0], SRUWeights) else qrnn_steps)(case)


def sru_steps(case: BenchCase) -> TimedCall:
    """One product for all steps, because it does not depend on the cell."""
    weights: SRUWeights = case.weights[0]
    assert weights.input is not None and weights.cell is not None
    matrix, data, hidden = weights.input, pad(case), weights.hidden
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

    return _loop(case, blocks, step, data.new_zeros(data.shape[1], hidden))


def qrnn_steps(case: BenchCase) -> TimedCall:
    """One product for all steps, over each step and the previous one as far as the window has it."""
    weights: QRNNWeights = case.weights[0]
    assert weights.input is not None and weights.window <= 2
    data, matrix = pad(case), weights.input.reshape(-1, weights.input.shape[2])
    seen = [data, torch.cat((torch.zeros_like(data[:1]), data[:-1]))][: weights.window]
    activation = ACTIVATIONS[weights.activation]

    def blocks() -> Tensor:
        return torch.cat(seen, dim=2) @ matrix + weights.bias

    def step(x: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        z, f, *o = torch.split(x, weights.hidden, dim=1)
        f = f.sigmoid()
        cell = f * cell + (1 - f) * activation(z)
        return o[0].sigmoid() * cell if o else cell, cell

    return _loop(case, blocks, step, data.new_zeros(data.shape[1], weights.hidden))


def _loop(case: BenchCase, data: Callable[[], Tensor], step: Step[State], start: State) -> TimedCall:
    take = last(case)

    def run() -> Tensor:
        state, hidden = start, []
        for x in data():
            h, state = step(x, state)
            hidden.append(h)
        return take(torch.stack(hidden)) if case.ragged else h

    return TimedCall(run)
