"""Forecasts as quantiles: their loss and their intervals. Requires NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.1, 0.5, 0.9)
"""Quantiles of the next reading; the first and the last bound an interval that has it with a probability of 80 %."""
Array = NDArray[np.float64]
Forecasts = Array
"""(streams, steps, channels, quantiles): after each step, of the next reading"""


def ordered(values: Array, channels: int) -> Forecasts:
    """Return forecasts of a model's values (..., channels * quantiles), each with its quantiles in order."""
    return np.sort(values.reshape(*values.shape[:-1], channels, len(QUANTILES)), axis=-1)


def pinball(forecasts: Forecasts, following: Array) -> float:
    """Return the mean pinball loss, which only the true quantiles minimise. following: (streams, steps, channels), the next readings."""
    above = following[..., None] - forecasts
    return float(np.maximum(np.multiply(QUANTILES, above), np.subtract(QUANTILES, 1) * above).mean())


def coverage(forecasts: Forecasts, following: Array) -> float:
    """Return the share of readings inside their interval."""
    return float(((forecasts[..., 0] <= following) & (following <= forecasts[..., -1])).mean())


def width(forecasts: Forecasts) -> float:
    """Return the mean width of the intervals, in the units of the readings."""
    return float((forecasts[..., -1] - forecasts[..., 0]).mean())
