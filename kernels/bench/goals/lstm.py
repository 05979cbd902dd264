"""Goals of the LSTM: ratios say how many times as long a peer takes as we do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import geometric_mean

from kernels.bench.goals.common import HEADING, Goal, Line, Ratios, Times
from kernels.bench.report import aligned
from kernels.bench.workload import Workload
from kernels.bench.workloads import RECURRENCE_STEPS, workloads

_WORKLOADS = [one for one in workloads("lstm", "cuda", quick=False) if one.dtype == "float16"]
EQUAL = [one for one in _WORKLOADS if one.kind == "layer" and one.lengths == "equal"]
QUESTIONS = [one for one in _WORKLOADS if one.lengths == "questions"]
RECURRENCES = [one for one in _WORKLOADS if one.kind == "recurrence" and one.steps == RECURRENCE_STEPS[0]]


def table(times: Times) -> str:
    """Empty without a figure that a goal speaks of."""
    lines = [*_equal(times), *_recurrences(times), *_questions(times), *_loops(times)]
    return aligned([HEADING, *lines]) if lines else ""


def _equal(times: Times) -> Iterator[Line]:
    ratios, what = times.ratios("torch padded", "kernel", EQUAL), "equal lengths, torch padded, kernel"
    yield from _by_hidden(what, ratios, times)
    if ratios:
        yield _mean(what, ratios, EQUAL, Goal(3.3))
        worst = min(ratios, key=ratios.__getitem__)
        note = f"hidden {worst.hidden}, {_rows(worst)}"
        yield Goal(1.2).line(f"{what}, smallest", ratios[worst], note, whole=len(ratios) == len(EQUAL))


def _recurrences(times: Times) -> Iterator[Line]:
    """A line through two lengths: its slope is the time of a step, and what it leaves for no steps is the fixed cost."""
    few, many = RECURRENCE_STEPS
    for short in RECURRENCES:
        backend = times.chosen(short)
        shorter, longer = (times.of(backend, replace(short, steps=steps), "kernel") for steps in RECURRENCE_STEPS)
        if shorter is None or longer is None:
            continue
        what, slope = f"recurrence, hidden {short.hidden}, {_rows(short)}, {backend}", (longer - shorter) / (many - few)
        yield Goal(0.45 if short.hidden <= 256 else 0.6, "us").line(f"{what}, a step", slope)
        yield Goal(8, "us").line(f"{what}, fixed", shorter - few * slope)


def _questions(times: Times) -> Iterator[Line]:
    ratios, what = times.ratios("torch packed", "eager", QUESTIONS), "questions, torch packed, eager"
    yield from _by_hidden(what, ratios, times)
    if ratios:
        yield _mean(what, ratios, QUESTIONS, Goal(5))
    for one, ratio in ratios.items():
        if (one.hidden, one.rows) == (256, 64):
            yield Goal(8).line(f"{what}, hidden {one.hidden}, {_rows(one)}", ratio)
    yield from _by_hidden("questions, torch padded, kernel", times.ratios("torch padded", "kernel", QUESTIONS), times)


def _loops(times: Times) -> Iterator[Line]:
    """Without a fused layer, one launch after the other."""
    one_row = [one for one in EQUAL if (one.hidden, one.rows) == (512, 1)]
    for one, ratio in times.ratios("torch by gate", "eager", one_row).items():
        yield Goal(140).line(f"torch by gate, eager, hidden 512, {_rows(one)}", ratio)
    for one, ratio in times.ratios("torch by step", "eager", one_row).items():
        yield f"torch by step, eager, hidden 512, {_rows(one)}", f"{ratio:.4g}", "", ""


def _by_hidden(what: str, ratios: Ratios, times: Times) -> Iterator[Line]:
    """A line for each hidden size, for the eye: the goals speak of all of them, or of one cell."""
    for hidden, group in groupby(ratios, key=lambda one: one.hidden):
        ones = list(group)
        chosen = " and ".join(dict.fromkeys(map(times.chosen, ones)))
        yield f"{what}, hidden {hidden}, {chosen}", ", ".join(f"{ratios[one]:.4g} at {_rows(one)}" for one in ones), "", ""


def _mean(what: str, ratios: Ratios, over: Sequence[Workload], goal: Goal) -> Line:
    note = f"over {len(ratios)} of {len(over)}"
    return goal.line(f"{what}, geometric mean", geometric_mean(ratios.values()), note, whole=len(ratios) == len(over))


def _rows(workload: Workload) -> str:
    return f"{workload.rows} row{'s' if workload.rows > 1 else ''}"
