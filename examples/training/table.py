"""Draws the table of a results file: families side by side for each set. Requires the standard library only.

A training record has the accuracy of the framework alone, a served record the accuracy of the same model by HTTP, and a speed record the
load of one model on one device. Records of quick trials are left out, and so are records that a later record of the same run replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, median

from training import pages
from training.records import Record

MARK = "results"
COLUMNS = (
    *("set", "family", "runs", "framework alone, %", "training, s", "bytes"),
    *(f"{device} {figure}" for device in ("CPU", "GPU") for figure in ("%", "ms", "texts/s")),
)


def write(page: Path, records: list[Record]) -> None:
    """Replace the tables of a page."""
    pages.put(page, MARK, lines(records))


def lines(records: list[Record]) -> Iterator[str]:
    """Yield the lines of the tables: one row for each set and family, and the means over the sets."""
    current = newest(records)
    pairs = sorted({_pair(record) for record in current})
    if not pairs:
        yield pages.EMPTY
        return
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    groups = {pair: [record for record in current if _pair(record) == pair] for pair in pairs}
    for (name, encoder), group in groups.items():
        yield f"| {name} | {encoder} | {' | '.join(_cells(group))} |"
    yield ""
    yield from _means(groups)
    yield ""
    yield from pages.machines(current)


def newest(records: list[Record]) -> list[Record]:
    """Return the newest record of each run, without quick trials."""
    return list({_run(record): record for record in records if not record["quick"]}.values())


def _pair(record: Record) -> tuple[str, str]:
    """Return the set, and the family with the file of its pretrained vectors."""
    vectors = record["pretrained"]
    return record["set"], record["encoder"] + (f", {vectors}" if vectors else "")


def _run(record: Record) -> tuple[object, ...]:
    """Return the fields that identify a run: a later record with the same identity replaces an earlier record."""
    return tuple(record.get(name) for name in ("kind", "set", "encoder", "pretrained", "fold", "seed", "device", "callers"))


def _cells(group: list[Record]) -> Iterator[str]:
    trainings = _of(group, "training")
    yield str(len(trainings))
    yield pages.spread([record["trained_percent"] for record in trainings])
    yield f"{median(record['training_seconds'] for record in trainings):.0f}" if trainings else pages.MISSING
    yield f"{median(record['bytes'] for record in trainings):,.0f}" if trainings else pages.MISSING
    for on_gpu in (False, True):
        yield pages.spread(_served(group, on_gpu))
        yield from pages.speed([record for record in _of(group, "speed") if pages.on_gpu(record) == on_gpu])


def _means(groups: dict[tuple[str, str], list[Record]]) -> Iterator[str]:
    """Yield a table of both accuracies, by HTTP and in the framework alone: means over the sets that have both."""
    yield "| family | device | sets | framework alone, % | service, % | difference, points |"
    yield "|---|---|---|---|---|---|"
    for family, on_gpu in product(sorted({family for _, family in groups}), (False, True)):
        pairs = []
        for group in (group for (_, other), group in groups.items() if other == family):
            trained, served = [record["trained_percent"] for record in _of(group, "training")], _served(group, on_gpu)
            if trained and served:
                pairs.append((mean(trained), mean(served)))
        if pairs:
            alone, service = (mean(column) for column in zip(*pairs, strict=True))
            device = "GPU" if on_gpu else "CPU"
            yield f"| {family} | {device} | {len(pairs)} | {alone:.2f} | {service:.2f} | {service - alone:+z.2f} |"


def _served(group: list[Record], on_gpu: bool) -> list[float]:
    """Return the percentages by HTTP on one kind of device."""
    return [record["served_percent"] for record in _of(group, "served") if pages.on_gpu(record) == on_gpu]


def _of(group: list[Record], kind: str) -> list[Record]:
    return [record for record in group if record["kind"] == kind]
