"""Goals of the scheduler, and whether a simulation met them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.simulation.plan import CONTINUOUS, LOAD, MIXED, SHORT, STATIC, Result

MORE_BUDGETS = 1.5
TIMES = 2.0
TIMES_BUDGET_MS = 0.1
LONG_SHARE = 0.7
BETTER = 5.0


@dataclass(frozen=True, slots=True)
class SimulationGoal:
    """One goal and its result."""

    description: str
    measured: str
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED'}: {self.description}: {self.measured}"


def goals(results: Sequence[Result]) -> Iterator[SimulationGoal]:
    """Yield the goals of each budget, then the comparison with static batching."""
    by_budget = {(result.mixture, result.budget_ms): result for result in results if result.part == "budgets"}
    for budget in sorted({budget for _, budget in by_budget}):
        yield from _of_budget(by_budget[SHORT, budget], by_budget[MIXED, budget])
    same_rate = {result.policy: result for result in results if result.part == "same rate" and result.mixture == MIXED}
    if same_rate:
        yield _compared_with_static(same_rate[CONTINUOUS], same_rate[STATIC])


def _of_budget(short: Result, mixed: Result) -> Iterator[SimulationGoal]:
    budget_ms, alone, among = mixed.budget_ms, short.figures.short["p99"], mixed.figures.short["p99"]
    at = f"budget {budget_ms:g} ms, {LOAD:g} of the capacity"
    more = (among - alone) / (budget_ms / 1000)
    yield SimulationGoal(
        f"{at}: p99 of short sequences in the mixture at most {MORE_BUDGETS:g} budgets above p99 without long sequences",
        f"{1e6 * among:.1f} us and {1e6 * alone:.1f} us, {more:.2f} budgets",
        more <= MORE_BUDGETS,
    )
    if budget_ms == TIMES_BUDGET_MS:
        yield SimulationGoal(
            f"{at}: at most {TIMES:g} times p99 without long sequences", f"{among / alone:.2f} times", among <= TIMES * alone
        )
    if budget_ms >= TIMES_BUDGET_MS:
        yield SimulationGoal(
            f"{at}: long sequences keep {LONG_SHARE:.0%} of the pace of a long sequence alone",
            f"{mixed.long_share[0]:.1%} in the median, at least {mixed.long_share[1]:.1%} for 90 %",
            mixed.long_share[0] >= LONG_SHARE,
        )


def _compared_with_static(continuous: Result, static: Result) -> SimulationGoal:
    ours, theirs = continuous.figures.short["p99"], static.figures.short["p99"]
    return SimulationGoal(
        f"p99 of short sequences at least {BETTER:g} times lower than with static batching at {LOAD:g} of its capacity",
        f"{1e6 * ours:.1f} us and {1e6 * theirs:.1f} us at {static.figures.rate:.0f} a second, {theirs / ours:.0f} times",
        theirs >= BETTER * ours,
    )
