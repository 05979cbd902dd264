"""Weight norm and batch norm, folded into the filters at load, so that they cost nothing per request.

Computed in float32 and stored in the dtype of the filters.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold_weight_norm(direction: Tensor, magnitude: Tensor) -> Tensor:
    """Return the filters (width, inputs, maps) of a direction (width, inputs, maps) and a magnitude (maps,).

    w = g v / ||v||, with the norm over the width and inputs of each map (Salimans and Kingma 2016).
    """
    wide = direction.float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=(0, 1))
    return (wide * (magnitude.float() / norm)).to(direction.dtype)


def fold_batch_norm(filters: Tensor, bias: Tensor, norm: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return filters and bias that include a batch norm.

    filters: (width, inputs, maps); bias: (maps,); norm: (4, maps) gain, offset, mean and variance.
    gain * (y - mean) / sqrt(variance + epsilon) + offset, applied to each map before its activation (Ioffe and Szegedy 2015).
    """
    gain, offset, mean, variance = norm.float()
    scale = gain / torch.sqrt(variance + epsilon)
    return (filters.float() * scale).to(filters.dtype), ((bias.float() - mean) * scale + offset).to(filters.dtype)
