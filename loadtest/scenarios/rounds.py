"""Rounds of trials: the core of every scenario that compares servers under the same load.

Cases alternate within each round, so that other work on the machine affects all of them alike. Every ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from loadtest import load, report
from loadtest.callers import Connectable
from loadtest.load import Figures

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """One case in one round. case: the labels of the case; values: measured values by field name; stages: mean ms by stage."""

    case: dict[str, Any]
    round: int
    figures: Figures
    values: dict[str, float]
    stages: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        stages = {"stages_ms": {stage: round(value, 4) for stage, value in self.stages.items()}} if self.stages else {}
        return {
            **self.case,
            "round": self.round,
            **{name: round(value, 4) for name, value in self.values.items()},
            **stages,
            "answers": len(self.figures.answers),
            "failed": self.figures.failed,
        }


def add_options(parser: argparse.ArgumentParser, seconds: float, rounds: int) -> None:
    """Add the options that all comparisons have."""
    parser.add_argument("--seconds", type=float, default=seconds, help="duration of a trial (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of all cases (default: %(default)s)")


def measure(
    name: str, target: Connectable, requests: Iterator[bytes], callers: int, seconds: float, sample: Callable[[], T]
) -> tuple[Figures, T, T]:
    """Run a closed loop after a warm-up of a quarter of its time. Returns its figures, and `sample()` before and after it."""
    uvloop.run(load.closed(target, requests, callers, seconds / 4, lambda _: None))
    before = sample()
    figures = uvloop.run(load.closed(target, requests, callers, seconds, lambda _: None))
    after = sample()
    print(report.progress(name, figures, seconds), file=sys.stderr, flush=True)
    return figures, before, after


def values_of(figures: Figures) -> dict[str, float]:
    """Return the rate and the quantiles of a trial."""
    return {"answers/s": figures.rate} | {f"{name}_ms": value for name, value in report.milliseconds(figures).items()}


def by_case(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Return the rounds of each case, in the order in which the cases first ran."""
    cases: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        cases.setdefault(tuple(trial.case.items()), []).append(trial)
    return list(cases.values())


def spreads(trials: Sequence[Trial], columns: Iterable[str]) -> list[str]:
    """Return the spread of each column over the rounds of one case."""
    return [report.spread([(trial.stages | trial.values)[name] for trial in trials]) for name in columns]


def ratios(trials: Sequence[Trial], baseline: Sequence[Trial], columns: Iterable[str]) -> list[str]:
    """Return the spread of each column's ratio to the baseline case in the same round."""
    pairs = list(zip(trials, baseline, strict=True))
    return [report.spread([trial.values[name] / base.values[name] for trial, base in pairs]) for name in columns]


def headings(columns: Iterable[str]) -> list[str]:
    """Return column headings for field names."""
    return [name.replace("_", " ") for name in columns]


def finish(trials: Sequence[Trial], path: Path, environment: Mapping[str, Any]) -> int:
    """Write all records and print the reasons of failed requests. Returns 1 when a request failed, 0 otherwise."""
    report.write(path, [{**trial.record(), **environment} for trial in trials])
    for trial in trials:
        for reason, count in trial.figures.failures.most_common():
            print(f"{', '.join(map(str, trial.case.values()))}: {count} failed with {reason}")
    return 1 if any(trial.figures.failed for trial in trials) else 0
