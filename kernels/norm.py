"""Layer norm, as torch.nn.LayerNorm computes it (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

EPSILON = 1e-5


def layer_norm(values: Tensor, norm: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return the normalised values, (n, width) float32. values: (n, width); norm: (2, width) gain and offset."""
    gain, offset = norm.float()
    return functional.layer_norm(values.float(), values.shape[1:], gain, offset, epsilon)
