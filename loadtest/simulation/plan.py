"""Runs of a simulation: every policy at rising load, the scheduler at several batch budgets, and many replicas behind one frontend."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.simulation import arrivals, figures, policies
from loadtest.simulation.figures import MakePolicy, SimulationCase, SimulationFigures
from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.execution.cost_model import Cost
from service.settings import Settings

CONTINUOUS, STATIC = "continuous", "static"
SHORT, MIXED = "short", "mixed"
LOAD = 0.7
"""Share of a policy's capacity at which policies, budgets and replicas are compared."""
UNBOUNDED = 1 << 40
GUESSED_STEPS = 16


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """Extent of a simulation. sequences: of a run; searching: of a run in the search for a capacity; apiece: of each of many replicas."""

    sequences: int = 50_000
    searching: int = 50_000
    apiece: int = 300
    loads: tuple[float, ...] = (0.1, 0.3, 0.5, LOAD, 0.9)
    budgets_ms: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    replicas: tuple[int, ...] = (1, 10, 100, 1000)
    mixtures: tuple[str, ...] = (SHORT, MIXED, "questions", "questions-mixed")


QUICK = SimulationPlan(
    sequences=30_000,
    searching=40_000,
    apiece=200,
    loads=(0.3, LOAD),
    budgets_ms=(0.1, 0.5),
    replicas=(1, 10),
    mixtures=(SHORT, MIXED),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One run. load: share of the capacity of `policy` with this mixture and Poisson arrivals.

    long_share: pace of long sequences as a share of the pace on an idle device, the median and the 10th percentile.
    """

    part: str
    policy: str
    mixture: str
    arrivals: str
    load: float
    capacity: float
    replicas: int
    budget_ms: float
    figures: SimulationFigures
    long_share: tuple[float, float]

    def record(self) -> dict[str, Any]:
        """Return the run as plain values, with latencies in microseconds."""
        measured, labels = self.figures, ("part", "policy", "mixture", "arrivals", "load", "replicas", "budget_ms")
        return {
            **{name: getattr(self, name) for name in labels},
            "capacity_per_second": round(self.capacity),
            "rate_per_second": round(measured.rate),
            **{f"short_{name}_us": round(1e6 * seconds, 1) for name, seconds in measured.short.items()},
            **{f"all_{name}_us": round(1e6 * seconds, 1) for name, seconds in measured.all.items()},
            "long_share_p50": round(self.long_share[0], 3) if measured.long_seconds else None,
            "long_share_p10": round(self.long_share[1], 3) if measured.long_seconds else None,
            "utilisation": round(measured.utilisation, 3),
            "rows_a_batch": round(measured.rows_a_batch, 2),
        }


@dataclass(slots=True)
class Simulation:
    """Simulates the runs of a plan, and caches capacities."""

    cost: Cost
    plan: SimulationPlan
    budget_ms: float
    timer_ms: float = policies.TIMER_MS
    seed: int = 0
    _capacities: dict[tuple[str, str, float], float] = field(default_factory=dict)

    def everything(self) -> Iterator[Result]:
        yield from self.over_loads()
        yield from self.at_static_rate()
        yield from self.over_budgets()
        yield from self.over_replicas()

    def over_loads(self) -> Iterator[Result]:
        """Run each policy at shares of its capacity, and once with bursts."""
        for mixture in self.plan.mixtures:
            for policy in policies.NAMES:
                for load in self.plan.loads:
                    yield self._result("loads", policy, mixture, load)
                yield self._result("bursts", policy, mixture, LOAD, arrivals="bursty")

    def at_static_rate(self) -> Iterator[Result]:
        """Run static batching at LOAD, and the scheduler at the same rate."""
        for mixture in self.plan.mixtures:
            if mixture == SHORT:
                continue
            rate = LOAD * self.capacity(STATIC, mixture, self.budget_ms)
            load = rate / self.capacity(CONTINUOUS, mixture, self.budget_ms)
            for policy, share in ((STATIC, LOAD), (CONTINUOUS, load)):
                yield self._result("same rate", policy, mixture, share)

    def over_budgets(self) -> Iterator[Result]:
        for budget_ms in self.plan.budgets_ms:
            for mixture in (SHORT, MIXED):
                yield self._result("budgets", CONTINUOUS, mixture, LOAD, budget_ms=budget_ms)

    def over_replicas(self) -> Iterator[Result]:
        """Run many replicas, each at LOAD. With the scheduler, each replica has its mean number of long sequences from the start."""
        for policy in (CONTINUOUS, STATIC):
            for replicas in self.plan.replicas:
                yield self._result("replicas", policy, MIXED, LOAD, replicas=replicas)

    def capacity(self, policy: str, mixture: str, budget_ms: float) -> float:
        known = self._capacities
        if (policy, mixture, budget_ms) not in known:
            near = known.get((policy, mixture, self.budget_ms)) or self._guess(mixture)
            case = SimulationCase(self.cost, mixture, self.plan.searching, seed=self.seed)
            known[policy, mixture, budget_ms] = figures.capacity(case, self._make(policy, budget_ms), near)
        return known[policy, mixture, budget_ms]

    def _guess(self, mixture: str) -> float:
        """Return a first guess of a capacity: full batches with GUESSED_STEPS steps of each row."""
        rows = Settings().max_batch_sequences
        sequences = arrivals.sequences(mixture, 1.0, self.plan.searching, seed=self.seed)
        mean = statistics.mean(sequence.steps for sequence in sequences)
        return rows * GUESSED_STEPS / self.cost.of(GUESSED_STEPS, rows * GUESSED_STEPS) / mean

    def _result(
        self,
        part: str,
        policy: str,
        mixture: str,
        load: float,
        *,
        arrivals: str = "poisson",
        replicas: int = 1,
        budget_ms: float | None = None,
    ) -> Result:
        budget_ms = self.budget_ms if budget_ms is None else budget_ms
        make, capacity = self._make(policy, budget_ms), self.capacity(policy, mixture, budget_ms)
        case = SimulationCase(self.cost, mixture, self.plan.sequences, arrivals, self.seed)
        started = 0.0
        if replicas > 1:
            case = replace(case, count=max(self.plan.sequences, self.plan.apiece * replicas))
            started = self._mean_long(case, make, load * capacity) if policy == CONTINUOUS else 0.0
        measured = figures.run(case, make, load * capacity * replicas, replicas, started)
        solo = figures.solo_steps_per_second(self.cost, make)
        median, lowest = measured.long_steps_per_second
        share = median / solo, lowest / solo
        return Result(part, policy, mixture, arrivals, load, capacity, replicas, budget_ms, measured, share)

    def _mean_long(self, case: SimulationCase, make: MakePolicy, rate: float) -> float:
        """Return the mean number of long sequences in progress on one replica: their arrival rate times their latency."""
        alone = figures.run(replace(case, count=self.plan.sequences), make, rate)
        return rate * arrivals.LONG_SHARES[case.mixture] * alone.long_seconds

    def _make(self, policy: str, budget_ms: float) -> MakePolicy:
        settings = Settings()
        limits = SchedulerLimits(UNBOUNDED, settings.max_batch_sequences, settings.max_batch_tokens, budget_ms / 1000)
        return lambda: policies.make(policy, self.cost, limits, self.timer_ms / 1000)
