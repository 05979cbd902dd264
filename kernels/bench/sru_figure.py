"""`python -m kernels.bench.sru_figure [RECORDS [CHART]]`: chart of the SRU, an LSTM and two convolutions, as in Lei et al. 2018.

It uses the records of `python -m kernels.bench sru --device cuda:0`.
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
from kernels.bench.tables import RESULTS
from kernels.sru import BACKENDS

GROUPS = ((32, 256), (32, 512), (128, 256), (128, 512))
"""Steps and width of each group of bars."""
ROWS = 32
OURS = tuple(backend.name for backend in BACKENDS)
BARS = (
    # Label, form of the SRU in the workload, backends, and colour.
    ("LSTM (cuDNN)", "v2", ("torch LSTM",), "#999999"),
    ("convolution of 3 steps", "v2", ("conv1d width 3", "conv1d width 3, channels last"), "#e69f00"),
    ("convolution of 2 steps", "v2", ("conv1d width 2", "conv1d width 2, channels last"), "#f0e442"),
    ("SRU v2", "v2", OURS, "#0072b2"),
    ("SRU v1", "v1", OURS, "#56b4e9"),
)

Records = Sequence[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.sru_figure", description="Chart of the SRU, an LSTM and convolutions."
    )
    parser.add_argument("records", type=Path, nargs="?", default=RESULTS / "sru-h200.jsonl", help="(default: %(default)s)")
    parser.add_argument("chart", type=Path, nargs="?", help="SVG file (default: next to the records)")
    options = parser.parse_args(arguments)
    chart: Path = options.chart or options.records.with_suffix(".svg")
    try:
        draw([json.loads(line) for line in options.records.read_text().splitlines()], chart)
    except LookupError as error:
        command = "python -m kernels.bench sru --device cuda:0"
        print(f"{options.records} has {error.args[0]}: time it with `{command}`", file=sys.stderr)
        return 1
    print(f"written to {chart}")
    return 0


def draw(records: Records, path: Path) -> None:
    """Write the SVG. Raises LookupError when the records have no time for a bar."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    groups = [f"{steps} steps, width {size}" for steps, size in GROUPS]
    bars = [
        Bars(label, colour, [microseconds(records, *group, form, names) for group in GROUPS])
        for label, form, names, colour in BARS
    ]
    draw_groups(axes, groups, bars)
    axes.set_ylabel("time of a layer [µs]")
    axes.set_title(f"One layer over {ROWS} rows, float16, {records[0]['device']}, {records[0]['date']}", fontsize="medium")
    axes.legend(loc="upper left", fontsize="small")
    write_svg(figure, path)


def microseconds(
    records: Records, steps: int, size: int, form: str, names: Sequence[str], workload: str = "every-step"
) -> float:
    """Return the median of the fastest layout, or of the backend that users get. Raises LookupError without one."""
    labels = {"workload": workload, "form": form, "rows": ROWS, "steps": steps, "hidden": size, "timing": "kernel"}
    times: dict[str, float] = {
        record["backend"]: record["median_us"]
        for record in records
        if all(record.get(name) == value for name, value in labels.items())
    }
    timed = [times[name] for name in names if name in times]
    if not timed:
        raise LookupError(f"no kernel time of {' or '.join(names)} for {ROWS} x {steps}, width {size}")
    return timed[0] if names is OURS else min(timed)


if __name__ == "__main__":
    sys.exit(main())
