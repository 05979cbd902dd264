"""The GRU one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

from kernels.gru.types import GRUState, GRUWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import select_outputs


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.gru.types`; every output has the dtype of `weights.recurrent`."""
    size = weights.hidden
    hidden = weights.recurrent.new_zeros(x.rows, size) if state is None else state.hidden.clone()
    gates = x.data if weights.input is None or weights.bias is None else x.data @ weights.input + weights.bias
    steps = gates.new_zeros(gates.shape[0], size)
    gates_of_reset, gates_of_new = weights.recurrent[:, : 2 * size], weights.recurrent[:, 2 * size :]
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            r, z = (gates[t, : 2 * size] + hidden[row] @ gates_of_reset).sigmoid().chunk(2)
            if weights.recurrent_bias is None:
                n = (gates[t, 2 * size :] + (r * hidden[row]) @ gates_of_new).tanh()
            else:
                n = (gates[t, 2 * size :] + r * (hidden[row] @ gates_of_new + weights.recurrent_bias)).tanh()
            hidden[row] = (1 - z) * n + z * hidden[row]
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=GRUState(hidden))
