"""The layout of filters and biases that `product.cu` reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.conv.types import GATED, ConvWeights
from kernels.launching import ceil_div, round_up, swizzled

DEPTH = 64
"""Input columns that are multiplied at once."""
STRIP = 16
"""Maps per warp. Each thread holds the sums of two maps, eight apart."""


def packed_filters(weights: ConvWeights, maps: int) -> Tensor:
    """Return the filters as left operands of the tensor cores: (tiles of `maps` maps, 64 inputs, taps, maps, 64 inputs), zero-padded.

    The 16-byte pieces of a map's row of 64 inputs are swizzled.
    """
    width, inputs, _ = weights.filters.shape
    ordered = _in_strips(weights.filters, weights, maps)
    tiles, depth = ordered.shape[-1] // maps, ceil_div(inputs, DEPTH)
    padded = functional.pad(ordered, (0, 0, 0, depth * DEPTH - inputs)).view(width, depth, 8, 8, tiles, maps)
    tap, chunk, piece, value, tile, map_ = range(6)
    return swizzled(padded.permute(tile, chunk, tap, map_, piece, value))


def packed_bias(weights: ConvWeights, maps: int) -> Tensor:
    """Return the bias, (maps, padded) float32, with maps in the order of the packed filters."""
    return _in_strips(weights.bias.float(), weights, maps).contiguous()


def _in_strips(values: Tensor, weights: ConvWeights, maps: int) -> Tensor:
    """Return (..., maps) padded to whole tiles. For gated activations, eight values and then their gates form a strip, so that one thread
    holds a value and its gate."""
    if weights.activation not in GATED:
        return functional.pad(values, (0, round_up(values.shape[-1], maps) - values.shape[-1]))
    padding = round_up(weights.outputs, maps // 2) - weights.outputs
    halves = [functional.pad(half, (0, padding)) for half in values.chunk(2, dim=-1)]
    strips = [half.view(*half.shape[:-1], -1, STRIP // 2) for half in halves]
    return torch.stack(strips, dim=-2).flatten(-3)
