"""`python -m kernels.bench.ladder.figure [RECORDS [CHART]]`: chart of the speed-ups over the first rung.

It uses the records of `python -m kernels.bench ladder --device cuda:0`, which draws it as well if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kernels.bench.chart import Bars, draw_groups, write_svg
from kernels.bench.ladder.rungs import RUNGS, Rung
from kernels.bench.tables import RESULTS

PANELS = {
    "called": "as called: the host makes the launches, on a GPU except those of rungs 9 and 10",
    "graph": "every rung in a CUDA graph",
}
COLOURS = {"float16": "#0072b2", "float32": "#56b4e9"}
GREY = "#999999"
WIDTH = 16
"""Letters of a line below a group of bars."""

Records = Sequence[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.ladder.figure", description="Chart of the ladder.")
    parser.add_argument("records", type=Path, nargs="?", default=RESULTS / "ladder-h200.jsonl", help="(default: %(default)s)")
    parser.add_argument("chart", type=Path, nargs="?", help="SVG file (default: next to the records)")
    options = parser.parse_args(arguments)
    chart: Path = options.chart or options.records.with_suffix(".svg")
    records = [json.loads(line) for line in options.records.read_text().splitlines()]
    if not any("speedup" in record for record in records):
        print(f"{options.records} has no times of the first rung: run `python -m kernels.bench ladder`", file=sys.stderr)
        return 1
    draw(records, chart)
    print(f"written to {chart}")
    return 0


def draw(records: Records, path: Path) -> None:
    """Write an SVG with a panel for each timing."""
    timings = [timing for timing in PANELS if any(record["timing"] == timing for record in records)]
    figure = Figure(figsize=(12, 3.6 * len(timings)), layout="constrained")
    first = records[0]
    size = f"{first['layers']} layers of {first['hidden']} units, {first['rows']} rows of {first['steps']} steps"
    figure.suptitle(f"LSTM, {size}, {first['device']}, {first['date']}", fontsize="medium")
    for axes, timing in zip(figure.subplots(len(timings), squeeze=False).flat, timings, strict=True):
        draw_groups(axes, list(map(_label, RUNGS)), list(_bars(records, timing)))
        axes.tick_params("x", labelsize="x-small")
        axes.set(yscale="log", ylabel="speed-up over rung 1")
        axes.set_title(PANELS[timing], fontsize="small")
        axes.margins(y=0.15)
        axes.legend(loc="upper left", fontsize="small")
    write_svg(figure, path)


def _bars(records: Records, timing: str) -> list[Bars]:
    """Return the speed-ups of each dtype, and the published speed-ups."""
    speedups = {(one["dtype"], one["rung"]): one.get("speedup") for one in records if one["timing"] == timing}
    measured = [
        Bars(dtype, colour, [speedups.get((dtype, rung.number)) for rung in RUNGS])
        for dtype, colour in COLOURS.items()
        if any(dtype == measured for measured, _ in speedups)
    ]
    return [*measured, Bars("published: Tesla M40, float32", GREY, [rung.published for rung in RUNGS])]


def _label(rung: Rung) -> str:
    """Return the name of a rung in short lines."""
    lines = [str(rung.number)]
    for word in rung.name.split():
        if len(lines[-1]) + len(word) < WIDTH and len(lines) > 1:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
