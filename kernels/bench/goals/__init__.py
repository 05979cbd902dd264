"""Goals of our kernels: the results of a run compared with their limits, one line for each goal.

A goal is met, missed, or open. Open: all timed workloads meet the limit, but some were not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernels.bench.goals import on_cpu, on_cuda
from kernels.bench.goals.evaluation import Goal, Times
from kernels.bench.goals.limit import HEADING
from kernels.bench.report import Measurement
from kernels.bench.tables import aligned


def goals_for(device: str, threads: int | None) -> Sequence[Goal]:
    """Return the goals of runs on a device, cpu or cuda. On a CPU, they are for runs with one thread."""
    if device == "cuda":
        return on_cuda.GOALS
    return on_cpu.GOALS if threads == 1 else ()


def table(goals: Sequence[Goal], measurements: Iterable[Measurement], backends: Sequence[str]) -> str:
    """Return a line for each goal, then a grid of all sizes for goals that have one; empty when no goal has a value.

    backends: the names of our backends, in the order in which they are chosen.
    """
    times = Times(measurements, backends)
    evaluated = [(goal, values) for goal in goals if (values := goal.values(times))]
    if all(goal.context for goal, _ in evaluated):
        return ""
    lines = [line for goal, values in evaluated for line in goal.lines(values, times)]
    grids = [goal.grid(values, times) for goal, values in evaluated if goal.has_grid]
    return "\n\n".join([aligned([HEADING, *lines]), *grids])
