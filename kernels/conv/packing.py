"""The filters of a convolution as its kernels want them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.contract import GATED, ConvWeights
from kernels.launching import parts_of, round_up

DEPTH = 64
"""Columns of the inputs that are multiplied at once."""
STRIP = 16
"""Maps whose sums one warp has, two of them in each thread: eight apart."""


def packed_filters(weights: ConvWeights, maps: int) -> Tensor:
    """As the left operands of the tensor cores' products, padded with zeros: (tiles of `maps` maps, 64 inputs, taps, maps, 64 inputs).

    The 16-byte pieces of a map's row of 64 inputs are swizzled: piece p of map m stands in place p ^ m % 8.
    """
    width, inputs, _ = weights.filters.shape
    ordered = _strips(weights.filters, weights, maps)
    tiles, depth = ordered.shape[-1] // maps, parts_of(inputs, DEPTH)
    padded = functional.pad(ordered, (0, 0, 0, depth * DEPTH - inputs)).view(width, depth, 8, 8, tiles, maps)
    tap, chunk, piece, value, tile, map_ = range(6)
    rows = padded.permute(tile, chunk, tap, map_, piece, value)
    number = torch.arange(maps, device=ordered.device)[:, None]
    return rows[:, :, :, number, torch.arange(8, device=ordered.device) ^ number % 8].contiguous()


def packed_bias(weights: ConvWeights, maps: int) -> Tensor:
    """(maps, padded) float32 in the same order."""
    return _strips(weights.bias.float(), weights, maps).contiguous()


def _strips(values: Tensor, weights: ConvWeights, maps: int) -> Tensor:
    """(..., maps) padded to whole tiles. Gated, eight values and then their eight gates make a strip, so that a thread has both."""
    if weights.activation not in GATED:
        return functional.pad(values, (0, round_up(values.shape[-1], maps) - values.shape[-1]))
    padded = round_up(weights.outputs, maps // 2) - weights.outputs
    halves = [functional.pad(half, (0, padded)) for half in values.chunk(2, dim=-1)]
    strips = [half.view(*half.shape[:-1], -1, STRIP // 2) for half in halves]
    return torch.stack(strips, dim=-2).flatten(-3)
