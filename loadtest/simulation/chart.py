"""Charts of a simulation: latency over load, over batch budgets, and over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtest.chart import COLOURS, GREY
from loadtest.simulation import goals, policies
from loadtest.simulation.plan import CONTINUOUS, LOAD, MIXED, SHORT, STATIC, Result

DPI = 100
PER_MS = 1e3
ALSO = {"loads": "same rate"}
"""Parts that are added to a chart: the rates of static batching are low loads of the scheduler."""


def draw(folder: Path, name: str, title: str, results: Sequence[Result]) -> Iterator[Path]:
    """Write the PNG of each part that has results. Yields the paths."""
    for part, chart in CHARTS.items():
        of_part = [result for result in results if result.part in (part, ALSO.get(part))]
        if of_part:
            figure = chart(of_part)
            figure.suptitle(title, fontsize="small", color=GREY)
            path = folder / f"{name}-{part}.png"
            figure.savefig(path)
            yield path


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with two panels in each line."""
    lines = -(-panels // 2)
    figure = Figure(figsize=(9, 3.8 * lines), dpi=DPI, layout="constrained")
    panel_axes = list(figure.subplots(lines, min(2, panels), squeeze=False).flat)[:panels]
    for axes in panel_axes:
        axes.grid(alpha=0.3)
    return figure, panel_axes


def _plain_numbers(axes: Axes) -> None:
    """Label milliseconds as 0.05 and 20, and leave the minor ticks of the x axis without labels, which would overlap."""
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FuncFormatter(_number))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _number(value: float, position: int | None) -> str:
    return f"{value:g}"


def _short_ms(results: Sequence[Result], quantile: str) -> list[float]:
    return [PER_MS * result.figures.short[quantile] for result in results]


def _loads(results: Sequence[Result]) -> Figure:
    """Draw each policy up to the highest simulated load, with a panel for each mixture."""
    mixtures = list(dict.fromkeys(result.mixture for result in results))
    figure, panels = _figure(len(mixtures))
    for axes, mixture in zip(panels, mixtures, strict=True):
        for policy, colour in zip(policies.NAMES, COLOURS, strict=False):
            line = [result for result in results if (result.policy, result.mixture) == (policy, mixture)]
            line.sort(key=lambda result: result.figures.rate)
            rates = [result.figures.rate for result in line]
            axes.plot(rates, _short_ms(line, "p99"), "o-", ms=3, color=colour, label=policy)
            axes.plot(rates, _short_ms(line, "p50"), ":", color=colour)
        axes.set(title=mixture, xscale="log", yscale="log", xlabel="arrival rate [sequences/s]")
        _plain_numbers(axes)
    figure.supylabel("latency of short sequences [ms], p99 and p50 (dotted)", fontsize="medium")
    panels[0].legend(fontsize="small")
    return figure


def _budgets(results: Sequence[Result]) -> Figure:
    figure, (times, paces) = _figure(2)
    for mixture, colour in zip((MIXED, SHORT), COLOURS, strict=False):
        line = [result for result in results if result.mixture == mixture]
        line.sort(key=lambda result: result.budget_ms)
        budgets = [result.budget_ms for result in line]
        times.plot(budgets, _short_ms(line, "p99"), "o-", ms=3, color=colour, label=mixture)
        if mixture == SHORT:
            limits = [ms + goals.MORE_BUDGETS * budget for ms, budget in zip(_short_ms(line, "p99"), budgets, strict=True)]
            times.plot(budgets, limits, ":", color=GREY, label=f"short + {goals.MORE_BUDGETS:g} budgets")
        else:
            paces.plot(budgets, [result.long_share[0] for result in line], "o-", ms=3, color=colour, label="median")
            paces.plot(budgets, [result.long_share[1] for result in line], ":", color=colour, label="10th percentile")
    paces.axhline(goals.LONG_SHARE, color=GREY, linestyle=":", label="goal")
    ylabel = f"p99 of short sequences at {LOAD:g} of capacity [ms]"
    times.set(xscale="log", yscale="log", xlabel="batch budget [ms]", ylabel=ylabel)
    ylabel = "pace of long sequences, as a share of one alone"
    paces.set(xscale="log", xlabel="batch budget [ms]", ylabel=ylabel, ylim=(0, 1.05))
    _plain_numbers(times)
    for axes in (times, paces):
        axes.legend(fontsize="small")
    return figure


def _replicas(results: Sequence[Result]) -> Figure:
    figure, [axes] = _figure(1)
    for policy, colour in ((CONTINUOUS, COLOURS[0]), (STATIC, COLOURS[1])):
        line = [result for result in results if result.policy == policy]
        for quantile, style in (("p99", "o-"), ("p50", ":")):
            label = f"{policy}, {quantile}"
            axes.plot([result.replicas for result in line], _short_ms(line, quantile), style, ms=3, color=colour, label=label)
    ylabel = f"latency of short sequences at {LOAD:g} of capacity [ms]"
    axes.set(xscale="log", yscale="log", xlabel="replicas", ylabel=ylabel)
    _plain_numbers(axes)
    axes.legend(fontsize="small")
    return figure


CHARTS = {"loads": _loads, "budgets": _budgets, "replicas": _replicas}
