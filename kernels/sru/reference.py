"""The SRU one row and one step at a time, in the dtype of its arguments: the oracle of every test."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged
from kernels.reference import reference_norm, select_outputs
from kernels.sru.types import SRUState, SRUWeights


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.sru.types`; every output has the dtype of `weights.bias`."""
    size = weights.hidden
    cell = weights.bias.new_zeros(x.rows, size) if state is None else state.cell.clone()
    blocks = _blocks(x.data, weights)
    bias_forget, bias_reset = weights.bias.chunk(2)
    cell_forget, cell_reset = torch.zeros_like(weights.bias).chunk(2) if weights.cell is None else weights.cell.chunk(2)
    hidden = blocks.new_zeros(x.rows, size)
    steps = blocks.new_zeros(blocks.shape[0], size)
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        for t in range(begin, end):
            candidate, forget, reset, *skip = blocks[t].chunk(blocks.shape[1] // size)
            f = (forget + cell_forget * cell[row] + bias_forget).sigmoid()
            r = (reset + cell_reset * cell[row] + bias_reset).sigmoid()
            cell[row] = f * cell[row] + (1 - f) * candidate
            inner = cell[row].tanh() if weights.tanh else cell[row]
            if weights.skip_from is not None:
                skip = [x.data[t, weights.skip_from : weights.skip_from + size] * weights.scale]
            hidden[row] = r * inner + (1 - r) * skip[0] if skip else r * inner
            steps[t] = hidden[row]
    return select_outputs(steps, x.offsets, want, last=hidden, state=SRUState(cell))


def _blocks(data: Tensor, weights: SRUWeights) -> Tensor:
    """(tokens, blocks x hidden)."""
    if weights.table is not None:
        return weights.table[data.long()]
    if weights.input is None:
        return data
    data = reference_norm(data, weights.norm)
    projected = data if weights.projection is None else data @ weights.projection
    return projected @ weights.input
