"""The convolution over time with the framework's own operations: each row's windows laid out, then one library product (lowering).
Runs wherever torch runs; the windows take width times the memory of the input."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.contract import ACTIVATIONS, ConvState, ConvWeights, Encoded, Outputs, Ragged
from kernels.walk import product
from kernels.windows import left_context, windows


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    width, inputs, outputs = weights.filters.shape
    left = None if state is None else state.left
    shape = {"left": weights.left, "right": weights.right, "dilation": weights.dilation, "stride": weights.stride}
    seen = windows(x, width, **shape, context=left).reshape(-1, width * inputs)
    steps = activated(product(seen, weights.filters.reshape(width * inputs, outputs), weights.bias), weights)
    return harvested(steps, x, weights, want, ConvState(left_context(x, weights.left, left)))


def activated(steps: Tensor, weights: ConvWeights) -> Tensor:
    return ACTIVATIONS[weights.activation](steps)


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
