"""Figures as tables for people, and as records for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernels.bench.tables import aligned, three_digits
from loadtest.load import Figures

RESULTS = Path(__file__).parent / "results"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class BenchLevel:
    """Results of one level of load. stages: mean milliseconds by stage; rows: mean sequences in a batch."""

    name: str
    figures: Figures
    stages: dict[str, float]
    rows: float


def milliseconds(figures: Figures) -> dict[str, float]:
    """Return the quantiles of the latency."""
    return {name: 1000 * figures.quantile(share) for name, share in QUANTILES.items()}


def progress(name: str, figures: Figures, seconds: float) -> str:
    """Return a line about a load that is running."""
    times = "  ".join(f"{quantile} {value:.2f} ms" for quantile, value in milliseconds(figures).items() if figures.answers)
    return (
        f"  {name:>8}  {figures.seconds:.0f} of {seconds:g} s  {len(figures.answers)} answers  "
        f"{figures.rate:.0f}/s  {times}  {figures.failed} failed"
    )


def levels(measured: Sequence[BenchLevel], unit: str) -> Iterable[str]:
    """Yield a table with one line for each level, and the reasons of failed requests."""
    stages = list(measured[0].stages)
    quantiles, means = (f"{name} ms" for name in QUANTILES), (f"{stage} ms" for stage in stages)
    lines = [[unit, "answers/s", *quantiles, "failed", "rows/batch", *means]]
    for level in measured:
        figures = level.figures
        times = (f"{value:.2f}" for value in milliseconds(figures).values())
        by_stage = (f"{level.stages[stage]:.3f}" for stage in stages)
        lines.append([level.name, f"{figures.rate:.0f}", *times, str(figures.failed), f"{level.rows:.1f}", *by_stage])
    yield table(lines)
    for level in measured:
        for reason, count in level.figures.failures.most_common():
            yield f"{level.name}: {count} failed with {reason}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines with right-aligned columns."""
    return aligned(lines, right=True)


def spread(values: Sequence[float]) -> str:
    """Return the median, the lowest and the highest value."""
    low, middle, high = map(three_digits, (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def environment(machine: str, packages: Iterable[str]) -> dict[str, Any]:
    """Return the machine, the date and package versions, for every record."""
    return {"machine": machine, "date": str(date.today()), "versions": {package: version(package) for package in packages}}


def record(level: BenchLevel, model: dict[str, Any]) -> dict[str, Any]:
    """Return a level as plain values."""
    figures = level.figures
    return {
        "model": model["name"],
        "version": model["version"],
        "level": level.name,
        "seconds": round(figures.seconds, 3),
        "answers": len(figures.answers),
        "answers_per_second": round(figures.rate, 1),
        **{f"{name}_ms": None if math.isnan(value) else round(value, 3) for name, value in milliseconds(figures).items()},
        "failures": dict(figures.failures),
        "rows_per_batch": round(level.rows, 2),
        "stages_ms": {name: round(value, 4) for name, value in level.stages.items()},
    }
