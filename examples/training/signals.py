"""Simulated readings of three sensors on one machine, the data of `train_forecast.py`. Requires NumPy only.

They are hard to forecast, like real streams: waves with changing frequency and amplitude, slow drift, levels that jump, noise, and a
sensor that follows the others with a delay and a saturation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

CHANNELS = ("vibration", "temperature", "pressure")
NOISE = 0.05
"""Standard deviation of the noise in every reading, which cannot be forecast."""
JUMP_EVERY, JUMP_SPREAD = 150, 0.7
"""The level of the temperature: mean number of steps between jumps, and standard deviation of the levels."""
DELAY = 4
"""Steps by which the pressure lags the vibration."""

MAX_STEPS = 4096
"""`max_steps` of the models."""

Readings = NDArray[np.float32]
"""(streams, steps, channels)"""
Series = NDArray[np.float64]
"""(streams, steps)"""


def streams(seed: Sequence[int], count: int, steps: int) -> Readings:
    """Return `count` streams of `steps` readings. The same seed returns the same streams.

    The vibration is two waves on a slow drift: a forecast depends on the current frequency, which no fixed function of the last readings
    captures. The temperature is a slow wave on a level that jumps: readings before a jump are misleading. The pressure is a saturated sum
    of both plus another wave, so that the other sensors help to forecast it.
    """
    random = np.random.default_rng(seed)
    shape = count, steps + DELAY
    vibration = 0.7 * wave(random, shape, period=20) + 0.3 * wave(random, shape, period=8) + wander(random, shape, 300, 0.3)
    temperature = 0.5 * wave(random, shape, period=40) + levels(random, shape)
    pressure = 0.3 * wave(random, shape, period=12)
    pressure[:, DELAY:] += np.tanh(1.5 * vibration[:, :-DELAY] + temperature[:, DELAY:])
    clean = np.stack([vibration, temperature, pressure], axis=-1)[:, DELAY:]
    return (clean + NOISE * random.normal(size=clean.shape)).astype(np.float32)


def wave(random: Generator, shape: tuple[int, int], period: float) -> Series:
    """Return sines of about this period. Their frequency and amplitude wander by some tens of percent."""
    frequency = np.exp(wander(random, shape, 100, 0.4)) / period
    amplitude = np.exp(wander(random, shape, 150, 0.3))
    return amplitude * np.sin(2 * np.pi * (random.random((shape[0], 1)) + np.cumsum(frequency, axis=1)))


def wander(random: Generator, shape: tuple[int, int], memory: float, spread: float) -> Series:
    """Return random walks that revert to zero (Ornstein-Uhlenbeck) within about `memory` steps, with standard deviation `spread`."""
    decay = np.exp(-1 / memory)
    walk = spread * random.normal(size=shape)
    walk[:, 1:] *= np.sqrt(1 - decay**2)
    for step in range(1, shape[1]):
        walk[:, step] += decay * walk[:, step - 1]
    return walk


def levels(random: Generator, shape: tuple[int, int]) -> Series:
    """Return levels that are constant between jumps. Each level is independent of the previous level."""
    jumps = random.random(shape) < 1 / JUMP_EVERY
    jumps[:, 0] = True
    since = np.maximum.accumulate(np.where(jumps, np.arange(shape[1]), 0), axis=1)
    return np.take_along_axis(JUMP_SPREAD * random.normal(size=shape), since, axis=1)
