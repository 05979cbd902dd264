"""A load test as one picture: requests a second, their times, and failures, over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from loadtest.journal import ANSWERED, HUNG_UP, Entry
from loadtest.load import Figures
from loadtest.report import QUANTILES

POINTS = 60
"""A run is cut into about so many stretches; each is a point of every line."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
RED, GREY = "#d55e00", "#666666"
SHADES = ("#9ecae1", "#4292c6", "#08306b")

Values = NDArray[np.float64]


def draw(path: Path, entries: Sequence[Entry], seconds: float, title: str, subtitle: str) -> None:
    """Write the PNG."""
    step = max(0.1, round(seconds / POINTS, 1))
    stretches = _cut(entries, step, seconds)
    middles: Values = np.array([step * (place + 0.5) for place in range(len(stretches))])
    figure = Figure(figsize=(10, 9), dpi=120, layout="constrained")
    rates, times, failures = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    figure.suptitle(title, fontweight="bold")
    rates.set_title(subtitle, fontsize="small", color=GREY)
    _draw_rates(rates, middles, stretches, step)
    _draw_times(times, middles, stretches)
    _draw_failures(failures, middles, stretches, step)
    failures.set_xlabel(f"time since the first request [s], a point each {step:g} s")
    failures.set_xlim(0, len(stretches) * step)
    for axes in (rates, times, failures):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.align_ylabels()
    figure.savefig(path)


Stretch = list[Entry]


def _cut(entries: Sequence[Entry], step: float, seconds: float) -> list[Stretch]:
    """The requests that ended in each whole stretch of `step` seconds; what is left at the end is no whole one."""
    last = min(seconds, max((one.at_s for one in entries), default=0.0))
    stretches: list[Stretch] = [[] for _ in range(max(1, math.floor(last / step + 1e-6)))]
    for entry in entries:
        if (place := int(entry.at_s / step)) < len(stretches):
            stretches[place].append(entry)
    return stretches


def _rate(stretches: Sequence[Stretch], step: float, *outcomes: str, kind: str | None = None) -> Values:
    """Requests a second with one of these outcomes."""
    return np.array([sum(one.outcome in outcomes and kind in (None, one.kind) for one in every) / step for every in stretches])


def _draw_rates(axes: Axes, middles: Values, stretches: Sequence[Stretch], step: float) -> None:
    """The answers of each kind of caller upon another, and the requests that were hung up on."""
    kinds = sorted({entry.kind for every in stretches for entry in every})
    if kinds:
        answered = [_rate(stretches, step, ANSWERED, kind=kind) for kind in kinds]
        axes.stackplot(middles, *answered, labels=kinds, colors=COLOURS, alpha=0.8)
    hung_up = _rate(stretches, step, HUNG_UP)
    if hung_up.any():
        axes.plot(middles, hung_up, color="black", linestyle=":", label="hung up on")
    axes.set_ylabel("requests a second [1/s]")
    _explain(axes)


def _draw_times(axes: Axes, middles: Values, stretches: Sequence[Stretch]) -> None:
    for (name, share), colour in zip(QUANTILES.items(), SHADES, strict=True):
        times = [Figures(answers=[one.ms for one in every if one.outcome == ANSWERED]).quantile(share) for every in stretches]
        axes.plot(middles, times, color=colour, label=name)
    axes.set_ylabel("time to the answer [ms]")
    _explain(axes)


def _draw_failures(axes: Axes, middles: Values, stretches: Sequence[Stretch], step: float) -> None:
    reasons = {entry.outcome for every in stretches for entry in every} - {ANSWERED, HUNG_UP}
    axes.bar(middles, _rate(stretches, step, *reasons), width=0.9 * step, color=RED)
    axes.set_ylabel("failures [1/s]")
    if not reasons:
        axes.set_ylim(top=1)
        axes.text(0.5, 0.5, "no request failed", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _explain(axes: Axes) -> None:
    """A legend beside the lines, if there are any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
