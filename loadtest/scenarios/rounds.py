"""Rounds of trials: the core of every scenario that compares cases under the same load.

Cases alternate within each round, so that other work on the machine affects all of them alike. Every ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from kernels.bench.report import device_name, slug
from kernels.bench.tables import write
from loadtest import report
from loadtest.generator.job import Result

RATE = "answers_per_second"
Values = dict[str, float]
Table = list[list[str]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One case in one round.

    case: the labels of the case; answers: how many arrived; failures: counts by reason; values: measured values by field name.
    """

    case: dict[str, Any]
    round: int
    answers: int
    failures: Counter[str]
    values: Values

    @classmethod
    def of(cls, case: Mapping[str, Any], round: int, result: Result, values: Mapping[str, float] | None = None) -> Trial:
        """Return a trial with the rate and the latency of a load, and more values."""
        latencies = {name: value for name, value in result.milliseconds().items() if not math.isnan(value)}
        failures = Counter(result.failures)
        trial = cls(dict(case), round, result.answers, failures, {RATE: result.rate, **latencies, **(values or {})})
        failed = f"{failures.total()} failed"
        print(f"  {label(trial.case)}: {trial.values[RATE]:.0f}/s, {failed}", file=sys.stderr, flush=True)
        return trial

    def record(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        return {
            **self.case,
            "round": self.round,
            **{name: round(value, 4) for name, value in self.values.items()},
            "answers": self.answers,
            "failed": self.failures.total(),
        }


def add_options(parser: argparse.ArgumentParser, seconds: float, rounds: int) -> None:
    """Add the options that all comparisons have."""
    parser.add_argument("--seconds", type="amount", default=seconds, help="duration of a trial")
    parser.add_argument("--rounds", type="count", default=rounds, help="rounds of all cases")


def by_case(trials: Iterable[Trial]) -> list[list[Trial]]:
    """Return the rounds of each case, in the order in which the cases first ran."""
    cases: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        cases.setdefault(tuple(trial.case.items()), []).append(trial)
    return list(cases.values())


def spreads(trials: Sequence[Trial], columns: Iterable[str]) -> list[str]:
    """Return the spread of each column over the rounds of one case."""
    return [report.spread([trial.values[name] for trial in trials if name in trial.values]) for name in columns]


def ratios(trials: Iterable[Trial], bases: Iterable[Trial], column: str) -> list[float]:
    """Return the ratio of a column to that of another case in each round that has both."""
    by_round = {trial.round: trial.values.get(column) for trial in bases}
    pairs = ((trial.values.get(column), by_round.get(trial.round)) for trial in trials)
    return [value / base for value, base in pairs if value and base]


def headings(columns: Iterable[str]) -> list[str]:
    """Return column headings for field names."""
    return [name.replace("_per_second", "/s").replace("_", " ") for name in columns]


def publish(
    name: str,
    trials: Sequence[Trial],
    tables: Iterable[Table],
    options: argparse.Namespace,
    packages: Iterable[str],
    device: str = "cpu",
) -> int:
    """Print the tables and the reasons of failed requests, and write all records. Returns 1 when a request failed, 0 otherwise."""
    machine = device_name(torch.device(device))
    print(f"\n{name}, {machine}, {date.today()}: medians of {options.rounds} rounds (lowest to highest)\n")
    for lines in tables:
        print(report.table(lines) + "\n", flush=True)
    environment = report.environment(machine, packages)
    write(options.out / f"{name}-{slug(machine)}.jsonl", [trial.record() | environment for trial in trials])
    for trial in trials:
        for reason, count in trial.failures.most_common():
            print(f"{label(trial.case)}: {count} failed with {reason}")
    return 1 if any(trial.failures for trial in trials) else 0


def label(case: Mapping[str, Any]) -> str:
    return ", ".join(map(str, case.values()))
