"""Rounds of trials: the core of every scenario that compares servers under the same load.

Cases alternate within each round, so that other work on the machine affects all of them alike. Every ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from typing import Any

import torch
import uvloop

from kernels.bench.report import device_name, slug
from kernels.bench.tables import write
from loadtest import load, report
from loadtest.callers import Connectable
from loadtest.load import Figures

Values = dict[str, float]
Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Contender:
    """One case and its load. sample: read before and after each trial; costs: values and stages, from the figures and both samples."""

    case: dict[str, Any]
    target: Connectable
    requests: Iterator[bytes]
    callers: int
    sample: Callable[[], Any] = lambda: None
    costs: Callable[[Figures, Any, Any], tuple[Values, Values]] = lambda *_: ({}, {})

    def trial(self, round: int, seconds: float) -> Trial:
        """Run a closed loop after a warm-up of a quarter of its time."""
        uvloop.run(load.closed(self.target, self.requests, self.callers, seconds / 4))
        before = self.sample()
        figures = uvloop.run(load.closed(self.target, self.requests, self.callers, seconds))
        costs, stages = self.costs(figures, before, self.sample())
        print(report.progress(label(self.case), figures, seconds), file=sys.stderr, flush=True)
        return Trial(self.case, round, len(figures.answers), figures.failures, values_of(figures) | costs, stages)


@dataclass(frozen=True, slots=True)
class Trial:
    """One case in one round.

    case: the labels of the case; answers: how many arrived; failures: counts by reason; values: measured values by field name; stages:
    mean ms by stage.
    """

    case: dict[str, Any]
    round: int
    answers: int
    failures: Counter[str]
    values: Values
    stages: Values = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        stages = {"stages_ms": {stage: round(value, 4) for stage, value in self.stages.items()}} if self.stages else {}
        return {
            **self.case,
            "round": self.round,
            **{name: round(value, 4) for name, value in self.values.items()},
            **stages,
            "answers": self.answers,
            "failed": self.failures.total(),
        }


def add_options(parser: argparse.ArgumentParser, seconds: float, rounds: int) -> None:
    """Add the options that all comparisons have."""
    parser.add_argument("--seconds", type=float, default=seconds, help="duration of a trial")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of all cases")


def alternate(contenders: Sequence[Contender], options: argparse.Namespace) -> list[Trial]:
    return [each.trial(number, options.seconds) for number, each in product(range(options.rounds), contenders)]


def values_of(figures: Figures) -> Values:
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


def publish(
    name: str,
    trials: Sequence[Trial],
    tables: Iterable[Table],
    options: argparse.Namespace,
    packages: Iterable[str],
    device: str = "cpu",
    notes: Iterable[dict[str, Any]] = (),
) -> int:
    """Print the tables and the reasons of failed requests, and write all records and notes.

    Returns 1 when a request failed, 0 otherwise.
    """
    machine = device_name(torch.device(device))
    print(f"\n{name}, {machine}, {date.today()}: medians of {options.rounds} rounds (lowest to highest)\n")
    for lines in tables:
        print(report.table(lines) + "\n", flush=True)
    environment = report.environment(machine, packages)
    records = [*(trial.record() for trial in trials), *notes]
    write(options.out / f"{name}-{slug(machine)}.jsonl", [record | environment for record in records])
    for trial in trials:
        for reason, count in trial.failures.most_common():
            print(f"{label(trial.case)}: {count} failed with {reason}")
    return 1 if any(trial.failures for trial in trials) else 0


def label(case: dict[str, Any]) -> str:
    return ", ".join(map(str, case.values()))
