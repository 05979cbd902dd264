"""Winograd's minimal filtering F(2, 3) in one dimension (Lavin and Gray 2016): two outputs of a filter of width 3 from four products
instead of six.

seen    d0 - d2,  d1 + d2,  d2 - d1,  d1 - d3         filters    g0,  (g0 + g1 + g2) / 2,  (g0 - g1 + g2) / 2,  g2
y0 = m0 + m1 + m2         y1 = m1 - m2 - m3           where m are the products of corresponding terms
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.conv.padded_batch import PaddedBatch, Windows, batch_of, convolved, memory_growth
from kernels.bench.case import BenchCase
from kernels.bench.report import MEMORY
from kernels.conv.types import ConvWeights


def winograd(case: BenchCase) -> TimedCall:
    """Transform the first three taps of a filter, and add the others tap by tap."""
    batch = batch_of(case)
    seen = 4 * _pairs(batch) * batch.flat.shape[1] * batch.flat.itemsize
    return convolved(case, _winograd, extra={MEMORY: memory_growth(case, seen)})


def transformed(filters: Tensor) -> Tensor:
    """Transform filters (3, inputs, outputs) to (4, inputs, outputs), rounded once."""
    first, second, third = filters.float()
    return torch.stack((first, (first + second + third) / 2, (first - second + third) / 2, third)).to(filters.dtype)


def _winograd(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    pairs, filters = _pairs(batch), transformed(layer.filters[:3])
    even, odd = (batch.flat[begin : begin + 2 * pairs + 2 : 2] for begin in (0, 1))
    seen, windows = batch.flat.new_empty(4, pairs, filters.shape[1]), batch.flat.new_empty(pairs, 2, filters.shape[2])
    flat = windows.view(2 * pairs, -1)
    others = [(batch.flat[tap : tap + 2 * pairs], layer.filters[tap]) for tap in range(3, layer.reach)]

    def run() -> Tensor:
        torch.sub(even[:-1], even[1:], out=seen[0])
        torch.add(odd[:-1], even[1:], out=seen[1])
        torch.sub(even[1:], odd[:-1], out=seen[2])
        torch.sub(odd[:-1], odd[1:], out=seen[3])
        first, second, third, fourth = torch.bmm(seen, filters)
        torch.add(first, second, out=windows[:, 0]).add_(third)
        torch.sub(second, third, out=windows[:, 1]).sub_(fourth)
        flat.add_(layer.bias)
        for steps, taps in others:
            flat.addmm_(steps, taps)
        return batch.by_row(flat)

    return run


def _pairs(batch: PaddedBatch) -> int:
    return (batch.count + 1) // 2
