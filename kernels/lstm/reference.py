"""The LSTM one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import select_outputs


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.lstm.types`; every output has the dtype of `weights.recurrent`."""
    hidden = weights.recurrent.new_zeros(x.rows, weights.hidden) if state is None else state.hidden.clone()
    cell = torch.zeros_like(hidden) if state is None else state.cell.clone()
    gates = x.data if weights.input is None or weights.bias is None else x.data @ weights.input + weights.bias
    steps = gates.new_zeros(gates.shape[0], weights.hidden)
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            i, f, g, o = (gates[t] + hidden[row] @ weights.recurrent).chunk(4)
            cell[row] = f.sigmoid() * cell[row] + i.sigmoid() * g.tanh()
            hidden[row] = o.sigmoid() * cell[row].tanh()
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=LSTMState(hidden, cell))
