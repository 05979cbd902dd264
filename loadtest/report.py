"""Figures as tables for people, and as records for programs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernels.bench.tables import aligned, three_digits
from loadtest.generator.job import QUANTILES
from loadtest.generator.scaling import Measured

RESULTS = Path(__file__).parent / "results"
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Level:
    """One load. callers: connections; rate: requests a second of an open loop, 0 for a closed loop."""

    name: str
    callers: int
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchLevel:
    """Results of one level of load. stages, total: mean milliseconds by stage and of whole requests; rows: mean sequences in a batch."""

    level: Level
    measured: Measured
    stages: dict[str, float]
    total: float
    rows: float

    @property
    def failed(self) -> int:
        return sum(self.measured.result.failures.values())


def progress(level: BenchLevel) -> str:
    """Return a line about a level that was measured."""
    times = "  ".join(f"{name[:-3]} {value:.2f} ms" for name, value in level.measured.result.milliseconds().items())
    return f"  {level.level.name}: {level.measured.rate:.0f}/s  {times}  {level.failed} failed"


def levels(measured: Sequence[BenchLevel]) -> Iterable[str]:
    """Yield a table of the loads, a table of the stages, and the reasons of failures and of limited rates."""
    times = [name.replace("_", " ") for name in QUANTILES]
    yield table(
        [["load", "answers/s", *times, "failed", "rows/batch", "generators"]] + [_load_line(level) for level in measured]
    )
    yield "\nmean ms by stage, their sum, and the mean of whole requests in the server:"
    yield table([["load", *measured[0].stages, "sum", "total"]] + [_stage_line(level) for level in measured])
    for level in measured:
        for reason, count in Counter(level.measured.result.failures).most_common():
            yield f"{level.level.name}: {count} failed with {reason}"
        if level.measured.limited:
            yield (
                f"{level.level.name}: limited by the load generator: its processes were busy for {level.measured.busy:.0%} of the time"
            )


def _load_line(level: BenchLevel) -> list[str]:
    measured = level.measured
    times = (f"{value:.2f}" for value in measured.result.milliseconds().values())
    return [
        *(level.level.name, f"{measured.rate:.0f}", *times, str(level.failed), f"{level.rows:.1f}"),
        f"{measured.generators}, {measured.busy:.0%} busy",
    ]


def _stage_line(level: BenchLevel) -> list[str]:
    times = (*level.stages.values(), sum(level.stages.values()), level.total)
    return [level.level.name, *(f"{value:.3f}" for value in times)]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines with right-aligned columns."""
    return aligned(lines, right=True)


def spread(values: Sequence[float]) -> str:
    """Return the median, the lowest and the highest value."""
    if not values:
        return NOTHING
    low, middle, high = map(three_digits, (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def environment(machine: str, packages: Iterable[str]) -> dict[str, Any]:
    """Return the machine, the date and package versions, for every record."""
    return {"machine": machine, "date": str(date.today()), "versions": {package: version(package) for package in packages}}


def record(level: BenchLevel, model: dict[str, Any]) -> dict[str, Any]:
    """Return a level as plain values."""
    measured, result = level.measured, level.measured.result
    load = (
        {"loop": "open", "rate": level.level.rate} if level.level.rate else {"loop": "closed", "callers": level.level.callers}
    )
    return {
        "model": model["name"],
        "version": model["version"],
        "level": level.level.name,
        **load,
        "generators": measured.generators,
        "generators_busy": round(measured.busy, 3),
        "limited_by_generators": measured.limited,
        "seconds": round(result.seconds, 3),
        "answers": result.answers,
        "answers_per_second": round(measured.rate, 1),
        **{name: None if math.isnan(value) else round(value, 3) for name, value in result.milliseconds().items()},
        "failures": result.failures,
        "rows_per_batch": round(level.rows, 2),
        "stages_ms": {name: round(value, 4) for name, value in level.stages.items()},
        "stages_sum_ms": round(sum(level.stages.values()), 4),
        "total_ms": round(level.total, 4),
    }
