"""The convolution over time with the framework's own operations: each row's windows laid out, then one library product (lowering).
Runs wherever torch runs; the windows take width times the memory of the input."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.contract import ACTIVATIONS, GATED, ConvState, ConvWeights, Encoded, Outputs, Ragged, arithmetic
from kernels.embedding import embed, embed_taps
from kernels.walk import product
from kernels.windows import left_context, windows


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    if weights.tables is not None:
        gathered = embed_taps(
            x, weights.tables, left=weights.left, right=weights.right, dilation=weights.dilation, stride=weights.stride
        )
        return harvested(activated(gathered + weights.bias, weights), x, weights, want, None)
    if weights.embedding is not None:
        dtype = arithmetic(weights.embedding.dtype, weights.embedding.device)
        vectors = Ragged(embed(x.data, weights.embedding, dtype), x.offsets)
        return harvested(_steps(vectors, weights, None), vectors, weights, want, None)
    left = None if state is None else state.left
    after = ConvState(left_context(x, weights.left, left))
    return harvested(_steps(x, weights, left), x, weights, want, after)


def activated(maps: Tensor, weights: ConvWeights) -> Tensor:
    """maps: (windows, maps). Returns (windows, outputs)."""
    if weights.activation in GATED:
        return GATED[weights.activation](*maps.chunk(2, dim=1))
    return ACTIVATIONS[weights.activation](maps)


def _steps(x: Ragged, weights: ConvWeights, left: Tensor | None) -> Tensor:
    """(windows, outputs), one product over all of them."""
    width, inputs, maps = weights.filters.shape
    shape = {"left": weights.left, "right": weights.right, "dilation": weights.dilation, "stride": weights.stride}
    seen = windows(x, width, **shape, context=left).reshape(-1, width * inputs)
    return activated(product(seen, weights.filters.reshape(width * inputs, maps), weights.bias), weights)


def harvested(steps: Tensor, x: Ragged, weights: ConvWeights, want: Outputs, state: ConvState | None) -> Encoded:
    """steps: (windows, outputs), the windows of x's rows in their order."""
    sizes = weights.steps(x.lengths)
    counts, offsets, rows = (
        torch.from_numpy(one).to(steps.device)
        for one in (sizes, np.append(0, sizes.cumsum()), np.repeat(np.arange(len(sizes)), sizes))
    )

    def mean() -> Tensor:
        # Scattered additions would give other bits each time; here one thread walks each row.
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
