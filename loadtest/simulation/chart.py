"""A simulation as three pictures: times over load, over turn budgets, and over replicas."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtest.chart import COLOURS, GREY
from loadtest.simulation import goals, ways
from loadtest.simulation.plan import CONTINUOUS, LOAD, STATIC, Result

DPI = 100
PER_MS = 1e3
ALSO = {"loads": "beside"}
"""Rates at which static batching works are low ones for the scheduler."""


def draw(folder: Path, name: str, title: str, results: Many[Result]) -> Iterator[Path]:
    """Write the PNGs of which there are results; says where."""
    for part, picture in PICTURES.items():
        mine = [one for one in results if one.part in (part, ALSO.get(part))]
        if mine:
            figure = picture(mine)
            figure.suptitle(title, fontsize="small", color=GREY)
            path = folder / f"{name}-{part}.png"
            figure.savefig(path)
            yield path


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Two panels a line."""
    lines = -(-panels // 2)
    figure = Figure(figsize=(9, 3.8 * lines), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(lines, min(2, panels), squeeze=False).flat)[:panels]
    for one in axes:
        one.grid(alpha=0.3)
    return figure, axes


def _plain(axes: Axes) -> None:
    """Milliseconds as they are read, 0.05 and 20, and no figures between powers below, where they would overlap."""
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FuncFormatter(_number))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _number(value: float, place: int | None) -> str:
    return f"{value:g}"


def _loads(results: Many[Result]) -> Figure:
    """Each way up to the highest load that was simulated of its own capacity; a panel a mixture."""
    mixtures = list(dict.fromkeys(one.mixture for one in results))
    figure, panels = _figure(len(mixtures))
    for axes, mixture in zip(panels, mixtures, strict=True):
        for way, colour in zip(ways.NAMES, COLOURS, strict=False):
            line = sorted(
                (one for one in results if (one.way, one.mixture) == (way, mixture)), key=lambda one: one.figures.rate
            )
            rates = [one.figures.rate for one in line]
            axes.plot(rates, [PER_MS * one.figures.short["p99"] for one in line], "o-", ms=3, color=colour, label=way)
            axes.plot(rates, [PER_MS * one.figures.short["p50"] for one in line], ":", color=colour)
        axes.set(title=mixture, xscale="log", yscale="log", xlabel="sequences that come a second [1/s]")
        _plain(axes)
    figure.supylabel("answer to a short sequence [ms], p99 and p50 (dotted)", fontsize="medium")
    panels[0].legend(fontsize="small")
    return figure


def _budgets(results: Many[Result]) -> Figure:
    figure, (times, paces) = _figure(2)
    for (mixture, line), colour in zip(groupby(sorted(results, key=_by_mixture), _by_mixture), COLOURS, strict=False):
        points = sorted(line, key=lambda one: one.budget_ms)
        budgets = [one.budget_ms for one in points]
        times.plot(budgets, [PER_MS * one.figures.short["p99"] for one in points], "o-", ms=3, color=colour, label=mixture)
        if mixture == "short":
            most = [PER_MS * one.figures.short["p99"] + goals.BUDGETS_MORE * one.budget_ms for one in points]
            times.plot(budgets, most, ":", color=GREY, label=f"short + {goals.BUDGETS_MORE:g} budgets")
        else:
            paces.plot(budgets, [one.long_share[0] for one in points], "o-", ms=3, color=colour, label="median")
            paces.plot(budgets, [one.long_share[1] for one in points], ":", color=colour, label="nine in ten at least")
    paces.axhline(goals.LONG_SHARE, color=GREY, linestyle=":", label="wanted")
    times.set(
        xscale="log", yscale="log", xlabel="turn budget [ms]", ylabel=f"p99 of short sequences at {LOAD:g} of capacity [ms]"
    )
    paces.set(xscale="log", xlabel="turn budget [ms]", ylabel="pace of long sequences, as a share of one alone", ylim=(0, 1.05))
    _plain(times)
    for axes in (times, paces):
        axes.legend(fontsize="small")
    return figure


def _replicas(results: Many[Result]) -> Figure:
    figure, [axes] = _figure(1)
    for way, colour in ((CONTINUOUS, COLOURS[0]), (STATIC, COLOURS[1])):
        line = [one for one in results if one.way == way]
        for quantile, style in (("p99", "o-"), ("p50", ":")):
            times = [PER_MS * one.figures.short[quantile] for one in line]
            axes.plot([one.replicas for one in line], times, style, ms=3, color=colour, label=f"{way}, {quantile}")
    axes.set(xscale="log", yscale="log", xlabel="replicas", ylabel=f"answer to a short sequence at {LOAD:g} of capacity [ms]")
    _plain(axes)
    axes.legend(fontsize="small")
    return figure


PICTURES = {"loads": _loads, "budgets": _budgets, "replicas": _replicas}


def _by_mixture(one: Result) -> str:
    return one.mixture
