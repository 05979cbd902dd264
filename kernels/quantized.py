"""Weights as 8-bit integers with one scale for each column, symmetric around zero.

Weight w of a column is ``round(w / scale)`` with ``scale = largest |w| / 127``, so the numbers are from -127 to 127. Quantizing the
product of the numbers and their scales gives the same numbers again.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
"""The largest number."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight, (..., columns), as int8 numbers of the same shape, and the scales, (columns,) float32. A column of zeros has
    the scale 0."""
    values = weight.float()
    magnitudes = values.abs().flatten(0, -2)
    scales = torch.cat((magnitudes, magnitudes.new_zeros(1, magnitudes.shape[1]))).amax(0) / LEVELS
    # The scales of the smallest float32 numbers are inexact.
    numbers = (values / scales.where(scales > 0, 1)).round().clamp(-LEVELS, LEVELS)
    return numbers.to(torch.int8), scales


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight, (..., columns), of the numbers and scales of `quantize`."""
    return numbers.float() * scales
