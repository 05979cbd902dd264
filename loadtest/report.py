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
from loadtest.generator.job import QUANTILES, Result

BUSY = 0.8
"""A load is limited by its generators when each uses a processor for more than this share of the measured time."""
RESULTS = Path(__file__).parent / "results"
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Level:
    """One load. callers: connections; rate: requests a second of an open loop, 0 for a closed loop."""

    name: str
    callers: int
    rate: float = 0.0


def record(
    level: Level, generators: int, result: Result, model: dict[str, Any], stages: dict[str, float], total: float, rows: float
) -> dict[str, Any]:
    """Return the results of a level. stages, total: mean milliseconds by stage and of whole requests; rows: mean sequences in a batch."""
    busy = result.cpu_seconds / (generators * result.seconds)
    return {
        "model": model["name"],
        "version": model["version"],
        "level": level.name,
        **({"loop": "open", "rate": level.rate} if level.rate else {"loop": "closed", "callers": level.callers}),
        "generators": generators,
        "generators_busy": round(busy, 3),
        "limited_by_generators": busy > BUSY,
        "seconds": round(result.seconds, 3),
        "answers": result.answers,
        "answers_per_second": round(result.rate, 1),
        **{name: None if math.isnan(value) else round(value, 3) for name, value in result.milliseconds().items()},
        "failures": result.failures,
        "rows_per_batch": round(rows, 2),
        "stages_ms": {name: round(value, 4) for name, value in stages.items()},
        "stages_sum_ms": round(sum(stages.values()), 4),
        "total_ms": round(total, 4),
    }


def progress(record: dict[str, Any]) -> str:
    """Return a line about a level that was measured."""
    times = "  ".join(f"{name[:-3]} {record[name] or math.nan:.2f} ms" for name in QUANTILES)
    failed = sum(record["failures"].values())
    return f"  {record['level']}: {record['answers_per_second']:.0f}/s  {times}  {failed} failed"


def levels(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield a table of the loads, a table of the stages, and the reasons of failures and of limited rates."""
    loads = [["load", "answers/s", *(name.replace("_", " ") for name in QUANTILES), "failed", "rows/batch", "generators"]]
    stages = [["load", *records[0]["stages_ms"], "sum", "total"]]
    for each in records:
        times = (f"{each[name] or math.nan:.2f}" for name in QUANTILES)
        counts = (str(sum(each["failures"].values())), f"{each['rows_per_batch']:.1f}")
        generators = f"{each['generators']}, {each['generators_busy']:.0%} busy"
        loads.append([each["level"], f"{each['answers_per_second']:.0f}", *times, *counts, generators])
        means = (*each["stages_ms"].values(), each["stages_sum_ms"], each["total_ms"])
        stages.append([each["level"], *(f"{mean:.3f}" for mean in means)])
    yield table(loads)
    yield "\nmean ms by stage, their sum, and the mean of whole requests in the server:"
    yield table(stages)
    for each in records:
        for reason, count in Counter(each["failures"]).most_common():
            yield f"{each['level']}: {count} failed with {reason}"
        if each["limited_by_generators"]:
            busy = f"its processes were busy for {each['generators_busy']:.0%} of the time"
            yield f"{each['level']}: limited by the load generator: {busy}"


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
