"""The QRNN in torch operations: one matrix product for all windows, then two pointwise operations per step.

Runs wherever torch runs; nothing is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embedding import embed_taps, tap_rows
from kernels.framework import StepOutputs, linear, order_by_length
from kernels.qrnn.types import ACTIVATIONS, QRNNState, QRNNWeights
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.windows import left_context, windows


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.qrnn.types`."""
    order, size = order_by_length(x), weights.hidden
    left = None if state is None else state.left
    gates = order.sort_tokens(_gates(x, weights, left))
    f = gates[:, size : 2 * size].sigmoid()
    i = gates[:, 3 * size :].sigmoid() if weights.pooling == "ifo" else 1 - f
    added = ACTIVATIONS[weights.activation](gates[:, :size]) * i
    o = gates[:, 2 * size : 3 * size].sigmoid() if weights.pooling != "f" else torch.ones_like(f)
    cell, last = order.sort_rows(state.cell if state else None, size), order.sort_rows(None, size)
    outputs = StepOutputs(order, size, want)
    for (forget, new, output), (cells, hidden) in zip(order.by_step(f, added, o), order.by_row(cell, last), strict=True):
        torch.mul(cells.mul_(forget).add_(new), output, out=hidden)
        outputs.add(hidden)
    steps = x if weights.tables is None else tap_rows(x)
    return outputs.encoded(last, QRNNState(order.unsort_rows(cell), left_context(steps, weights.window - 1, left)))


def _gates(x: Ragged, weights: QRNNWeights, left: Tensor | None) -> Tensor:
    """Return the masked convolution with its bias, (tokens, blocks x hidden)."""
    if weights.tables is not None:
        return embed_taps(x, weights.tables, left=weights.window - 1, context=left, latest_first=True) + weights.bias
    if weights.input is None:
        return x.data.float() + weights.bias
    window, inputs, blocks = weights.input.shape
    inputs_of_window = windows(x, weights.window, left=window - 1, context=left).flip(1).reshape(-1, window * inputs)
    return linear(inputs_of_window, weights.input.reshape(window * inputs, blocks), weights.bias)
