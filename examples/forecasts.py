"""Baselines that forecast the next reading without a neural network, and the error of a forecast on held-out streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from signals import Readings, streams

Forecast = Callable[[Readings], Readings]
"""Returns forecasts of readings (streams, steps, channels), in the same shape. The forecast at a step predicts the next reading."""
FIRST = 8
"""Steps of each stream that errors skip, because the regression needs that many readings."""


def repeat_last_reading(readings: Readings) -> Readings:
    return readings


@dataclass(frozen=True)
class Regression:
    """A linear model: each channel's next reading is a weighted sum of the last `steps` readings of all channels, plus a constant."""

    steps: int
    weights: NDArray[np.float64]

    @classmethod
    def fitted(cls, readings: Readings, steps: int = FIRST) -> Regression:
        """Return the regression with the least squared error on these streams."""
        inputs = _windows(readings[:, :-1], steps)
        targets = readings[:, steps:].reshape(-1, readings.shape[-1])
        weights = np.linalg.lstsq(inputs.reshape(-1, inputs.shape[-1]), targets.astype(np.float64))[0]
        return cls(steps, weights.astype(np.float64))

    def __call__(self, readings: Readings) -> Readings:
        """Return the forecasts; the first steps, which have too few readings before them, get zeros."""
        forecasts = np.zeros_like(readings)
        forecasts[:, self.steps - 1 :] = _windows(readings, self.steps) @ self.weights
        return forecasts


def errors(forecast: Forecast, readings: Readings, first: int = FIRST) -> NDArray[np.float64]:
    """Return the root mean squared error of each channel, then of all channels together, without the `first` steps."""
    squared = (forecast(readings)[:, :-1] - readings[:, 1:]).astype(np.float64)[:, first:] ** 2
    return np.sqrt([*squared.mean(axis=(0, 1)), squared.mean()])


def errors_by_seed(
    forecast: Forecast, seeds: Sequence[Sequence[int]], count: int, steps: int, first: int = FIRST
) -> NDArray[np.float64]:
    """Return `errors` on the streams of each seed: (seeds, channels + 1)."""
    return np.stack([errors(forecast, streams(seed, count, steps), first) for seed in seeds])


def _windows(readings: Readings, steps: int) -> NDArray[np.float64]:
    """Return the inputs of a regression, (streams, steps from `steps` on, steps x channels + 1): the last readings and a constant 1."""
    windows = sliding_window_view(readings, steps, axis=1)
    flat = windows.reshape(*windows.shape[:2], -1).astype(np.float64)
    return np.concatenate([flat, np.ones((*flat.shape[:2], 1))], axis=-1)


def line(name: str, errors: NDArray[np.float64]) -> str:
    """Return the line of a table: medians of `errors_by_seed`, and of all channels also the lowest and highest seed."""
    medians = " | ".join(f"{median:.3f}" for median in np.median(errors, axis=0))
    all_channels = errors[:, -1]
    return f"| {name} | {medians} ({all_channels.min():.3f} to {all_channels.max():.3f}) |"
