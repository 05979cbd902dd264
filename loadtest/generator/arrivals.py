"""Seeded arrivals that do not wait for answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, cycle, pairwise

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


def staggered(count: int, period: float, seed: int) -> Iterator[float]:
    """Yield the seconds between the arrivals of streams that send in turn, each at its own random moment of every period."""
    source = random.Random(seed)
    moments = sorted(source.uniform(0, period) for _ in range(count))
    gaps = [later - earlier for earlier, later in pairwise([*moments, moments[0] + period])]
    return chain(moments[:1], cycle(gaps))


ARRIVALS = {"poisson": poisson, "bursty": bursty}
