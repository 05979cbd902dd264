"""A convolution as one product, its windows laid out before it (lowering, im2col), and as the same without the room that this takes:
a tile of windows after the other, or one product for each tap over shifted steps, which are in memory already."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import Call
from kernels.bench.baselines.conv.batch import Batch, Windows, batch_of, convolved, grown
from kernels.bench.given import Given
from kernels.bench.report import MEMORY
from kernels.contract import ConvWeights

TILE = 256
"""Windows of a tile: of 1,500 inputs in float32 they are 1.5 MB."""


def lowered(given: Given) -> Call:
    """(windows, width x inputs) is written and read again; the widths of a text CNN, one after the other, need no more room than the
    widest."""
    batch = batch_of(given)
    most = max(batch.rows * batch.whole(layer) * layer.filters[..., 0].numel() for layer in given.weights)
    return convolved(given, _lowered, extra={MEMORY: grown(given, most * batch.flat.itemsize)})


def in_tiles(given: Given) -> Call:
    """As `lowered`, so many windows at a time that they stay in a cache."""
    most = min(TILE, batch_of(given).count) * max(layer.filters[..., 0].numel() for layer in given.weights)
    return convolved(given, _in_tiles, extra={MEMORY: grown(given, most * given.x.data.itemsize)})


def tap_by_tap(given: Given) -> Call:
    """Nothing is laid out anew, but the sums are read and written once for each tap."""
    return convolved(given, _tap_by_tap, extra={MEMORY: 0.0})


def shifted(batch: Batch, layer: ConvWeights) -> list[Tensor]:
    """(count, inputs) for each tap: the step that it sees, for each at which a window begins."""
    return [batch.flat[tap : tap + batch.count] for tap in range(layer.reach)]


def _lowered(batch: Batch, layer: ConvWeights) -> Windows:
    matrix, count = _matrix(layer), batch.whole(layer)
    inputs = batch.flat.shape[1]
    # Steps lie end to end, so that a window is one piece of memory, which the next one begins a step later in.
    windows = batch.flat.as_strided((batch.rows, count, len(matrix)), (batch.steps * inputs, inputs, 1))

    def run() -> Tensor:
        return torch.addmm(layer.bias, windows.contiguous().view(-1, len(matrix)), matrix).view(batch.rows, count, -1)

    return run


def _in_tiles(batch: Batch, layer: ConvWeights) -> Windows:
    matrix, inputs = _matrix(layer), batch.flat.shape[1]
    windows = batch.flat.as_strided((batch.count, len(matrix)), (inputs, 1))
    sums, tile = windows.new_empty(batch.count, layer.outputs), windows.new_empty(TILE, len(matrix))
    tiles = list(zip(torch.split(windows, TILE), torch.split(sums, TILE), strict=True))

    def run() -> Tensor:
        for seen, out in tiles:
            torch.addmm(layer.bias, tile[: len(seen)].copy_(seen), matrix, out=out)
        return batch.by_row(sums)

    return run


def _tap_by_tap(batch: Batch, layer: ConvWeights) -> Windows:
    (first, *others), (steps, *later) = layer.filters.unbind(), shifted(batch, layer)

    def run() -> Tensor:
        sums = torch.addmm(layer.bias, steps, first)
        for filters, seen in zip(others, later, strict=True):
            sums.addmm_(seen, filters)
        return batch.by_row(sums)

    return run


def _matrix(layer: ConvWeights) -> Tensor:
    """(width x inputs, outputs)"""
    return layer.filters.reshape(-1, layer.filters.shape[2])
