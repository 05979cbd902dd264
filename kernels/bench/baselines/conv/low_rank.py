"""A convolution with factorised filters: fewer maps of each window, then a product with their weights for each output.

Unless the filters have this rank, it is another function, with its own expected answer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.bench.agreement import expected_answer
from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.conv.lowering import shifted
from kernels.bench.baselines.conv.padded_batch import PaddedBatch, Windows, convolved
from kernels.bench.case import BenchCase
from kernels.bench.report import FACTORS
from kernels.conv.types import ConvWeights

Factors = tuple[Tensor, Tensor]
"""Shapes (width, inputs, rank) and (rank, outputs)."""


def low_rank(case: BenchCase) -> TimedCall:
    """Factorise into at most half of the parameters."""
    factors = {layer.reach: factorised(layer.filters) for layer in case.weights}
    products = [_product(*factors[layer.reach]) for layer in case.weights]
    low_rank_layers = tuple(replace(layer, filters=filters) for layer, filters in zip(case.weights, products, strict=True))

    def strategy(batch: PaddedBatch, layer: ConvWeights) -> Windows:
        return _in_factors(batch, layer, *factors[layer.reach])

    extra = {FACTORS: error([layer.filters for layer in case.weights], products)}
    return convolved(case, strategy, expected_answer(replace(case, weights=low_rank_layers)), extra)


def factorised(filters: Tensor) -> Factors:
    """Return the best factors of their rank: singular vectors, each scaled by the root of the singular values."""
    width, inputs, outputs = filters.shape
    left, values, right = torch.linalg.svd(filters.float().flatten(0, 1), full_matrices=False)
    rank = max(1, filters.numel() // 2 // (width * inputs + outputs))
    roots = values[:rank].sqrt()
    first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return first.view(width, inputs, rank).to(filters.dtype), second.to(filters.dtype)


def error(filters: list[Tensor], products: list[Tensor]) -> float:
    """Return the norm of the error of all widths, relative to the norm of the filters."""
    errors, norms = (
        sum(float(array.double().square().sum()) for array in each) for each in (map(torch.sub, products, filters), filters)
    )
    return float((errors / norms) ** 0.5)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product of the factors in float64."""
    return first.double() @ second.double()


def _in_factors(batch: PaddedBatch, layer: ConvWeights, first: Tensor, second: Tensor) -> Windows:
    """Apply the first factor tap by tap."""
    (taps, *others), (steps, *later) = first.unbind(), shifted(batch, layer)

    def run() -> Tensor:
        maps = torch.mm(steps, taps)
        for filters, seen in zip(others, later, strict=True):
            maps.addmm_(seen, filters)
        return batch.by_row(torch.addmm(layer.bias, maps, second))

    return run
