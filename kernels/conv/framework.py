"""The convolution over time with PyTorch operations: the windows of all rows in one matrix, then one library product (lowering).

Runs wherever PyTorch runs. The windows take `width` times the memory of the input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.conv.types import ConvState, ConvWeights
from kernels.embedding import embed, embed_taps
from kernels.framework import linear
from kernels.pooling import pool_steps
from kernels.ragged import Encoded, Outputs, Ragged, compute_dtype
from kernels.windows import left_context, windows


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`."""
    if weights.tables is not None:
        gathered = embed_taps(
            x, weights.tables, left=weights.left, right=weights.right, dilation=weights.dilation, stride=weights.stride
        )
        return outputs_of(weights.activated(gathered + weights.bias), x, weights, want, None)
    if weights.embedding is not None:
        dtype = compute_dtype(weights.embedding.dtype, weights.embedding.device)
        vectors = Ragged(embed(x.data, weights.embedding, dtype), x.offsets)
        return outputs_of(_steps(vectors, weights, None), vectors, weights, want, None)
    left = None if state is None else state.left
    state_after = ConvState(left_context(x, weights.left, left))
    return outputs_of(_steps(x, weights, left), x, weights, want, state_after)


def _steps(x: Ragged, weights: ConvWeights, left: Tensor | None) -> Tensor:
    """Return (windows, outputs), computed in one product."""
    width, inputs, maps = weights.filters.shape
    shape = {"left": weights.left, "right": weights.right, "dilation": weights.dilation, "stride": weights.stride}
    lowered = windows(x, width, **shape, context=left).reshape(-1, width * inputs)
    return weights.activated(linear(lowered, weights.filters.reshape(width * inputs, maps), weights.bias))


def outputs_of(steps: Tensor, x: Ragged, weights: ConvWeights, want: Outputs, state: ConvState | None) -> Encoded:
    """Return the wanted outputs. steps: (windows, outputs), the windows of the rows of `x` in order."""
    sizes = weights.steps(x.lengths)
    offsets = torch.from_numpy(np.append(0, sizes.cumsum())).to(steps.device)
    encoded = pool_steps(steps, offsets, replace(want, max=False), directions=1)
    if want.max:  # one operation over all steps
        rows = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(steps.device)[:, None].expand_as(steps)
        zeros = steps.new_zeros(len(sizes), steps.shape[1])
        encoded = replace(encoded, max=zeros.scatter_reduce_(0, rows, steps, "amax", include_self=False))
    return replace(encoded, state=state, offsets=offsets)
