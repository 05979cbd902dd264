"""The QRNN one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.embedding import tap_rows
from kernels.qrnn.types import ACTIVATIONS, POOLINGS, QRNNState, QRNNWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import select_outputs


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.qrnn.types`; every output has the dtype of `weights.bias`."""
    size, window = weights.hidden, weights.window
    data = x.data if weights.tables is None else tap_rows(x).data
    cell = weights.bias.new_zeros(x.rows, size) if state is None else state.cell.clone()
    left = data.new_zeros(x.rows, window - 1, *data.shape[1:]) if state is None else state.left.clone()
    hidden = torch.zeros_like(cell)
    steps = cell.new_zeros(len(data), size)
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        seen = torch.cat((left[row], data[begin:end]))
        for t in range(begin, end):
            z, f, *others = _gates(seen[t - begin : t - begin + window], weights).chunk(POOLINGS[weights.pooling])
            f = f.sigmoid()
            i = others[1].sigmoid() if weights.pooling == "ifo" else 1 - f
            cell[row] = f * cell[row] + i * ACTIVATIONS[weights.activation](z)
            hidden[row] = others[0].sigmoid() * cell[row] if others else cell[row]
            steps[t] = hidden[row]
        left[row] = seen[len(seen) - window + 1 :]
    return select_outputs(steps, x.offsets, want, last=hidden, state=QRNNState(cell, left))


def _gates(steps: Tensor, weights: QRNNWeights) -> Tensor:
    """steps: (window, inputs) or, as rows of the tables, (window,), oldest first."""
    gates = weights.bias
    for back in range(weights.window):
        step = steps[-1 - back]
        if weights.tables is not None:
            step = weights.tables[back, step]
        elif weights.input is not None:
            step = step @ weights.input[back]
        gates = gates + step
    return gates
