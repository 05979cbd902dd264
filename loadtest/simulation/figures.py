"""What a run gave: times of answers, how fast long sequences went on, how much devices worked; and how much load a way sustains."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from loadtest.simulation import loads
from loadtest.simulation.clock import Clock, Totals
from loadtest.simulation.ways import Sequence, Way
from service.engine.execution.cost_model import Cost

QUANTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
FROM, TO = 0.1, 0.8
"""Sequences count that come between these shares of a run: before, queues are too short, and after, what came last has the device alone."""
GROWTH = 0.03
"""A load is sustained when no more of the steps that come in the second half of a run than this share are left over."""
PRECISION = 0.03
"""Of the capacity, as a share of it."""

Make = Callable[[], Way]


@dataclass(frozen=True, slots=True)
class Case:
    """What is run; count: sequences."""

    cost: Cost
    mixture: str
    count: int
    arrivals: str = "poisson"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Times in seconds, by names of QUANTILES; long_steps_per_second: of a long sequence from its arrival to its answer, the
    median and what nine in ten have at least; growth: share of the steps that came in the second half which were left over at its end."""

    rate: float
    short: dict[str, float]
    all: dict[str, float]
    long_steps_per_second: tuple[float, float]
    long_seconds: float
    utilisation: float
    rows_a_turn: float
    growth: float


def run(case: Case, make: Make, rate: float, replicas: int = 1, begun: float = 0.0) -> Figures:
    """`rate` is that of all replicas together. begun: long sequences that each replica has begun before the first comes, in the mean."""
    sequences = loads.sequences(case.mixture, rate, case.count, case.arrivals, case.seed)
    clock = Clock([make() for _ in range(replicas)], case.cost, sequences)
    for place, one in loads.begun(replicas, begun, case.seed):
        clock.begin_with(place, one)
    return _figures(rate, sequences, clock.run())


def _figures(rate: float, sequences: Many[Sequence], totals: Totals) -> Figures:
    counted = [one for one in sequences if FROM <= one.arrived / totals.span <= TO]
    long = [one for one in counted if one.steps == loads.LONG_STEPS]
    second_half = sum([one.steps for one in sequences[len(sequences) // 2 + 1 :]])
    return Figures(
        rate=rate,
        short=_quantiles([one for one in counted if one.steps < loads.LONG_STEPS]),
        all=_quantiles(counted),
        long_steps_per_second=_paces(long),
        long_seconds=float(np.mean(_seconds(long))) if long else 0.0,
        utilisation=totals.worked / totals.span / totals.replicas,
        rows_a_turn=totals.rows / max(1, totals.batches),
        growth=(totals.left_at_end - totals.left_at_half) / max(1, second_half),
    )


def _seconds(sequences: Many[Sequence]) -> list[float]:
    return [one.answered - one.arrived for one in sequences]


def _quantiles(sequences: Many[Sequence]) -> dict[str, float]:
    if not sequences:
        return dict.fromkeys(QUANTILES, math.nan)
    found = np.percentile(_seconds(sequences), list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, found), strict=True))


def _paces(long: Many[Sequence]) -> tuple[float, float]:
    if not long:
        return math.nan, math.nan
    median, least = np.percentile([one.steps / (one.answered - one.arrived) for one in long], (50, 10))
    return float(median), float(least)


def solo_steps_per_second(cost: Cost, make: Make) -> float:
    """Of one long sequence on a device that has nothing else to do."""
    one = Sequence(loads.LONG_STEPS)
    Clock([make()], cost, [one]).run()
    return one.steps / one.answered


def capacity(case: Case, make: Make, near: float) -> float:
    """The highest rate that one replica sustains, found by halving; `near` is where the search begins."""
    low, high = near / 1.2, near * 1.2
    while not _sustained(case, make, low):
        low, high = low / 2, low
    while _sustained(case, make, high):
        low, high = high, high * 2
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _sustained(case, make, middle) else (low, middle)
    return low


def _sustained(case: Case, make: Make, rate: float) -> bool:
    return run(case, make, rate).growth <= GROWTH
