"""A convolution with the batch as the fastest axis, (inputs, steps, rows): the steps of all rows under a tap are one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.conv.padded_batch import PaddedBatch, Windows, convolved
from kernels.bench.case import BenchCase
from kernels.conv.types import ConvWeights


def batch_innermost(case: BenchCase) -> TimedCall:
    """Sum (outputs, inputs) @ (inputs, windows x rows) over the taps."""
    return convolved(case, _batch_innermost)


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
