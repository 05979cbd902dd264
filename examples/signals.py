"""Made-up readings of three sensors on one machine, seeded and without end: what `train_sensors.py` learns from and is judged on.

They have what makes real streams hard to forecast: waves whose frequency and height wander, slow drift, levels that jump, noise, and
a sensor that follows the others late and not in proportion. Nothing but NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

CHANNELS = ("vibration", "temperature", "pressure")
NOISE = 0.05
"""Standard deviation of what nobody can forecast, in every reading."""
JUMP_EVERY, JUMP_SPREAD = 150, 0.7
"""The temperature's level: steps from one jump to the next in the mean, and the standard deviation of levels."""
DELAY = 4
"""Steps after which the pressure follows the vibration."""

Readings = NDArray[np.float32]
"""(streams, steps, channels)"""
Series = NDArray[np.float64]
"""(streams, steps)"""


def streams(seed: Sequence[int], count: int, steps: int) -> Readings:
    """So many streams of so many readings; the same seed gives the same ones.

    The vibration is two waves on a slow drift: how it goes on depends on how fast it goes now, which no fixed rule of the last
    readings knows. The temperature is a slow wave on a level that jumps: the past before a jump misleads. The pressure follows both
    through a saturation, with a wave of its own: it can be told from the other sensors.
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
    """A sine of about this period; frequency and height wander, each within some tens of percent."""
    frequency = np.exp(wander(random, shape, 100, 0.4)) / period
    height = np.exp(wander(random, shape, 150, 0.3))
    return height * np.sin(2 * np.pi * (random.random((shape[0], 1)) + np.cumsum(frequency, axis=1)))


def wander(random: Generator, shape: tuple[int, int], memory: float, spread: float) -> Series:
    """A random walk that is drawn back to zero (Ornstein-Uhlenbeck): forgotten after some `memory` steps, as wide as `spread`."""
    kept = np.exp(-1 / memory)
    walk = spread * random.normal(size=shape)
    walk[:, 1:] *= np.sqrt(1 - kept**2)
    for step in range(1, shape[1]):
        walk[:, step] += kept * walk[:, step - 1]
    return walk


def levels(random: Generator, shape: tuple[int, int]) -> Series:
    """Constant until it jumps to a level that has nothing to do with the last one."""
    jumps = random.random(shape) < 1 / JUMP_EVERY
    jumps[:, 0] = True
    since = np.maximum.accumulate(np.where(jumps, np.arange(shape[1]), 0), axis=1)
    return np.take_along_axis(JUMP_SPREAD * random.normal(size=shape), since, axis=1)
