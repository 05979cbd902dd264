"""The LSTM one row and one step at a time, in the precision of its arguments: the oracle of every test, for the eye."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`; every output has the dtype of `weights.recurrent`."""
    hidden = weights.recurrent.new_zeros(x.rows, weights.hidden) if state is None else state.hidden.clone()
    cell = torch.zeros_like(hidden) if state is None else state.cell.clone()
    gates = x.data if weights.input is None or weights.bias is None else x.data @ weights.input + weights.bias
    steps = gates.new_zeros(gates.shape[0], weights.hidden)
    mean, maximum = torch.zeros_like(hidden), torch.zeros_like(hidden)
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            i, f, g, o = (gates[t] + hidden[row] @ weights.recurrent).chunk(4)
            cell[row] = f.sigmoid() * cell[row] + i.sigmoid() * g.tanh()
            hidden[row] = o.sigmoid() * cell[row].tanh()
            steps[t] = hidden[row]
        if begin < end:
            mean[row] = steps[begin:end].mean(0)
            maximum[row] = steps[begin:end].amax(0)
    return Encoded(
        state=LSTMState(hidden, cell),
        steps=steps if want.steps else None,
        last=hidden if want.last else None,
        mean=mean if want.mean else None,
        max=maximum if want.max else None,
    )
