"""Weights as 8-bit integers with one scale for each column, symmetric around zero.

Weight w of a column is ``round(w / scale)`` with ``scale = largest |w| / 127``, rounded to bfloat16. The numbers are from -127 to
127, and a number times its scale is exact in float32. Quantizing these products gives the same numbers and scales again.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
"""The largest number."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight, (..., columns), as int8 numbers of the same shape, and the scales, (columns,) float32. A column of zeros, or
    of values too small for a normal float32 scale, has zeros and the scale 0."""
    values = weight.float()
    magnitudes = values.abs().flatten(0, -2)
    largest = torch.cat((magnitudes, magnitudes.new_zeros(1, magnitudes.shape[1]))).amax(0)
    scales = (largest / LEVELS).bfloat16().float()
    scales = scales.masked_fill(scales < torch.finfo(torch.float32).tiny, 0)
    numbers = (values / scales.where(scales > 0, torch.inf)).round()
    return numbers.to(torch.int8), scales


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight, (..., columns), of the numbers and scales of `quantize`."""
    return numbers.float() * scales
