"""Norms of a convolution that are known before any data: folded into its filters once, they cost nothing afterwards.

Computed in float32 and stored as the filters are.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-5


def fold_weight_norm(direction: Tensor, magnitude: Tensor) -> Tensor:
    """direction: (width, inputs, maps); magnitude: (maps,). Returns the filters, (width, inputs, maps).

    w = g v / ||v||, the norm over width and inputs of each map (Salimans and Kingma 2016).
    """
    wide = direction.float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=(0, 1))
    return (wide * (magnitude.float() / norm)).to(direction.dtype)


def fold_batch_norm(filters: Tensor, bias: Tensor, norm: Tensor, epsilon: float = EPSILON) -> tuple[Tensor, Tensor]:
    """filters: (width, inputs, maps); bias: (maps,); norm: (4, maps) gain, offset, mean and variance. Returns filters and bias.

    gain * (y - mean) / sqrt(variance + epsilon) + offset, of each map before its activation (Ioffe and Szegedy 2015).
    """
    gain, offset, mean, variance = norm.float()
    scale = gain / torch.sqrt(variance + epsilon)
    return (filters.float() * scale).to(filters.dtype), ((bias.float() - mean) * scale + offset).to(filters.dtype)
