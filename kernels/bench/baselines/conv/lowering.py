"""A convolution as one product of copied windows (lowering, im2col), and two variants that need less memory.

One copies a tile of windows at a time; the other multiplies shifted steps, which need no copy, once for each tap. A fourth strategy does
so with the batch as the fastest axis, (inputs, steps, rows): the steps of all rows under a tap are one matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.conv.padded_batch import PaddedBatch, Windows, batch_of, convolved, memory_growth
from kernels.bench.case import BenchCase
from kernels.bench.report import MEMORY
from kernels.conv.types import ConvWeights

TILE = 256
"""Windows of a tile: 1.5 MB with 1,500 inputs in float32."""


def lowered(case: BenchCase) -> TimedCall:
    """Write and read (windows, width x inputs). The widths of a text CNN run in sequence, so the widest needs the most memory."""
    batch = batch_of(case)
    elements = max(batch.rows * batch.whole(layer) * layer.filters[..., 0].numel() for layer in case.weights)
    return convolved(case, _lowered, extra={MEMORY: memory_growth(case, elements * batch.flat.itemsize)})


def in_tiles(case: BenchCase) -> TimedCall:
    """Copy as many windows at a time as a cache holds."""
    elements = min(TILE, batch_of(case).count) * max(layer.filters[..., 0].numel() for layer in case.weights)
    return convolved(case, _in_tiles, extra={MEMORY: memory_growth(case, elements * case.x.data.itemsize)})


def tap_by_tap(case: BenchCase) -> TimedCall:
    """Copy nothing, but read and write the sums once for each tap."""
    return convolved(case, _tap_by_tap, extra={MEMORY: 0.0})


def batch_innermost(case: BenchCase) -> TimedCall:
    """Sum (outputs, inputs) @ (inputs, windows x rows) over the taps."""
    return convolved(case, _batch_innermost)


def shifted(batch: PaddedBatch, layer: ConvWeights) -> list[Tensor]:
    """Return the steps (count, inputs) under each tap."""
    return [batch.flat[tap : tap + batch.count] for tap in range(layer.reach)]


def _lowered(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    matrix, count = _matrix(layer), batch.whole(layer)
    inputs = batch.flat.shape[1]
    # Steps are contiguous, so a window is one piece of memory, and the next window starts one step later.
    windows = batch.flat.as_strided((batch.rows, count, len(matrix)), (batch.steps * inputs, inputs, 1))

    def run() -> Tensor:
        return torch.addmm(layer.bias, windows.contiguous().view(-1, len(matrix)), matrix).view(batch.rows, count, -1)

    return run


def _in_tiles(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    matrix, inputs = _matrix(layer), batch.flat.shape[1]
    windows = batch.flat.as_strided((batch.count, len(matrix)), (inputs, 1))
    sums, tile = windows.new_empty(batch.count, layer.outputs), windows.new_empty(TILE, len(matrix))
    tiles = list(zip(torch.split(windows, TILE), torch.split(sums, TILE), strict=True))

    def run() -> Tensor:
        for seen, out in tiles:
            torch.addmm(layer.bias, tile[: len(seen)].copy_(seen), matrix, out=out)
        return batch.by_row(sums)

    return run


def _tap_by_tap(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    (first, *others), (steps, *later) = layer.filters.unbind(), shifted(batch, layer)

    def run() -> Tensor:
        sums = torch.addmm(layer.bias, steps, first)
        for filters, seen in zip(others, later, strict=True):
            sums.addmm_(seen, filters)
        return batch.by_row(sums)

    return run


def _batch_innermost(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    data = batch.data.permute(2, 1, 0).flatten(1).contiguous()
    whole = batch.whole(layer)
    (first, *others), (steps, *later) = (
        [filters.T.contiguous() for filters in layer.filters],
        [data[:, tap * batch.rows : (tap + whole) * batch.rows] for tap in range(layer.reach)],
    )

    def run() -> Tensor:
        sums = torch.addmm(layer.bias[:, None], first, steps)
        for filters, seen in zip(others, later, strict=True):
            sums.addmm_(filters, seen)
        return sums.view(-1, whole, batch.rows).permute(2, 1, 0)

    return run


def _matrix(layer: ConvWeights) -> Tensor:
    """Return the filters as (width x inputs, outputs)."""
    return layer.filters.reshape(-1, layer.filters.shape[2])
