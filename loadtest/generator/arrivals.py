"""Seeded arrivals that do not wait for answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

BURST = 20
"""Mean number of requests in a burst."""


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield the seconds between independent arrivals, with a mean of `rate` a second."""
    source = random.Random(seed)
    while True:
        yield source.expovariate(rate)


def bursty(rate: float, seed: int) -> Iterator[float]:
    """Yield the seconds between arrivals in bursts of BURST simultaneous requests on average, with a mean of `rate` a second."""
    source = random.Random(seed)
    while True:
        yield source.expovariate(rate / BURST)
        while source.random() > 1 / BURST:
            yield 0.0


ARRIVALS = {"poisson": poisson, "bursty": bursty}
