"""The LSTM in torch operations: one matrix product for all inputs, then one product and a few pointwise operations per step.

Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.framework import StepOutputs, linear, order_by_length
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.ragged import Encoded, Outputs, Ragged


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.lstm.types`."""
    order = order_by_length(x)
    data = order.sort_tokens(x.data)
    gates = data.float() if weights.input is None else linear(data, weights.input, weights.bias)
    hidden = order.sort_rows(state.hidden if state else None, weights.hidden)
    cell = order.sort_rows(state.cell if state else None, weights.hidden)
    outputs = StepOutputs(order, weights.hidden, want)
    for (step,), (running, cells) in zip(order.by_step(gates), order.by_row(hidden, cell), strict=True):
        _step(step, running, cells, weights.recurrent)
        outputs.add(running)
    return outputs.encoded(hidden, LSTMState(order.unsort_rows(hidden), order.unsort_rows(cell)))


def _step(gates: Tensor, hidden: Tensor, cell: Tensor, recurrent: Tensor) -> None:
    """Advance the running rows by one step, in place."""
    i, f, g, o = linear(hidden, recurrent, gates).chunk(4, dim=1)
    cell.mul_(f.sigmoid_()).addcmul_(i.sigmoid_(), g.tanh_())
    torch.mul(o.sigmoid_(), cell.tanh(), out=hidden)
