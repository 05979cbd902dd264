"""The SRU with the framework's own operations: one library product for all inputs, a few pointwise operations per step for the
cell, and everything that does not wait for the cell at once. Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, SRUState, SRUWeights
from kernels.embedding import embed
from kernels.norm import layer_norm
from kernels.walk import Harvest, longest_first, product


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    order, size = longest_first(x), weights.hidden
    data = x.data.index_select(0, order.tokens)
    blocks = _blocks(data, weights)
    candidate, gates, skip = blocks[:, :size], blocks[:, size : 3 * size] + weights.bias.float(), _skip(data, blocks, weights)
    cell, last = order.sorted(state.cell if state else None, size), order.sorted(None, size)
    by_cell = None if weights.cell is None else weights.cell.float()
    harvest = Harvest(order, size, want)
    for (new, gate, kept), (cells, hidden) in zip(order.by_step(candidate, gates, skip), order.by_row(cell, last), strict=True):
        if by_cell is not None:
            gate += torch.cat((cells, cells), dim=1) * by_cell
        f, r = gate.sigmoid().chunk(2, dim=1)
        cells.sub_(new).mul_(f).add_(new)
        torch.lerp(kept, cells.tanh() if weights.tanh else cells, r, out=hidden)
        harvest.take(hidden)
    return harvest.encoded(last, SRUState(order.rows_back(cell)))


def _blocks(data: Tensor, weights: SRUWeights) -> Tensor:
    """(tokens, blocks x hidden): rows of the table, the data themselves, or their product."""
    if weights.table is not None:
        return embed(data, weights.table, torch.float32)
    if weights.input is None:
        return data.float()
    if weights.norm is not None:
        data = layer_norm(data, weights.norm)
    projected = data if weights.projection is None else product(data, weights.projection, None)
    return product(projected, weights.input, None)


def _skip(data: Tensor, blocks: Tensor, weights: SRUWeights) -> Tensor:
    """(tokens, hidden): what the reset gate mixes with the cell; zeros without a skip."""
    size = weights.hidden
    if weights.skip_from is not None:
        return data[:, weights.skip_from : weights.skip_from + size].float() * weights.scale
    return blocks[:, 3 * size :] if blocks.shape[1] == 4 * size else torch.zeros_like(blocks[:, :size])
