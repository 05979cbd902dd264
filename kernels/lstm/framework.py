"""The LSTM in torch operations: one matrix product for all inputs, then one product and a few pointwise operations per step.

Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.framework import StepOutputs, linear, order_by_length
from kernels.gated import clipped, gate_inputs, recurrent_product
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.norm import layer_norm
from kernels.ragged import Encoded, Outputs, Ragged


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.lstm.types`."""
    order = order_by_length(x)
    data = order.sort_tokens(x.data)
    gates = gate_inputs(data, weights)
    hidden = order.sort_rows(state.hidden if state else None, weights.vector)
    cell = order.sort_rows(state.cell if state else None, weights.hidden)
    outputs = StepOutputs(order, weights.vector, want)
    advance = _variant_step if weights.variants else _step
    for (step,), (running, cells) in zip(order.by_step(gates), order.by_row(hidden, cell), strict=True):
        advance(step, running, cells, weights)
        outputs.add(running)
    return outputs.encoded(hidden, LSTMState(order.unsort_rows(hidden), order.unsort_rows(cell)))


def _step(gates: Tensor, hidden: Tensor, cell: Tensor, weights: LSTMWeights) -> None:
    """Advance the running rows of a plain LSTM by one step, in place."""
    i, f, g, o = linear(hidden, weights.recurrent, gates).chunk(4, dim=1)
    cell.mul_(f.sigmoid_()).addcmul_(i.sigmoid_(), g.tanh_())
    torch.mul(o.sigmoid_(), cell.tanh(), out=hidden)


def _variant_step(gates: Tensor, hidden: Tensor, cell: Tensor, weights: LSTMWeights) -> None:
    """Advance the running rows of any LSTM by one step, in place."""
    gate, activation, output_activation = weights.activations
    i, f, g, o = (gates + recurrent_product(hidden, weights)).chunk(4, dim=1)
    if weights.peephole is not None:
        peephole_i, peephole_f, peephole_o = weights.peephole.float().chunk(3)
        i, f = i + peephole_i * cell, f + peephole_f * cell
    i, f, g = gate(clipped(i, weights.clip)), gate(clipped(f, weights.clip)), activation(clipped(g, weights.clip))
    cell.mul_(f).addcmul_(i, g)
    if weights.cell_norm is not None:
        cell.copy_(layer_norm(cell, weights.cell_norm, weights.epsilon))
    if weights.peephole is not None:
        o = o + peephole_o * cell
    output = gate(clipped(o, weights.clip)) * output_activation(cell)
    hidden.copy_(output if weights.projection is None else linear(output, weights.projection, None))
