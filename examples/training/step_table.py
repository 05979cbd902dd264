"""Draws the tables of a results file of the recipes with an output per step: families side by side for each set.

A training record has the quality in the framework alone, a served record the quality of the same model by HTTP, and a speed record the
load of one model on one device. A reference record has the figures of a simple model, or the best figures that any model can reach.
Records of quick trials are left out, and so are records that a later record of the same kind replaces. Requires the standard library
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training import pages
from training.records import Record
from training.step_tasks import TASKS


def write(page: Path, records: list[Record]) -> None:
    """Replace the table of each task in a page."""
    for task in TASKS:
        pages.put(page, f"{task} results", lines(task, records))


def lines(task: str, records: list[Record]) -> Iterator[str]:
    """Yield the lines of the table of a task: one row for each set and family, and the machines of the measurements."""
    newest = list({_identity(each): each for each in records if each["task"] == task and not each["quick"]}.values())
    trainings = [record for record in newest if record["kind"] == "training"]
    if not trainings:
        yield pages.EMPTY
        return
    figures = list(trainings[0]["trained"])
    columns = ["set", "family", *(f"framework alone, {each}" for each in figures), "training, s", "bytes"]
    for device in ("CPU", "GPU"):
        columns += [*(f"{device} {each}" for each in figures), f"{device} ms", f"{device} sequences/s"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for name in sorted({each["set"] for each in trainings}):
        here = [each for each in newest if each["set"] == name]
        for training in sorted(_of(here, "training"), key=lambda record: str(record["encoder"])):
            group = [each for each in here if each["encoder"] == training["encoder"]]
            yield f"| {' | '.join([name, training['encoder'], *_cells(training, group, figures)])} |"
        for reference in _of(here, "reference"):
            cells = [f"{reference['trained'][figure]:.2f}" for figure in figures]
            yield f"| {' | '.join([name, reference['encoder'], *cells])} |{' |' * (len(columns) - len(cells) - 2)}"
    yield ""
    yield from pages.machines(newest)


def _identity(record: Record) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("kind", "task", "set", "encoder", "device", "callers"))


def _of(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _cells(training: Record, group: list[Record], figures: list[str]) -> Iterator[str]:
    yield from (f"{training['trained'][figure]:.2f}" for figure in figures)
    yield f"{training['training_seconds']:.0f}"
    yield f"{training['bytes']:,}"
    for on_gpu in (False, True):
        here = [record for record in group if record["kind"] != "training" and pages.on_gpu(record) == on_gpu]
        served, loads = _of(here, "served"), _of(here, "speed")
        yield from (f"{served[-1]['served'][figure]:.2f}" if served else pages.MISSING for figure in figures)
        yield from pages.speed(loads)
