"""Goals of the SRU and the QRNN: a layer is held against what nobody does without, one product of its size or the bytes that it
gathers, and against the layers that it could stand in for. Each goal has its worst size in a line, and all of them in a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kernels.bench.goals.common import HEADING, Goal, Line, Ratios, Times
from kernels.bench.report import aligned
from kernels.bench.workload import FORMS, LONG_MEMORY, Workload
from kernels.bench.workloads import FOLDED_FORMS, of_the_figure, one_long_row, workloads

CELLS = [one for family in FORMS for one in workloads(family, "cuda", quick=False) if one.in_grid]
BLOCKS = {"sru": 4, "qrnn": 3}
"""Of a folded layer, in float16; the SRU's skip is the fourth."""

STEP_US, FIXED_US = 0.025, 6.0
"""What an SRU v2 may take for a step, which waits for the one before, and what any call may take without them."""

_STEPS = f"{STEP_US * 1e3:g} ns a step and {FIXED_US:g} us"

Base = Callable[[Workload], float | None]
"""Microseconds over which a workload's are taken, or None where something was not timed."""


@dataclass(frozen=True, slots=True)
class Group:
    """A goal and the workloads that it speaks of."""

    what: str
    goal: Goal
    cells: Sequence[Workload]
    ratios: Ratios

    def line(self) -> Line:
        worst = (max if self.goal.unit else min)(self.ratios, key=self.ratios.__getitem__)
        note = f"hidden {worst.hidden}, {_size(worst)}"
        return self.goal.line(self.what, self.ratios[worst], note, whole=len(self.ratios) == len(self.cells))

    def grid(self) -> str:
        """A line for each number of rows and steps, a column for each hidden size."""
        hidden = sorted({one.hidden for one in self.cells})
        lines = [[self.what, *map(str, hidden)]]
        for size, group in groupby(sorted(self.cells, key=lambda one: (one.rows, one.steps)), key=_size):
            found = {one.hidden: f"{self.ratios[one]:.3g}" for one in group if one in self.ratios}
            lines.append([size, *(found.get(one, "-") for one in hidden)])
        return aligned(lines)


def table(times: Times) -> str:
    """Empty without a figure that a goal speaks of."""
    groups = [group for group in (*_layers(times), *_folded(times), *_figure(times), *_long_rows(times)) if group.ratios]
    lines = [*_copy(times), *(group.line() for group in groups)]
    grids = [group.grid() for group in groups if len(group.cells) > 1]
    return "\n\n".join([aligned([HEADING, *lines]), *grids]) if groups else ""


def _copy(times: Times) -> Iterator[Line]:
    rate = _bytes_per_us(times)
    if rate is not None:
        yield "device copy, bytes read and written", f"{rate / 1e6:.3g} TB/s", "", ""


def _layers(times: Times) -> Iterator[Group]:
    """The SRU v1 and the QRNN wait for nothing but their product; an SRU v2 has steps that wait for each other."""

    def product(cell: Workload) -> float | None:
        return times.of("one product", cell, "kernel")

    def product_or_steps(cell: Workload) -> float | None:
        of_product = product(cell)
        return None if of_product is None else max(1.25 * of_product, _steps_us(cell))

    for family, forms in FORMS.items():
        for form in (*forms, LONG_MEMORY):
            cells, what = _cells(family, "layer", form), f"{family} layer {form}"
            if form == "v2":
                yield _over(f"{what} over 1.25 products or, if longer, {_STEPS}", 1, cells, product_or_steps, times)
            else:
                yield _over(f"{what} over one product", 1.25, cells, product, times)


def _folded(times: Times) -> Iterator[Group]:
    rate = _bytes_per_us(times)

    def allowed(cell: Workload) -> float | None:
        moved = cell.rows * cell.steps * BLOCKS[cell.family] * cell.hidden * 2
        return None if rate is None else max(2 * moved / rate, _steps_us(cell) if cell.form == "v2" else FIXED_US)

    for family, forms in FOLDED_FORMS.items():
        for form in forms:
            least = _STEPS if form == "v2" else f"{FIXED_US:g} us"
            what = f"{family} folded {form} over twice its bytes or, if longer, {least}"
            yield _over(what, 1, _cells(family, "folded", form), allowed, times)


def _figure(times: Times) -> Iterator[Group]:
    for form in FORMS["sru"]:
        cells = [one for one in CELLS if of_the_figure(one) and one.form == form]
        for steps, limit in ((128, 10), (32, 6)):
            some = [one for one in cells if one.steps == steps]
            yield Group(
                f"sru every step {form}, torch LSTM, {steps} steps",
                Goal(limit),
                some,
                times.ratios("torch LSTM", "kernel", some),
            )
        for width in (2, 3):
            layouts = [times.ratios(f"conv1d width {width}{layout}", "kernel", cells) for layout in ("", ", channels last")]
            found = {one: [each[one] for each in layouts if one in each] for one in cells}
            fastest = {one: min(ratios) for one, ratios in found.items() if ratios}
            yield Group(f"sru every step {form}, conv1d width {width}", Goal(1), cells, fastest)


def _long_rows(times: Times) -> Iterator[Group]:
    """The package's kernel is not captured in a graph, and on one row of so many steps its time is the device's."""
    for cell in filter(one_long_row, CELLS):
        if cell.form == "v2":
            continue
        peer = "sru package" if cell.family == "sru" else "sru package v1"
        theirs, ours = times.of(peer, cell, "eager"), times.ours(cell, "kernel")
        ratios = {} if theirs is None or ours is None else {cell: theirs / ours}
        yield Group(f"{cell.family} layer {cell.form}, {peer}, eager over our kernel", Goal(40), [cell], ratios)


def _over(what: str, limit: float, cells: Sequence[Workload], base: Base, times: Times) -> Group:
    """On the workloads where both times are known."""
    pairs = {one: (times.ours(one, "kernel"), base(one)) for one in cells}
    ratios = {one: ours / over for one, (ours, over) in pairs.items() if ours is not None and over is not None}
    return Group(what, Goal(limit, "times"), cells, ratios)


def _steps_us(cell: Workload) -> float:
    return cell.steps * STEP_US + FIXED_US


def _bytes_per_us(times: Times) -> float | None:
    """Of the device's own copy, each byte read and written; None where it was not timed."""
    for cell in CELLS:
        taken = times.of("device copy", cell, "kernel")
        if taken is not None:
            return 2 * cell.steps * cell.inputs * 2 / taken
    return None


def _cells(family: str, kind: str, form: str) -> list[Workload]:
    return [one for one in CELLS if (one.family, one.kind, one.form) == (family, kind, form)]


def _size(cell: Workload) -> str:
    return f"{cell.rows} x {cell.steps}"
