"""What is simulated: every way over rising load, the scheduler over turn budgets, and many replicas behind one front."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.simulation import figures, loads, ways
from loadtest.simulation.figures import Case, Figures, Make
from loadtest.simulation.ways import Way
from service.engine.batching.scheduler import Limits
from service.engine.execution.cost_model import Cost
from service.settings import Settings

CONTINUOUS, STATIC = "continuous", "static"
SHORT, MIXED = "short", "mixed"
LOAD = 0.7
"""Of the own capacity, where ways, budgets and replicas are compared."""
UNBOUNDED = 1 << 40
GUESSED_STEPS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is simulated. sequences: of one run, searching: of each that looks for a capacity, apiece: of each replica of many."""

    sequences: int = 50_000
    searching: int = 50_000
    apiece: int = 300
    loads: tuple[float, ...] = (0.1, 0.3, 0.5, LOAD, 0.9)
    budgets_ms: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    replicas: tuple[int, ...] = (1, 10, 100, 1000)
    mixtures: tuple[str, ...] = (SHORT, MIXED, "questions", "questions-mixed")


QUICK = Plan(
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
    """One run: `load` is a share of the capacity that `way` has with this mixture and Poisson arrivals; long_share: how fast long sequences
    went on, the median and what nine in ten have at least, as a share of one that has the device alone."""

    part: str
    way: str
    mixture: str
    arrivals: str
    load: float
    capacity: float
    replicas: int
    budget_ms: float
    figures: Figures
    long_share: tuple[float, float]

    def record(self) -> dict[str, Any]:
        """As plain values: times in us."""
        found = self.figures
        return {
            **{name: getattr(self, name) for name in ("part", "way", "mixture", "arrivals", "load", "replicas", "budget_ms")},
            "capacity_per_second": round(self.capacity),
            "rate_per_second": round(found.rate),
            **{f"short_{name}_us": round(1e6 * seconds, 1) for name, seconds in found.short.items()},
            **{f"all_{name}_us": round(1e6 * seconds, 1) for name, seconds in found.all.items()},
            "long_share_p50": round(self.long_share[0], 3) if found.long_seconds else None,
            "long_share_p10": round(self.long_share[1], 3) if found.long_seconds else None,
            "utilisation": round(found.utilisation, 3),
            "rows_a_turn": round(found.rows_a_turn, 2),
        }


@dataclass(slots=True)
class Simulation:
    """Runs what it is asked, and remembers capacities."""

    cost: Cost
    plan: Plan
    budget_ms: float
    timer_ms: float = ways.TIMER_MS
    seed: int = 0
    _capacities: dict[tuple[str, str, float], float] = field(default_factory=dict)

    def everything(self) -> Iterator[Result]:
        yield from self.over_loads()
        yield from self.beside_static()
        yield from self.over_budgets()
        yield from self.over_replicas()

    def over_loads(self) -> Iterator[Result]:
        """Each way at shares of its own capacity, and once with bursts."""
        for mixture in self.plan.mixtures:
            for way in ways.NAMES:
                for load in self.plan.loads:
                    yield self._result("loads", way, mixture, load)
                yield self._result("bursts", way, mixture, LOAD, arrivals="bursty")

    def beside_static(self) -> Iterator[Result]:
        """The scheduler at the very rates of which static batching sustains LOAD."""
        for mixture in self.plan.mixtures:
            if mixture == SHORT:
                continue
            rate = LOAD * self.capacity(STATIC, mixture, self.budget_ms)
            load = rate / self.capacity(CONTINUOUS, mixture, self.budget_ms)
            for way, share in ((STATIC, LOAD), (CONTINUOUS, load)):
                yield self._result("beside", way, mixture, share)

    def over_budgets(self) -> Iterator[Result]:
        for budget_ms in self.plan.budgets_ms:
            for mixture in (SHORT, MIXED):
                yield self._result("budgets", CONTINUOUS, mixture, LOAD, budget_ms=budget_ms)

    def over_replicas(self) -> Iterator[Result]:
        """Each has as much to do as one alone. Long sequences that one has begun in the mean are there from the beginning."""
        for way in (CONTINUOUS, STATIC):
            for replicas in self.plan.replicas:
                yield self._result("replicas", way, MIXED, LOAD, replicas=replicas)

    def capacity(self, way: str, mixture: str, budget_ms: float) -> float:
        known = self._capacities
        if (way, mixture, budget_ms) not in known:
            near = known.get((way, mixture, self.budget_ms)) or self._guess(mixture)
            case = Case(self.cost, mixture, self.plan.searching, seed=self.seed)
            known[way, mixture, budget_ms] = figures.capacity(case, self._make(way, budget_ms), near)
        return known[way, mixture, budget_ms]

    def _guess(self, mixture: str) -> float:
        """Where a search for a capacity begins: full turns of GUESSED_STEPS of each row."""
        rows = Settings().max_batch_sequences
        mean = statistics.mean(one.steps for one in loads.sequences(mixture, 1.0, self.plan.searching, seed=self.seed))
        return rows * GUESSED_STEPS / self.cost.of(GUESSED_STEPS, rows * GUESSED_STEPS) / mean

    def _result(
        self,
        part: str,
        way: str,
        mixture: str,
        load: float,
        *,
        arrivals: str = "poisson",
        replicas: int = 1,
        budget_ms: float | None = None,
    ) -> Result:
        budget_ms = self.budget_ms if budget_ms is None else budget_ms
        make, capacity = self._make(way, budget_ms), self.capacity(way, mixture, budget_ms)
        case = Case(self.cost, mixture, self.plan.sequences, arrivals, self.seed)
        begun = 0.0
        if replicas > 1:
            case = replace(case, count=max(self.plan.sequences, self.plan.apiece * replicas))
            begun = self._begun(case, make, load * capacity) if way == CONTINUOUS else 0.0
        found = figures.run(case, make, load * capacity * replicas, replicas, begun)
        solo = figures.solo_steps_per_second(self.cost, make)
        share = found.long_steps_per_second[0] / solo, found.long_steps_per_second[1] / solo
        return Result(part, way, mixture, arrivals, load, capacity, replicas, budget_ms, found, share)

    def _begun(self, case: Case, make: Make, rate: float) -> float:
        """Long sequences that one replica has at any time, in the mean: how many come a second, times how long each stays."""
        alone = figures.run(replace(case, count=self.plan.sequences), make, rate)
        return rate * loads.LONG_SHARES[case.mixture] * alone.long_seconds

    def _make(self, way: str, budget_ms: float) -> Make:
        knobs = Settings()
        limits = Limits(UNBOUNDED, knobs.max_batch_sequences, knobs.max_batch_tokens, budget_ms / 1000)

        def make() -> Way:
            return ways.make(way, self.cost, limits, self.timer_ms / 1000)

        return make
