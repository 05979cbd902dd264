"""The LSTM with the framework's own operations: one library product for all inputs, then one product and a few pointwise
operations per step over the rows that still have steps. Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged, arithmetic


def refuses(problem: Problem) -> str | None:
    return None


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`. Rows run longest first, so that the running ones are always the first rows."""
    order = _longest_first(x)
    gates = _gate_inputs(x.data.index_select(0, order.tokens), weights)
    walk = _Walk(gates, weights, _sorted(state, order.rows, gates), want)
    for begin, end in order.steps:
        walk.step(begin, end)
    return walk.encoded(order)


class _Order:
    """Rows sorted by length and tokens step by step: `tokens[k]` is where the k-th token of the walk comes from."""

    def __init__(self, rows: Tensor, tokens: Tensor, lengths: Tensor, steps: list[tuple[int, int]]) -> None:
        self.rows = rows
        self.tokens = tokens
        self.lengths = lengths
        self.steps = steps


def _longest_first(x: Ragged) -> _Order:
    """Sorted on the host, as the steps of the walk are launched from there."""
    offsets = x.offsets.cpu().long()
    lengths = torch.diff(offsets)
    rows = torch.argsort(lengths, descending=True, stable=True)
    longest = int(lengths.max()) if x.rows else 0
    running = (lengths[rows][None, :] > torch.arange(longest)[:, None]).nonzero()
    tokens = offsets[rows[running[:, 1]]] + running[:, 0]
    ends = torch.bincount(running[:, 0], minlength=longest).cumsum(0).tolist()
    device = x.data.device
    return _Order(rows.to(device), tokens.to(device), lengths[rows].to(device), list(zip([0, *ends], ends, strict=False)))


def _gate_inputs(data: Tensor, weights: LSTMWeights) -> Tensor:
    if weights.input is None or weights.bias is None:
        return data.float()
    dtype = arithmetic(weights.input.dtype, data.device)
    return torch.addmm(weights.bias.to(dtype), data.to(dtype), weights.input.to(dtype)).float()


def _sorted(state: LSTMState | None, rows: Tensor, gates: Tensor) -> LSTMState:
    if state is None:
        zeros = gates.new_zeros(len(rows), gates.shape[1] // 4)
        return LSTMState(zeros, zeros.clone())
    return LSTMState(state.hidden.float().index_select(0, rows), state.cell.float().index_select(0, rows))


class _Walk:
    """The running rows' state and what is gathered on the way."""

    def __init__(self, gates: Tensor, weights: LSTMWeights, state: LSTMState, want: Outputs) -> None:
        self._gates = gates
        self._dtype = arithmetic(weights.recurrent.dtype, gates.device)
        self._recurrent = weights.recurrent.to(self._dtype)
        self._hidden, self._cell = state.hidden, state.cell
        self._want = want
        self._steps = gates.new_empty(gates.shape[0], weights.hidden) if want.steps else None
        self._sum = torch.zeros_like(state.hidden) if want.mean else None
        self._max = torch.full_like(state.hidden, -torch.inf) if want.max else None

    def step(self, begin: int, end: int) -> None:
        """Tokens [begin, end) of the walk: one step of the first end - begin rows."""
        hidden, cell = self._hidden[: end - begin], self._cell[: end - begin]
        if self._dtype == torch.float32:
            gates = torch.addmm(self._gates[begin:end], hidden, self._recurrent)
        else:
            gates = self._gates[begin:end] + torch.mm(hidden.to(self._dtype), self._recurrent)
        i, f, g, o = gates.chunk(4, dim=1)
        cell.mul_(f.sigmoid_()).addcmul_(i.sigmoid_(), g.tanh_())
        torch.mul(o.sigmoid_(), cell.tanh(), out=hidden)
        if self._steps is not None:
            self._steps[begin:end] = hidden
        if self._sum is not None:
            self._sum[: end - begin] += hidden
        if self._max is not None:
            running = self._max[: end - begin]
            torch.maximum(running, hidden, out=running)

    def encoded(self, order: _Order) -> Encoded:
        """Everything back in the order in which it came."""
        lengths = order.lengths[:, None]
        hidden = _unsorted(self._hidden, order.rows)
        return Encoded(
            state=LSTMState(hidden, _unsorted(self._cell, order.rows)),
            steps=None if self._steps is None else _unsorted(self._steps, order.tokens),
            last=hidden if self._want.last else None,
            mean=None if self._sum is None else _unsorted(self._sum / lengths.clamp(min=1), order.rows),
            max=None if self._max is None else _unsorted(self._max.where(lengths > 0, 0.0), order.rows),
        )


def _unsorted(values: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(values).index_copy_(0, order, values)
