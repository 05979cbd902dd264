"""The SRU with the framework's own operations: one library product for all inputs, a few pointwise operations per step for the
cell, and everything that does not wait for the cell at once. Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, SRUState, SRUWeights
from kernels.walk import Harvest, longest_first, product


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    order, size = longest_first(x), weights.hidden
    data = x.data.index_select(0, order.tokens)
    projected = data if weights.projection is None else product(data, weights.projection, None)
    blocks = data.float() if weights.input is None else product(projected, weights.input, None)
    candidate, gates, skip = blocks[:, :size], blocks[:, size : 3 * size] + weights.bias.float(), _skip(data, blocks, weights)
    cell, last = order.sorted(state.cell if state else None, size), order.sorted(None, size)
    by_cell = None if weights.cell is None else weights.cell.float()
    harvest = Harvest(order, size, want)
    for begin, end in order.steps:
        running = cell[: end - begin]
        if by_cell is not None:
            gates[begin:end] += torch.cat((running, running), dim=1) * by_cell
        f, r = gates[begin:end].sigmoid().chunk(2, dim=1)
        running.sub_(candidate[begin:end]).mul_(f).add_(candidate[begin:end])
        hidden = running.tanh() if weights.tanh else running
        hidden = r * hidden if skip is None else torch.lerp(skip[begin:end], hidden, r)
        last[: end - begin] = hidden
        harvest.take(begin, end, hidden)
    return harvest.encoded(last, SRUState(order.rows_back(cell)))


def _skip(data: Tensor, blocks: Tensor, weights: SRUWeights) -> Tensor | None:
    """(tokens, hidden): what the reset gate mixes with the cell; None without a skip."""
    size = weights.hidden
    if weights.skip_from is not None:
        return data[:, weights.skip_from : weights.skip_from + size].float() * weights.scale
    return blocks[:, 3 * size :] if blocks.shape[1] == 4 * size else None
