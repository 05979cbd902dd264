"""Draw the figures of the SRU paper (Lei et al., 2018) and its table of classification from our own results files.

The speed of layers comes from the records of `python -m kernels.bench`, accuracies and times of training from those of `results.py`. The
command writes images and the tables of docs/sru-paper.md, and leaves out what no record has. It needs matplotlib, which is in the extra
`bench`: pip install '.[bench]'
"""

from __future__ import annotations

import argparse
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, pstdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from training import pages, records, table
from training.records import Record

from kernels.bench.chart import Bars, draw_groups, write_svg
from kernels.bench.sru_figure import GROUPS, OURS, ROWS, microseconds
from kernels.bench.tables import RESULTS, three_digits

ROOT = Path(__file__).parent.parent
LSTM = ("sru", "every-step", "v2", ("torch LSTM",))
LAYERS = {
    # Label: records, workload, form, backends; and the colour.
    "convolution of 3 steps": ("sru", "every-step", "v2", ("conv1d width 3", "conv1d width 3, channels last")),
    "convolution of 2 steps": ("sru", "every-step", "v2", ("conv1d width 2", "conv1d width 2, channels last")),
    "SRU v2": ("sru", "every-step", "v2", OURS),
    "SRU v1": ("sru", "every-step", "v1", OURS),
    "SRU v2, last step": ("sru", "layer", "v2", OURS),
    "QRNN of 2 steps, last step": ("qrnn", "layer", "window 2", OURS),
    "QRNN of 1 step, last step": ("qrnn", "layer", "window 1", OURS),
}
COLOURS = ("#e69f00", "#f0e442", "#0072b2", "#56b4e9", "#003f5c", "#d55e00", "#cc79a7")
FAMILIES = {"lstm": "#999999", "cnn": "#e69f00", "qrnn": "#d55e00", "sru": "#0072b2"}
MOST_POINTS = 50
"""Points of a curve: the image stays small."""
SETS = {"cr": "CR", "subj": "Subj", "mr": "MR", "trec": "TREC"}


def draw_speed(bench: dict[str, list[Record]], image: Path, link: str) -> list[str]:
    """Draw how many times as fast as an LSTM of cuDNN each layer is, and return the lines of the page. Raises LookupError."""
    lstm = [_time(bench, LSTM, group) for group in GROUPS]
    speeds = {
        label: [time / _time(bench, layer, group) for time, group in zip(lstm, GROUPS, strict=True)]
        for label, layer in LAYERS.items()
    }
    devices = "; ".join(sorted({f"{record['device']}, {record['date']}" for name in ("sru", "qrnn") for record in bench[name]}))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    bars = [Bars(label, colour, heights) for (label, heights), colour in zip(speeds.items(), COLOURS, strict=True)]
    draw_groups(axes, [f"{steps} steps, width {size}" for steps, size in GROUPS], bars)
    axes.set_title(f"Forward passes over {ROWS} rows, float16, {devices}", fontsize="medium")
    axes.set_ylabel("speed relative to the LSTM of cuDNN")
    axes.legend(loc="upper left", fontsize="small")
    write_svg(figure, image)
    rows = [
        [str(steps), str(size), three_digits(time), *(three_digits(speeds[label][index]) for label in LAYERS)]
        for index, ((steps, size), time) in enumerate(zip(GROUPS, lstm, strict=True))
    ]
    return [
        f"![Speed of layers relative to the LSTM of cuDNN]({link})",
        "",
        *pages.table(("steps", "width", "LSTM, µs", *LAYERS), rows),
        "",
        f"Forward passes over {ROWS} rows in float16. {devices}.",
    ]


def _time(bench: dict[str, list[Record]], layer: tuple[str, str, str, Sequence[str]], group: tuple[int, int]) -> float:
    family, workload, form, backends = layer
    return microseconds(bench[family], *group, form, backends, workload)


def draw_curves(trainings: list[Record], image: Path, link: str) -> list[str]:
    """Draw the development accuracy against the time of training, and return the lines of the page."""
    shown = [record for record in trainings if record["encoder"] in FAMILIES and _curve(record)]
    sets = [name for name in SETS if any(record["set"] == name for record in shown)]
    if not sets:
        return [pages.EMPTY]
    figure = Figure(figsize=(4.5 * len(sets), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        for family, colour in FAMILIES.items():
            runs = [_curve(record) for record in shown if (record["set"], record["encoder"]) == (name, family)]
            if runs:
                _draw_family(axes, runs, f"{family.upper()}, runs: {len(runs)}", colour)
        axes.set_title(SETS[name])
        axes.set_xlabel("time of training [s]")
        axes.legend(loc="lower right", fontsize="small")
    figure.axes[0].set_ylabel("development accuracy [%]")
    write_svg(figure, image)
    return [f"![Development accuracy against time of training]({link})", "", *pages.machines(shown)]


def _curve(record: Record) -> list[tuple[float, float]]:
    """Return the seconds and the development accuracy of each epoch, and no points for a record without them."""
    epochs = record.get("curve", [])
    return [(epoch["seconds"], epoch["development_percent"]) for epoch in epochs if epoch["development_percent"] is not None]


def _draw_family(axes: Axes, runs: list[list[tuple[float, float]]], label: str, colour: str) -> None:
    """Draw the mean of runs and its standard deviation."""
    times, means, deviations = mean_curve(runs)
    axes.step(times, means, where="post", label=label, color=colour)
    lower, upper = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
    axes.fill_between(times, lower, upper, step="post", color=colour, alpha=0.2, linewidth=0)


def mean_curve(runs: list[list[tuple[float, float]]]) -> tuple[list[float], list[float], list[float]]:
    """Return times, means and deviations of the accuracy of the best epoch so far: early stopping would keep the weights of that epoch.

    The curve begins when every run has finished an epoch. A run that has ended keeps its accuracy.
    """
    begin = max(run[0][0] for run in runs)
    times = sorted({begin, *(seconds for run in runs for seconds, _ in run if seconds > begin)})
    times = times[:: 1 + len(times) // MOST_POINTS]
    columns = [[_best(run, time) for run in runs] for time in times]
    return times, list(map(mean, columns)), list(map(pstdev, columns))


def _best(run: list[tuple[float, float]], time: float) -> float:
    return max(percent for _, percent in run[: bisect_right([seconds for seconds, _ in run], time)])


def classification(trainings: list[Record]) -> list[str]:
    """Return the table of test accuracies and times of training of all families."""
    sets = [name for name in SETS if any(record["set"] == name for record in trainings)]
    if not sets:
        return [pages.EMPTY]
    families = sorted({record["encoder"] for record in trainings})
    rows = []
    for family in families:
        cells = []
        for name in sets:
            group = [record for record in trainings if (record["set"], record["encoder"]) == (name, family)]
            cells.append(pages.spread([record["trained_percent"] for record in group]))
            cells.append(f"{median(record['training_seconds'] for record in group):.0f}" if group else pages.MISSING)
        rows.append([family.upper(), *cells])
    columns = [column for name in sets for column in (f"{SETS[name]}, %", "s")]
    return [*pages.table(("model", *columns), rows), "", *pages.machines(trainings)]


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "examples" / "results.jsonl", help="(default: %(default)s)")
    parser.add_argument("--bench", type=Path, default=RESULTS, help="folder with sru-h200.jsonl and qrnn-h200.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "sru-paper.md", help="(default: %(default)s)")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="(default: %(default)s)")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    bench = {name: records.read(flags.bench / f"{name}-h200.jsonl") for name in ("sru", "qrnn")}
    measured = table.newest(records.read(flags.results))
    trainings = [record for record in measured if record["kind"] == "training" and record["pretrained"] is None]
    images = {name: flags.images / f"{name}.svg" for name in ("layer-speed", "accuracy-time")}
    links = {name: Path(os.path.relpath(image, flags.page.parent)).as_posix() for name, image in images.items()}
    try:
        speed = draw_speed(bench, images["layer-speed"], links["layer-speed"])
    except LookupError as error:
        print(f"{flags.bench} has {error.args[0]}", file=sys.stderr)
        return 1
    pages.put(flags.page, "layer-speed", speed)
    pages.put(flags.page, "accuracy-time", draw_curves(trainings, images["accuracy-time"], links["accuracy-time"]))
    pages.put(flags.page, "classification", classification(trainings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
