"""Figures of a run: latency, pace of long sequences, utilisation; and the highest load that a policy sustains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.simulation import arrivals
from loadtest.simulation.clock import Clock, Totals
from loadtest.simulation.policies import BatchingPolicy, SimulatedSequence
from service.engine.execution.cost_model import Cost

QUANTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
FROM, TO = 0.1, 0.8
"""Shares of a run between which arrivals count: before, queues are too short; after, the last sequences have the device alone."""
GROWTH = 0.03
"""A load is sustained when at most this share of the steps that arrive in the second half of a run is left at its end."""
PRECISION = 0.03
"""Relative precision of a capacity."""

MakePolicy = Callable[[], BatchingPolicy]


@dataclass(frozen=True, slots=True)
class SimulationCase:
    """Traffic of a run. count: number of sequences."""

    cost: Cost
    mixture: str
    count: int
    arrivals: str = "poisson"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulationFigures:
    """Results of one run. Latencies are seconds by name of QUANTILES.

    long_steps_per_second: pace of a long sequence from arrival to answer, the median and the 10th percentile; growth: share of the steps
    that arrived in the second half and were left at its end.
    """

    rate: float
    short: dict[str, float]
    all: dict[str, float]
    long_steps_per_second: tuple[float, float]
    long_seconds: float
    utilisation: float
    rows_a_batch: float
    growth: float


def run(case: SimulationCase, make: MakePolicy, rate: float, replicas: int = 1, started: float = 0.0) -> SimulationFigures:
    """Simulate `rate` sequences a second over all replicas. started: mean number of long sequences in progress at each replica."""
    sequences = arrivals.sequences(case.mixture, rate, case.count, case.arrivals, case.seed)
    clock = Clock([make() for _ in range(replicas)], case.cost, sequences)
    for index, sequence in arrivals.started(replicas, started, case.seed):
        clock.begin_with(index, sequence)
    return _figures(rate, sequences, clock.run())


def _figures(rate: float, sequences: Sequence[SimulatedSequence], totals: Totals) -> SimulationFigures:
    counted = [sequence for sequence in sequences if FROM <= sequence.arrived / totals.span <= TO]
    long = [sequence for sequence in counted if sequence.steps == arrivals.LONG_STEPS]
    second_half = sum([sequence.steps for sequence in sequences[len(sequences) // 2 + 1 :]])
    return SimulationFigures(
        rate=rate,
        short=_quantiles([sequence for sequence in counted if sequence.steps < arrivals.LONG_STEPS]),
        all=_quantiles(counted),
        long_steps_per_second=_paces(long),
        long_seconds=float(np.mean(_seconds(long))) if long else 0.0,
        utilisation=totals.busy / totals.span / totals.replicas,
        rows_a_batch=totals.rows / max(1, totals.batches),
        growth=(totals.left_at_end - totals.left_at_half) / max(1, second_half),
    )


def _seconds(sequences: Sequence[SimulatedSequence]) -> list[float]:
    return [sequence.answered - sequence.arrived for sequence in sequences]


def _quantiles(sequences: Sequence[SimulatedSequence]) -> dict[str, float]:
    if not sequences:
        return dict.fromkeys(QUANTILES, math.nan)
    seconds = np.percentile(_seconds(sequences), list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, seconds), strict=True))


def _paces(long: Sequence[SimulatedSequence]) -> tuple[float, float]:
    if not long:
        return math.nan, math.nan
    paces = [sequence.steps / seconds for sequence, seconds in zip(long, _seconds(long), strict=True)]
    median, lowest = np.percentile(paces, (50, 10))
    return float(median), float(lowest)


def solo_steps_per_second(cost: Cost, make: MakePolicy) -> float:
    """Return the pace of one long sequence that has the device alone."""
    sequence = SimulatedSequence(arrivals.LONG_STEPS)
    Clock([make()], cost, [sequence]).run()
    return sequence.steps / sequence.answered


def capacity(case: SimulationCase, make: MakePolicy, near: float) -> float:
    """Return the highest sustained rate of a replica. The bisection starts at `near`."""
    low, high = near / 1.2, near * 1.2
    while not _sustained(case, make, low):
        low, high = low / 2, low
    while _sustained(case, make, high):
        low, high = high, high * 2
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _sustained(case, make, middle) else (low, middle)
    return low


def _sustained(case: SimulationCase, make: MakePolicy, rate: float) -> bool:
    return run(case, make, rate).growth <= GROWTH
