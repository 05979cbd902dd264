"""`python -m kernels.bench.figure [RECORDS [PICTURE]]`: the SRU beside an LSTM and two convolutions, as in Lei et al. 2018.

Draws what `python -m kernels.bench sru --device cuda:0` found. This alone needs matplotlib: the bench itself draws nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kernels.bench.__main__ import RESULTS
from kernels.sru import BACKENDS

GROUPS = ((32, 256), (32, 512), (128, 256), (128, 512))
"""Steps and width of each group of bars."""
ROWS = 32
OURS = tuple(backend.name for backend in BACKENDS)
BARS = (
    # What a bar is called, which form of the SRU it was timed beside or is, who was timed, and its colour.
    ("LSTM (cuDNN)", "v2", ("torch LSTM",), "#999999"),
    ("convolution of 3 steps", "v2", ("conv1d width 3", "conv1d width 3, channels last"), "#e69f00"),
    ("convolution of 2 steps", "v2", ("conv1d width 2", "conv1d width 2, channels last"), "#f0e442"),
    ("SRU v2", "v2", OURS, "#0072b2"),
    ("SRU v1", "v1", OURS, "#56b4e9"),
)

Records = Sequence[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.figure", description="The SRU beside LSTM and convolutions.")
    parser.add_argument("records", type=Path, nargs="?", default=RESULTS / "sru-h200.jsonl")
    parser.add_argument("picture", type=Path, nargs="?", help="an SVG; beside the records unless it is named")
    asked = parser.parse_args(arguments)
    picture: Path = asked.picture or asked.records.with_suffix(".svg")
    try:
        draw([json.loads(line) for line in asked.records.read_text().splitlines()], picture)
    except LookupError as error:
        print(
            f"{asked.records} has {error.args[0]}: time it with `python -m kernels.bench sru --device cuda:0`", file=sys.stderr
        )
        return 1
    print(f"written to {picture}")
    return 0


def draw(records: Records, path: Path) -> None:
    """Raises LookupError when the records have no time for a bar."""
    found = [[_microseconds(records, *group, form, names) for group in GROUPS] for _, form, names, _ in BARS]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.9 / len(BARS)
    for place, ((label, _, _, colour), heights) in enumerate(zip(BARS, found, strict=True)):
        bars = axes.bar(
            [group + width * place for group in range(len(GROUPS))], heights, 0.95 * width, label=label, color=colour
        )
        axes.bar_label(bars, [f"{height:.3g}" if height < 1000 else f"{height:.0f}" for height in heights], fontsize="x-small")
    axes.set_xticks(
        [group + width * (len(BARS) - 1) / 2 for group in range(len(GROUPS))],
        [f"{steps} steps, width {size}" for steps, size in GROUPS],
    )
    axes.set_ylabel("time of a layer [µs]")
    axes.set_title(f"One layer over {ROWS} rows, float16, {records[0]['device']}, {records[0]['date']}", fontsize="medium")
    axes.legend(loc="upper left", fontsize="small")
    # The same figures give the same file: neither a date nor random names, and letters stay letters.
    with matplotlib.rc_context({"svg.hashsalt": "seqserve", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _microseconds(records: Records, steps: int, size: int, form: str, names: Sequence[str]) -> float:
    """The median of the fastest layout; of ours, that of the backend that a caller gets."""
    wanted = {"workload": "every-step", "form": form, "rows": ROWS, "steps": steps, "hidden": size, "timing": "kernel"}
    times: dict[str, float] = {
        one["backend"]: one["median_us"] for one in records if all(one.get(name) == value for name, value in wanted.items())
    }
    timed = [times[name] for name in names if name in times]
    if not timed:
        raise LookupError(f"no kernel time of {' or '.join(names)} for {ROWS} x {steps}, width {size}")
    return timed[0] if names is OURS else min(timed)


if __name__ == "__main__":
    sys.exit(main())
