"""The convolution over time one row, one position and one tap at a time: the oracle of every test, for the eye."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.contract import ACTIVATIONS, ConvState, ConvWeights, Encoded, Outputs, Ragged
from kernels.reference import pooled


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`; every output has the dtype of `x.data`."""
    width, inputs, outputs = weights.filters.shape
    left = x.data.new_zeros(x.rows, weights.left, inputs) if state is None else state.left.clone()
    steps, ends = [], [0]
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        seen = torch.cat((left[row], x.data[begin:end], x.data.new_zeros(weights.right, inputs)))
        for first in range(0, len(seen) - weights.reach + 1, weights.stride):
            value = weights.bias
            for tap in range(width):
                value = value + seen[first + tap * weights.dilation] @ weights.filters[tap]
            steps.append(ACTIVATIONS[weights.activation](value))
        ends.append(len(steps))
        left[row] = torch.cat((left[row], x.data[begin:end]))[end - begin :]
    given = torch.stack(steps) if steps else x.data.new_zeros(0, outputs)
    return pooled(given, torch.tensor(ends), want, state=ConvState(left), new_offsets=True)
