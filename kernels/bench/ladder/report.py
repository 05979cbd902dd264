"""The ladder as tables for people and as records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernels.bench.ladder.climb import Climb, Step
from kernels.bench.report import Measurement, Setting
from kernels.bench.tables import aligned, three_digits
from kernels.bench.timing import Spread

TIMES = """\
A time is that of one call, from its start on the host to the end of its work on the device, in microseconds: median (p10-p90).
In a graph, the host launches one CUDA graph of the call. As called, it makes every launch itself; only rungs 9 and 10 are called in a
graph, on a GPU. A speed-up is relative to the first rung with the same timing. The published speed-ups were measured in float32 on a
Tesla M40 (Appleyard et al. 2016, arXiv 1604.01946)."""


def table(climb: Climb) -> str:
    """Return a line for each rung that was timed."""
    heading = ["rung", "as called", "GFLOP/s", "of the peak", "speed-up", "in a graph", "speed-up", "published, M40"]
    lines = [heading, *(_line(climb, step) for step in climb.steps)]
    peak = "no peak was measured" if climb.peak is None else f"peak {2 * climb.peak / 1e6:.4g} TFLOP/s"
    return f"{climb.workload}; {peak}\n\n{aligned(lines)}"


def records(climb: Climb, setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a record for each time of a rung, with the fields of the other benchmarks. timing: called or graph."""
    for step in climb.steps:
        for timing, spread in (("called", step.called), ("graph", step.in_graph)):
            if spread is not None:
                measurement = Measurement(climb.workload, step.rung.name, timing, spread, step.error)
                values = _values(climb, step, spread, climb.speedup(spread, in_graph=timing == "graph"))
                yield {"rung": step.rung.number, **measurement.record(setting), **values}


def _values(climb: Climb, step: Step, spread: Spread, speedup: float | None) -> dict[str, float]:
    rate = climb.rate(spread)
    values = {
        "gflops": 2 * rate / 1e3,
        "share_of_peak": None if climb.peak is None else rate / climb.peak,
        "speedup": speedup,
        "published_speedup": step.rung.published,
    }
    return {name: round(value, 5) for name, value in values.items() if value is not None}


def _line(climb: Climb, step: Step) -> list[str]:
    rate = climb.rate(step.called)
    return [
        str(step.rung),
        str(step.called),
        three_digits(2 * rate / 1e3),
        "-" if climb.peak is None else f"{100 * rate / climb.peak:.2g} %",
        _ratio(climb.speedup(step.called)),
        "-" if step.in_graph is None else str(step.in_graph),
        _ratio(climb.speedup(step.in_graph, in_graph=True)),
        _ratio(step.rung.published),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else three_digits(value)
