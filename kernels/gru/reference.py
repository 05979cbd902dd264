"""The GRU one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

from kernels.gated import HiddenState, clipped
from kernels.gru.types import GRUWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import reference_gate_inputs, reference_norm, select_outputs


def gru(x: Ragged, weights: GRUWeights, state: HiddenState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.gru.types`; every output has the dtype of `weights.recurrent`."""
    size = weights.hidden
    hidden = weights.recurrent.new_zeros(x.rows, size) if state is None else state.hidden.clone()
    gates = reference_gate_inputs(x, weights)
    steps = gates.new_zeros(gates.shape[0], size)
    gate, activation = weights.activations
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            product = reference_norm(hidden[row] @ weights.recurrent, weights.recurrent_norm, weights.epsilon)
            r, z = gate(clipped(gates[t, : 2 * size] + product[: 2 * size], weights.clip)).chunk(2)
            if weights.recurrent_bias is None:
                n = gates[t, 2 * size :] + (r * hidden[row]) @ weights.recurrent[:, 2 * size :]
            else:
                n = gates[t, 2 * size :] + r * (product[2 * size :] + weights.recurrent_bias)
            hidden[row] = (1 - z) * activation(clipped(n, weights.clip)) + z * hidden[row]
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=HiddenState(hidden))
