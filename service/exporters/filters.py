"""The filters of a convolution for formats without weight norms."""

from __future__ import annotations

import numpy as np

from service.exporters.model import Part
from service.importers.draft import Array


def filters(part: Part, prefix: str = "") -> Array:
    """Return (width, inputs, maps), computed from direction and magnitude if the convolution has a weight norm."""
    if f"{prefix}filters" in part.arrays:
        return part.numpy(f"{prefix}filters")
    direction = part.numpy(f"{prefix}direction").astype(np.float64)
    length = np.sqrt(np.square(direction).sum(axis=(0, 1)))
    whole: Array = direction * part.numpy(f"{prefix}magnitude") / length
    return whole.astype(np.float32)
