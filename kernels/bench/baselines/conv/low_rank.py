"""A convolution whose filters are two factors: fewer maps of each window, then a product with what these are worth to each output.

It is another function, unless the filters are of so low a rank, and is held to the right answers of its own factors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.bench.agreement import expected
from kernels.bench.baselines.baseline import Call
from kernels.bench.baselines.conv.batch import Batch, Windows, convolved
from kernels.bench.baselines.conv.lowering import shifted
from kernels.bench.given import Given
from kernels.bench.report import FACTORS
from kernels.contract import ConvWeights

Factors = tuple[Tensor, Tensor]
"""(width, inputs, rank) and (rank, outputs)"""


def low_rank(given: Given) -> Call:
    """At most half as many parameters."""
    factors = {layer.reach: factorised(layer.filters) for layer in given.weights}
    products = [_product(*factors[layer.reach]) for layer in given.weights]
    own = tuple(replace(layer, filters=filters) for layer, filters in zip(given.weights, products, strict=True))

    def strategy(batch: Batch, layer: ConvWeights) -> Windows:
        return _in_factors(batch, layer, *factors[layer.reach])

    off = error([layer.filters for layer in given.weights], products)
    return convolved(given, strategy, right=expected(replace(given, weights=own)), extra={FACTORS: off})


def factorised(filters: Tensor) -> Factors:
    """The nearest ones of their rank: singular vectors, each factor with the root of the singular values."""
    width, inputs, outputs = filters.shape
    left, values, right = torch.linalg.svd(filters.float().flatten(0, 1), full_matrices=False)
    rank = max(1, filters.numel() // 2 // (width * inputs + outputs))
    roots = values[:rank].sqrt()
    first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return first.view(width, inputs, rank).to(filters.dtype), second.to(filters.dtype)


def error(filters: list[Tensor], products: list[Tensor]) -> float:
    """Of all widths together: the root of the squares of what is off, over that of the filters' own."""
    off, own = (
        sum(float(one.double().square().sum()) for one in each) for each in (map(torch.sub, products, filters), filters)
    )
    return float((off / own) ** 0.5)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """What the factors stand for, in float64."""
    return first.double() @ second.double()


def _in_factors(batch: Batch, layer: ConvWeights, first: Tensor, second: Tensor) -> Windows:
    """The first factor tap by tap."""
    (taps, *others), (steps, *later) = first.unbind(), shifted(batch, layer)

    def run() -> Tensor:
        maps = torch.mm(steps, taps)
        for filters, seen in zip(others, later, strict=True):
            maps.addmm_(seen, filters)
        return batch.by_row(torch.addmm(layer.bias, maps, second))

    return run
