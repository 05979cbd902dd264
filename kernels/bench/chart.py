"""Charts of results as SVG files. Only this module and the figures that use it need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernels.bench.tables import three_digits


class Bars(NamedTuple):
    """The bars of one colour, one in each group, or None in a group without a value."""

    label: str
    colour: str
    heights: Sequence[float | None]


def draw_groups(axes: Axes, groups: Sequence[str], series: Sequence[Bars]) -> None:
    """Draw groups of bars side by side, each with its value above it."""
    width = 0.9 / len(series)
    for index, (label, colour, heights) in enumerate(series):
        drawn = {group + width * index: height for group, height in enumerate(heights) if height is not None}
        bars = axes.bar(list(drawn), list(drawn.values()), 0.95 * width, label=label, color=colour)
        axes.bar_label(bars, list(map(three_digits, drawn.values())), fontsize="x-small")
    axes.set_xticks([group + width * (len(series) - 1) / 2 for group in range(len(groups))], groups)


def write_svg(figure: Figure, path: Path) -> None:
    """Write a figure. The same figures produce the same file: no date, no random names, and text stays text."""
    with matplotlib.rc_context({"svg.hashsalt": "seqserve", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
