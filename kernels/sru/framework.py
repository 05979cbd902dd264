"""The SRU in torch operations: one matrix product for all inputs, and a few pointwise operations per step.

Everything that does not depend on the cell is computed for all steps at once. Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embedding import embed
from kernels.framework import StepOutputs, linear, order_by_length
from kernels.norm import layer_norm
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.sru.types import SRUState, SRUWeights


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.sru.types`."""
    order, size = order_by_length(x), weights.hidden
    data = order.sort_tokens(x.data)
    blocks = _blocks(data, weights)
    candidate, gates, skip = blocks[:, :size], blocks[:, size : 3 * size] + weights.bias.float(), _skip(data, blocks, weights)
    cell, last = order.sort_rows(state.cell if state else None, size), order.sort_rows(None, size)
    cell_weights = None if weights.cell is None else weights.cell.float()
    outputs = StepOutputs(order, size, want)
    for (new, gate, unchanged), (cells, hidden) in zip(
        order.by_step(candidate, gates, skip), order.by_row(cell, last), strict=True
    ):
        if cell_weights is not None:
            gate += torch.cat((cells, cells), dim=1) * cell_weights
        f, r = gate.sigmoid().chunk(2, dim=1)
        cells.sub_(new).mul_(f).add_(new)
        torch.lerp(unchanged, cells.tanh() if weights.tanh else cells, r, out=hidden)
        outputs.add(hidden)
    return outputs.encoded(last, SRUState(order.unsort_rows(cell)))


def _blocks(data: Tensor, weights: SRUWeights) -> Tensor:
    """Return the blocks, (tokens, blocks x hidden): rows of the table, the data, or the data's product with the input weights."""
    if weights.table is not None:
        return embed(data, weights.table, torch.float32)
    if weights.input is None:
        return data.float()
    if weights.norm is not None:
        data = layer_norm(data, weights.norm)
    projected = data if weights.projection is None else linear(data, weights.projection, None)
    return linear(projected, weights.input, None)


def _skip(data: Tensor, blocks: Tensor, weights: SRUWeights) -> Tensor:
    """Return the skip, (tokens, hidden), which the reset gate mixes with the cell; zeros without a skip."""
    size = weights.hidden
    if weights.skip_from is not None:
        return data[:, weights.skip_from : weights.skip_from + size].float() * weights.scale
    return blocks[:, 3 * size :] if blocks.shape[1] == 4 * size else torch.zeros_like(blocks[:, :size])
