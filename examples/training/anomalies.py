"""Plants faults of sensors in streams, and counts the faults that a score finds. Requires NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

KINDS = ("spike", "frozen", "shift")
EVERY = 100
"""Steps between the beginnings of two faults."""
LATEST, RECOVERY = 5, 20
"""Steps after the end of a fault in which it may still be found, and steps after it that count as no false alarm."""

Streams = NDArray[np.float32]
"""(streams, steps, channels)"""


@dataclass(frozen=True)
class Fault:
    """A fault of a stream, in the steps from `begin` up to `end`."""

    kind: str
    stream: int
    begin: int
    end: int


def plant(random: Generator, streams: Streams) -> tuple[Streams, list[Fault]]:
    """Return the streams with faults of one channel each: a single wrong reading, a sensor that repeats a reading, or a sensor that
    is off by a constant."""
    faulty, faults = streams.copy(), []
    count, steps, channels = streams.shape
    for stream in range(count):
        for number, begin in enumerate(range(EVERY // 2, steps - EVERY // 2, EVERY)):
            kind, channel = KINDS[(stream + number) % len(KINDS)], int(random.integers(channels))
            end = begin + (1 if kind == "spike" else int(random.integers(15, 30)))
            if kind == "frozen":
                faulty[stream, begin:end, channel] = faulty[stream, begin - 1, channel]
            else:
                faulty[stream, begin:end, channel] += random.choice((-1, 1)) * random.uniform(0.5, 1.0)
            faults.append(Fault(kind, stream, begin, end))
    return faulty, faults


@dataclass(frozen=True)
class Found:
    """found: the share of the faults of each kind. false_alarms: per 1,000 steps without a fault. delay: the median, in steps."""

    found: dict[str, float]
    false_alarms: float
    delay: float


def count(alarms: NDArray[np.bool_], faults: list[Fault]) -> Found:
    """Count the faults that alarms find. alarms: (streams, steps), whether the reading of the step is unexpected."""
    ordinary = np.ones(alarms.shape, bool)
    first: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for fault in faults:
        ordinary[fault.stream, fault.begin : fault.end + RECOVERY] = False
        [steps] = np.nonzero(alarms[fault.stream, fault.begin : fault.end + LATEST])
        first[fault.kind].append(float(steps[0]) if len(steps) else np.nan)
    delays = np.concatenate([values for values in first.values() if values])
    return Found(
        {kind: float(np.mean(~np.isnan(values))) for kind, values in first.items() if values},
        1000 * float(alarms[ordinary].mean()),
        float(np.nanmedian(delays)) if not np.isnan(delays).all() else np.nan,
    )
