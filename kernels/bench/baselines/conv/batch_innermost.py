"""A convolution with the batch as the fastest axis: (inputs, steps, rows), so that what a tap sees of all rows is one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import Call
from kernels.bench.baselines.conv.batch import Batch, Windows, convolved
from kernels.bench.given import Given
from kernels.contract import ConvWeights


def batch_innermost(given: Given) -> Call:
    """For each tap (outputs, inputs) @ (inputs, windows x rows), summed up."""
    return convolved(given, _batch_innermost)


def _batch_innermost(batch: Batch, layer: ConvWeights) -> Windows:
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
