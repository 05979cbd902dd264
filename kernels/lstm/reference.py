"""The LSTM one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

from kernels.gated import clipped
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import reference_gate_inputs, reference_norm, select_outputs


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.lstm.types`; every output has the dtype of `weights.recurrent`."""
    hidden = weights.recurrent.new_zeros(x.rows, weights.vector) if state is None else state.hidden.clone()
    cell = weights.recurrent.new_zeros(x.rows, weights.hidden) if state is None else state.cell.clone()
    gates = reference_gate_inputs(x, weights)
    steps = gates.new_zeros(gates.shape[0], weights.vector)
    gate, activation, output_activation = weights.activations
    peephole = cell.new_zeros(3 * weights.hidden) if weights.peephole is None else weights.peephole
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            i, f, g, o = (
                gates[t] + reference_norm(hidden[row] @ weights.recurrent, weights.recurrent_norm, weights.epsilon)
            ).chunk(4)
            i, f = i + peephole.chunk(3)[0] * cell[row], f + peephole.chunk(3)[1] * cell[row]
            new = gate(clipped(f, weights.clip)) * cell[row] + gate(clipped(i, weights.clip)) * activation(
                clipped(g, weights.clip)
            )
            cell[row] = reference_norm(new, weights.cell_norm, weights.epsilon)
            o = o + peephole.chunk(3)[2] * cell[row]
            output = gate(clipped(o, weights.clip)) * output_activation(cell[row])
            hidden[row] = output if weights.projection is None else output @ weights.projection
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=LSTMState(hidden, cell))
