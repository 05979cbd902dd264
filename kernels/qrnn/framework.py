"""The QRNN with the framework's own operations: one library product for all windows, then two pointwise operations per step.
Runs wherever torch runs; nothing is padded."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, QRNNState, QRNNWeights, Ragged
from kernels.embedding import embed_taps, tap_rows
from kernels.walk import Harvest, longest_first, product
from kernels.windows import left_context, windows


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    order, size = longest_first(x), weights.hidden
    left = None if state is None else state.left
    gates = _gates(x, weights, left).index_select(0, order.tokens)
    f = gates[:, size : 2 * size].sigmoid()
    i = gates[:, 3 * size :].sigmoid() if weights.pooling == "ifo" else 1 - f
    added = gates[:, :size].tanh().mul_(i)
    o = gates[:, 2 * size : 3 * size].sigmoid() if weights.pooling != "f" else torch.ones_like(f)
    cell, last = order.sorted(state.cell if state else None, size), order.sorted(None, size)
    harvest = Harvest(order, size, want)
    for (kept, more, opened), (cells, hidden) in zip(order.by_step(f, added, o), order.by_row(cell, last), strict=True):
        torch.mul(cells.mul_(kept).add_(more), opened, out=hidden)
        harvest.take(hidden)
    seen = x if weights.tables is None else tap_rows(x)
    return harvest.encoded(last, QRNNState(order.rows_back(cell), left_context(seen, weights.window - 1, left)))


def _gates(x: Ragged, weights: QRNNWeights, left: Tensor | None) -> Tensor:
    """(tokens, blocks x hidden): the masked convolution, as one product over each step and the ones before it, or from tables."""
    if weights.tables is not None:
        return embed_taps(x, weights.tables, left=weights.window - 1, context=left, latest_first=True) + weights.bias
    if weights.input is None:
        return x.data.float() + weights.bias
    window, inputs, blocks = weights.input.shape
    seen = windows(x, weights.window, left=window - 1, context=left).flip(1).reshape(-1, window * inputs)
    return product(seen, weights.input.reshape(window * inputs, blocks), weights.bias)
