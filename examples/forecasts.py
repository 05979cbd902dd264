"""Ways to forecast the next reading that need no training worth the name, and how wrong a way is on held-out streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from signals import Readings, streams

Forecast = Callable[[Readings], Readings]
"""(streams, steps, channels) to as many forecasts: the one at a step is of the reading after it, and knows no later one."""
FIRST = 8
"""Steps of each stream that are not judged, so that the regression has all the readings that it looks at."""


def last_reading_again(readings: Readings) -> Readings:
    return readings


@dataclass(frozen=True)
class Regression:
    """Each channel's next reading as a weighted sum of the last `steps` readings of all channels, and a constant."""

    steps: int
    weights: NDArray[np.float64]

    @classmethod
    def fitted(cls, readings: Readings, steps: int = FIRST) -> Regression:
        """The weights that have the least squared error on these streams."""
        known = _windows(readings[:, :-1], steps)
        wanted = readings[:, steps:].reshape(-1, readings.shape[-1])
        weights = np.linalg.lstsq(known.reshape(-1, known.shape[-1]), wanted.astype(np.float64))[0]
        return cls(steps, weights.astype(np.float64))

    def __call__(self, readings: Readings) -> Readings:
        """The first steps, of which it knows too few readings, get zeros."""
        forecasts = np.zeros_like(readings)
        forecasts[:, self.steps - 1 :] = _windows(readings, self.steps) @ self.weights
        return forecasts


def errors(forecast: Forecast, readings: Readings, first: int = FIRST) -> NDArray[np.float64]:
    """Root of the mean squared error of each channel and, last, of all together, without the first so many steps."""
    wrong = (forecast(readings)[:, :-1] - readings[:, 1:]).astype(np.float64)[:, first:] ** 2
    return np.sqrt([*wrong.mean(axis=(0, 1)), wrong.mean()])


def errors_by_seed(
    forecast: Forecast, seeds: Sequence[Sequence[int]], count: int, steps: int, first: int = FIRST
) -> NDArray[np.float64]:
    """(seeds, channels and all): `errors` on the streams of each seed."""
    return np.stack([errors(forecast, streams(seed, count, steps), first) for seed in seeds])


def _windows(readings: Readings, steps: int) -> NDArray[np.float64]:
    """(streams, from step `steps` on, steps x channels and a one): what a regression looks at."""
    windows = sliding_window_view(readings, steps, axis=1)
    flat = windows.reshape(*windows.shape[:2], -1).astype(np.float64)
    return np.concatenate([flat, np.ones((*flat.shape[:2], 1))], axis=-1)
