"""The plain RNN in torch operations: one matrix product for all inputs, then one product and an activation per step.

Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

from kernels.framework import StepOutputs, order_by_length
from kernels.gated import HiddenState, clipped, gate_inputs, recurrent_product
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.rnn.types import RNNWeights


def rnn(x: Ragged, weights: RNNWeights, state: HiddenState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.rnn.types`."""
    order = order_by_length(x)
    gates = gate_inputs(order.sort_tokens(x.data), weights)
    hidden = order.sort_rows(state.hidden if state else None, weights.hidden)
    outputs = StepOutputs(order, weights.hidden, want)
    (activation,) = weights.activations
    for (step,), (running,) in zip(order.by_step(gates), order.by_row(hidden), strict=True):
        running.copy_(activation(clipped(step + recurrent_product(running, weights), weights.clip)))
        outputs.add(running)
    return outputs.encoded(hidden, HiddenState(order.unsort_rows(hidden)))
