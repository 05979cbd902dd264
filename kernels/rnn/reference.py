"""The plain RNN one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

from kernels.gated import HiddenState, clipped
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import reference_gate_inputs, reference_norm, select_outputs
from kernels.rnn.types import RNNWeights


def rnn(x: Ragged, weights: RNNWeights, state: HiddenState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.rnn.types`; every output has the dtype of `weights.recurrent`."""
    hidden = weights.recurrent.new_zeros(x.rows, weights.hidden) if state is None else state.hidden.clone()
    gates = reference_gate_inputs(x, weights)
    steps = gates.new_zeros(gates.shape[0], weights.hidden)
    (activation,) = weights.activations
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            product = reference_norm(hidden[row] @ weights.recurrent, weights.recurrent_norm, weights.epsilon)
            hidden[row] = activation(clipped(gates[t] + product, weights.clip))
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=HiddenState(hidden))
