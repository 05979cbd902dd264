"""Figures as lines for the eye and as records for whatever reads them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtest.load import Figures

RESULTS = Path(__file__).parent / "results"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Level:
    """What one level gave; `stages` are mean milliseconds by stage, `rows` the mean of sequences in a turn."""

    name: str
    figures: Figures
    stages: dict[str, float]
    rows: float


def milliseconds(figures: Figures) -> dict[str, float]:
    """The quantiles of the answers' times."""
    return {name: 1000 * figures.quantile(share) for name, share in QUANTILES.items()}


def progress(name: str, figures: Figures, seconds: float) -> str:
    times = "  ".join(f"{quantile} {value:.2f} ms" for quantile, value in milliseconds(figures).items() if figures.answers)
    return (
        f"  {name:>8}  {figures.seconds:.0f} of {seconds:g} s  {len(figures.answers)} answers  "
        f"{figures.rate:.0f}/s  {times}  {figures.failed} failed"
    )


def levels(found: Sequence[Level], unit: str) -> Iterable[str]:
    """One line a level: answers a second, their times, failures, the mean of rows in a turn, and mean times by stage."""
    stages = list(found[0].stages)
    rows = [[unit, "answers/s", *(f"{name} ms" for name in QUANTILES), "failed", "rows/turn", *(f"{one} ms" for one in stages)]]
    for level in found:
        times = (f"{value:.2f}" for value in milliseconds(level.figures).values())
        means = (f"{level.stages[one]:.3f}" for one in stages)
        figures = level.figures
        rows.append([level.name, f"{figures.rate:.0f}", *times, str(figures.failed), f"{level.rows:.1f}", *means])
    yield from table(rows)
    for level in found:
        for reason, count in level.figures.failures.most_common():
            yield f"{level.name}: {count} failed with {reason}"


def table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Columns as wide as they need to be, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def spread(values: Sequence[float]) -> str:
    """The median, and the lowest and the highest."""
    low, middle, high = (
        f"{value:.3g}" if value < 999.5 else f"{value:.0f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def where(machine: str, packages: Iterable[str]) -> dict[str, Any]:
    """For every record: on what, when and with which versions it was found."""
    return {"machine": machine, "date": str(date.today()), "versions": {one: version(one) for one in packages}}


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, in a folder that is made if need be; says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    print(f"written to {path}")


def record(level: Level, model: dict[str, Any]) -> dict[str, Any]:
    """One level as plain values."""
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
        "rows_per_turn": round(level.rows, 2),
        "stages_ms": {name: round(value, 4) for name, value in level.stages.items()},
    }
