"""Weights in int8: their numbers and scales."""

from __future__ import annotations

import torch

from kernels.quantized import LEVELS, dequantize, quantize


def test_largest_weight_of_each_column_is_the_largest_number() -> None:
    numbers, scales = quantize(torch.tensor([[1.0, -0.5, 0.0], [-0.2, 0.1, 0.0]]))
    assert numbers.dtype == torch.int8
    assert numbers.tolist() == [[127, -127, 0], [-25, 25, 0]]
    assert scales.tolist() == (torch.tensor([1.0, 0.5, 0.0]) / LEVELS).bfloat16().tolist()


def test_error_is_at_most_half_a_number() -> None:
    weight = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    numbers, scales = quantize(weight)
    assert bool(((dequantize(numbers, scales) - weight).abs() <= 0.5 * scales + 1e-7).all())


def test_taps_share_the_scale_of_their_column() -> None:
    taps = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    numbers, scales = quantize(taps)
    flat, flat_scales = quantize(taps.flatten(0, 1))
    assert torch.equal(numbers.flatten(0, 1), flat) and torch.equal(scales, flat_scales)


def test_quantizing_again_gives_the_same_numbers_and_values() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1e-20, 1e-3, 1.0, 1e10):
        numbers, scales = quantize(torch.randn(64, 33, generator=generator) * size)
        values = dequantize(numbers, scales)
        again = quantize(values)
        assert torch.equal(again[0], numbers)
        assert torch.equal(dequantize(*again), values)


def test_weight_without_rows_has_no_scale() -> None:
    numbers, scales = quantize(torch.zeros(0, 3))
    assert numbers.shape == (0, 3) and scales.tolist() == [0.0, 0.0, 0.0]


def test_tiny_weights_stay_within_the_levels() -> None:
    numbers, _ = quantize(torch.tensor([[1e-45], [3e-45], [-3e-45]]))
    assert int(numbers.abs().max()) <= LEVELS
