"""Chart of a load test: request rate, latency and failures over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from loadtest.load import Figures
from loadtest.report import QUANTILES
from loadtest.request_log import ANSWERED, HUNG_UP, LoggedRequest

POINTS = 60
"""Approximate number of points of every line. Each point covers an interval of the test."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
RED, GREY = "#d55e00", "#666666"
SHADES = ("#9ecae1", "#4292c6", "#08306b")

Values = NDArray[np.float64]
Interval = list[LoggedRequest]


def draw(path: Path, requests: Sequence[LoggedRequest], seconds: float, title: str, subtitle: str) -> None:
    """Write the PNG."""
    step = max(0.1, round(seconds / POINTS, 1))
    intervals = _split(requests, step, seconds)
    middles: Values = np.array([step * (index + 0.5) for index in range(len(intervals))])
    figure = Figure(figsize=(10, 9), dpi=120, layout="constrained")
    rates, times, failures = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    figure.suptitle(title, fontweight="bold")
    rates.set_title(subtitle, fontsize="small", color=GREY)
    _draw_rates(rates, middles, intervals, step)
    _draw_times(times, middles, intervals)
    _draw_failures(failures, middles, intervals, step)
    failures.set_xlabel(f"time since the first request [s], one point every {step:g} s")
    failures.set_xlim(0, len(intervals) * step)
    for axes in (rates, times, failures):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.align_ylabels()
    figure.savefig(path)


def _split(requests: Sequence[LoggedRequest], step: float, seconds: float) -> list[Interval]:
    """Return the requests that ended in each whole interval of `step` seconds."""
    last = min(seconds, max((request.at_s for request in requests), default=0.0))
    intervals: list[Interval] = [[] for _ in range(max(1, math.floor(last / step + 1e-6)))]
    for request in requests:
        if (index := int(request.at_s / step)) < len(intervals):
            intervals[index].append(request)
    return intervals


def _rate(intervals: Sequence[Interval], step: float, *outcomes: str, kind: str | None = None) -> Values:
    """Return the requests a second with these outcomes, by interval."""
    return np.array(
        [sum(request.outcome in outcomes and kind in (None, request.kind) for request in each) / step for each in intervals]
    )


def _draw_rates(axes: Axes, middles: Values, intervals: Sequence[Interval], step: float) -> None:
    """Stack the answers of each kind of user, and draw the hang-ups."""
    kinds = sorted({request.kind for interval in intervals for request in interval})
    if kinds:
        answered = [_rate(intervals, step, ANSWERED, kind=kind) for kind in kinds]
        axes.stackplot(middles, *answered, labels=kinds, colors=COLOURS, alpha=0.8)
    hung_up = _rate(intervals, step, HUNG_UP)
    if hung_up.any():
        axes.plot(middles, hung_up, color="black", linestyle=":", label="hung up")
    axes.set_ylabel("requests a second [1/s]")
    _legend(axes)


def _draw_times(axes: Axes, middles: Values, intervals: Sequence[Interval]) -> None:
    for (name, share), colour in zip(QUANTILES.items(), SHADES, strict=True):
        answers = ([request.ms for request in interval if request.outcome == ANSWERED] for interval in intervals)
        times = [Figures(answers=list(each)).quantile(share) for each in answers]
        axes.plot(middles, times, color=colour, label=name)
    axes.set_ylabel("latency [ms]")
    _legend(axes)


def _draw_failures(axes: Axes, middles: Values, intervals: Sequence[Interval], step: float) -> None:
    reasons = {request.outcome for interval in intervals for request in interval} - {ANSWERED, HUNG_UP}
    axes.bar(middles, _rate(intervals, step, *reasons), width=0.9 * step, color=RED)
    axes.set_ylabel("failures [1/s]")
    if not reasons:
        axes.set_ylim(top=1)
        axes.text(0.5, 0.5, "no request failed", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _legend(axes: Axes) -> None:
    """Add a legend to the right of the lines, if there are lines."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
