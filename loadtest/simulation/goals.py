"""What is wanted of the scheduler, and whether a simulation met it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from loadtest.simulation.plan import CONTINUOUS, LOAD, STATIC, Result

BUDGETS_MORE = 1.5
TIMES = 2.0
TIMES_BUDGET_MS = 0.1
LONG_SHARE = 0.7
BETTER = 5.0


@dataclass(frozen=True, slots=True)
class Goal:
    wanted: str
    found: str
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED'}: {self.wanted}: {self.found}"


def goals(results: Many[Result]) -> Iterator[Goal]:
    """Of the runs over budgets at LOAD, short ones beside mixed ones, and of those beside static batching."""
    for short, mixed in _pairs(results):
        yield from _of_budget(short, mixed)
    beside = {one.way: one for one in results if one.part == "beside" and one.mixture == "mixed"}
    if beside:
        yield _beside_static(beside[CONTINUOUS], beside[STATIC])


def _pairs(results: Many[Result]) -> list[tuple[Result, Result]]:
    found = {(one.mixture, one.budget_ms): one for one in results if one.part == "budgets"}
    budgets = sorted({budget for _, budget in found})
    return [(found["short", budget], found["mixed", budget]) for budget in budgets]


def _of_budget(short: Result, mixed: Result) -> Iterator[Goal]:
    budget_ms, alone, among = mixed.budget_ms, short.figures.short["p99"], mixed.figures.short["p99"]
    at = f"budget {budget_ms:g} ms, {LOAD:g} of the own capacity"
    more = (among - alone) / (budget_ms / 1000)
    yield Goal(
        f"{at}: p99 of short sequences among long ones at most {BUDGETS_MORE:g} budgets above that of short ones alone",
        f"{1e6 * among:.1f} us and {1e6 * alone:.1f} us, {more:.2f} budgets",
        more <= BUDGETS_MORE,
    )
    if budget_ms == TIMES_BUDGET_MS:
        yield Goal(f"{at}: at most {TIMES:g} times", f"{among / alone:.2f} times", among <= TIMES * alone)
    if budget_ms >= TIMES_BUDGET_MS:
        yield Goal(
            f"{at}: long sequences keep {LONG_SHARE:.0%} of the pace that one has alone",
            f"{mixed.long_share[0]:.1%} in the median, nine in ten at least {mixed.long_share[1]:.1%}",
            mixed.long_share[0] >= LONG_SHARE,
        )


def _beside_static(continuous: Result, static: Result) -> Goal:
    ours, theirs = continuous.figures.short["p99"], static.figures.short["p99"]
    return Goal(
        f"p99 of short sequences at least {BETTER:g} times better than of static batching at the same rate, {LOAD:g} of what that sustains",
        f"{1e6 * ours:.1f} us and {1e6 * theirs:.1f} us at {static.figures.rate:.0f} a second, {theirs / ours:.0f} times",
        theirs >= BETTER * ours,
    )
