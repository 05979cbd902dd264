"""Evaluation of goals: how a goal derives a value from the times of a run, and how it summarises the values of its workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import geometric_mean
from typing import Literal

from kernels.bench.goals.limit import Limit, Line
from kernels.bench.report import Measurement
from kernels.bench.tables import aligned
from kernels.bench.workload import Workload
from kernels.bench.workloads import RECURRENCE_STEPS


class Times:
    """Median microseconds of a run. Our time is that of the backend that users get: the first of `backends` that was timed."""

    def __init__(self, measurements: Iterable[Measurement], backends: Sequence[str]) -> None:
        self._medians = {(one.workload, one.timing, one.backend): one.spread.median_us for one in measurements}
        timed = {(workload, backend) for workload, _, backend in self._medians}
        chosen = {workload: [name for name in backends if (workload, name) in timed] for workload, _ in timed}
        self._chosen = {workload: names[0] for workload, names in chosen.items() if names}
        self._used: set[tuple[Workload, str, str]] = set()

    def chosen(self, workload: Workload) -> str:
        """Return the name of our backend, or an empty name when none was timed."""
        return self._chosen.get(workload, "")

    def of(self, backend: str, workload: Workload, timing: str = "kernel") -> float:
        """Return the median of a backend or a baseline. Raises KeyError when it was not timed."""
        self._used.add((workload, timing, backend))
        return self._medians[workload, timing, backend]

    def has_used(self, one: Measurement) -> bool:
        """Whether a goal has asked for the median of a measurement."""
        return (one.workload, one.timing, one.backend) in self._used

    def ours(self, workload: Workload, timing: str = "kernel") -> float:
        return self.of(self.chosen(workload), workload, timing)


Value = Callable[[Times, Workload], float]
"""Derives the value of a workload from the times of a run. Raises KeyError when a time is missing."""


def speedup(
    *baselines: str, timing: str = "kernel", ours: str | None = None, at: Callable[[Workload], Workload] | None = None
) -> Value:
    """Return the time of the fastest of some baselines as a multiple of our backend's.

    timing, ours: how the baselines and our backend are timed; at: returns the workload of the baselines, if it differs.
    """

    def value(times: Times, workload: Workload) -> float:
        timed = [times.of(name, at(workload) if at else workload, timing) for name in baselines]
        return min(timed) / times.ours(workload, ours or timing)

    return value


def over(allowed: Value) -> Value:
    """Return our kernel time as a multiple of the allowed microseconds."""
    return lambda times, workload: times.ours(workload) / allowed(times, workload)


def time_of(baseline: str) -> Value:
    """Return the kernel time of a baseline."""
    return lambda times, workload: times.of(baseline, workload)


def step_us(times: Times, short: Workload) -> float:
    """Return the time of a step: the slope between two lengths of a row."""
    few, many = RECURRENCE_STEPS
    backend = times.chosen(short)
    shorter, longer = (times.of(backend, replace(short, steps=steps)) for steps in (few, many))
    return (longer - shorter) / (many - few)


def fixed_us(times: Times, short: Workload) -> float:
    """Return the time of a call that is independent of the number of steps."""
    return times.ours(short) - RECURRENCE_STEPS[0] * step_us(times, short)


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a value of some workloads.

    summary: judge the worst workload, the best of several forms, the geometric mean, each workload in a separate line, or the share of
    the workloads with a value of at most `within`; has_grid: show all values as well; context: show the goal only together with others.
    """

    name: str
    workloads: Sequence[Workload]
    value: Value
    limit: Limit
    summary: Literal["worst", "best form", "mean", "each", "share"] = "worst"
    within: float = 0.0
    has_grid: bool = False
    context: bool = False

    def values(self, times: Times) -> dict[Workload, float]:
        """Return the value of each workload that has one."""
        values = {}
        for workload in self.workloads:
            with suppress(KeyError):
                values[workload] = self.value(times, workload)
        return values

    def lines(self, values: Mapping[Workload, float], times: Times) -> Iterator[Line]:
        complete = len(values) == len(self.workloads)
        if self.summary == "each":
            for workload, value in values.items():
                name = f"{self.name}, hidden {workload.hidden}, {workload.size}"
                yield self.limit.line(name, value, times.chosen(workload))
        elif self.summary == "mean":
            note = f"over {len(values)} of {len(self.workloads)}"
            yield self.limit.line(self.name, geometric_mean(values.values()), note, complete)
        elif self.summary == "share":
            met = sum(value <= self.within for value in values.values())
            yield self.limit.line(self.name, met / len(values), f"{met} of {len(values)}", complete)
        else:
            lower_is_better, worst = bool(self.limit.unit), self.summary == "worst"
            workload = (max if worst == lower_is_better else min)(values, key=values.__getitem__)
            note = f"hidden {workload.hidden}, {workload.size}" if worst else workload.form
            yield self.limit.line(self.name, values[workload], note, complete)

    def grid(self, values: Mapping[Workload, float], times: Times) -> str:
        """Return a table with a line for each number of rows and steps, and a column for each hidden size."""
        hidden = sorted({workload.hidden for workload in self.workloads})
        backends = dict.fromkeys(times.chosen(workload) for workload in values)
        lines = [[f"{self.name}: {', '.join(backends)}", *map(str, hidden)]]
        by_size = sorted(self.workloads, key=lambda workload: (workload.lengths, workload.rows, workload.steps))
        for size, group in groupby(by_size, key=lambda workload: workload.size):
            cells = {workload.hidden: f"{values[workload]:.3g}" for workload in group if workload in values}
            lines.append([size, *(cells.get(column, "-") for column in hidden)])
        return aligned(lines)
