"""The LSTM with the framework's own operations: one library product for all inputs, then one product and a few pointwise
operations per step. Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged
from kernels.walk import Harvest, longest_first, product


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    order = longest_first(x)
    data = x.data.index_select(0, order.tokens)
    gates = data.float() if weights.input is None else product(data, weights.input, weights.bias)
    hidden = order.sorted(state.hidden if state else None, weights.hidden)
    cell = order.sorted(state.cell if state else None, weights.hidden)
    harvest = Harvest(order, weights.hidden, want)
    for (step,), (running, cells) in zip(order.by_step(gates), order.by_row(hidden, cell), strict=True):
        _step(step, running, cells, weights.recurrent)
        harvest.take(running)
    return harvest.encoded(hidden, LSTMState(order.rows_back(hidden), order.rows_back(cell)))


def _step(gates: Tensor, hidden: Tensor, cell: Tensor, recurrent: Tensor) -> None:
    """One step of the running rows, in place."""
    i, f, g, o = product(hidden, recurrent, gates).chunk(4, dim=1)
    cell.mul_(f.sigmoid_()).addcmul_(i.sigmoid_(), g.tanh_())
    torch.mul(o.sigmoid_(), cell.tanh(), out=hidden)
