"""The convolution over time with PyTorch operations: the windows of all rows in one matrix, then one library product (lowering).

Runs wherever PyTorch runs. The windows take `width` times the memory of the input.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.conv.types import ACTIVATIONS, GATED, ConvState, ConvWeights
from kernels.embedding import embed, embed_taps
from kernels.framework import linear
from kernels.ragged import Encoded, Outputs, Ragged, compute_dtype
from kernels.windows import left_context, windows


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`."""
    if weights.tables is not None:
        gathered = embed_taps(
            x, weights.tables, left=weights.left, right=weights.right, dilation=weights.dilation, stride=weights.stride
        )
        return outputs_of(activated(gathered + weights.bias, weights), x, weights, want, None)
    if weights.embedding is not None:
        dtype = compute_dtype(weights.embedding.dtype, weights.embedding.device)
        vectors = Ragged(embed(x.data, weights.embedding, dtype), x.offsets)
        return outputs_of(_steps(vectors, weights, None), vectors, weights, want, None)
    left = None if state is None else state.left
    state_after = ConvState(left_context(x, weights.left, left))
    return outputs_of(_steps(x, weights, left), x, weights, want, state_after)


def activated(maps: Tensor, weights: ConvWeights) -> Tensor:
    """Return (windows, outputs) of (windows, maps)."""
    if weights.activation in GATED:
        return GATED[weights.activation](*maps.chunk(2, dim=1))
    return ACTIVATIONS[weights.activation](maps)


def _steps(x: Ragged, weights: ConvWeights, left: Tensor | None) -> Tensor:
    """Return (windows, outputs), computed in one product."""
    width, inputs, maps = weights.filters.shape
    shape = {"left": weights.left, "right": weights.right, "dilation": weights.dilation, "stride": weights.stride}
    lowered = windows(x, width, **shape, context=left).reshape(-1, width * inputs)
    return activated(linear(lowered, weights.filters.reshape(width * inputs, maps), weights.bias), weights)


def outputs_of(steps: Tensor, x: Ragged, weights: ConvWeights, want: Outputs, state: ConvState | None) -> Encoded:
    """Return the wanted outputs. steps: (windows, outputs), the windows of the rows of `x` in order."""
    sizes = weights.steps(x.lengths)
    counts, offsets, rows = (
        torch.from_numpy(array).to(steps.device)
        for array in (sizes, np.append(0, sizes.cumsum()), np.repeat(np.arange(len(sizes)), sizes))
    )

    def mean() -> Tensor:
        # One thread sums each row: scattered additions would give different bits on every run.
        total = torch.segment_reduce(steps, "sum", offsets=offsets, axis=0, initial=0.0)
        return total / counts.clamp(min=1)[:, None]

    def maximum() -> Tensor:
        zeros = steps.new_zeros(len(counts), steps.shape[1])
        return zeros.scatter_reduce_(0, rows[:, None].expand_as(steps), steps, "amax", include_self=False)

    def last() -> Tensor:
        if not len(steps):
            return steps.new_zeros(len(counts), steps.shape[1])
        return steps[(offsets[1:] - 1).clamp(min=0)].where(counts[:, None] > 0, 0.0)

    return Encoded(
        state=state,
        steps=steps if want.steps else None,
        last=last() if want.last else None,
        mean=mean() if want.mean else None,
        max=maximum() if want.max else None,
        offsets=offsets,
    )
