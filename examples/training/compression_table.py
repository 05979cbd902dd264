"""Draws the table of compressed text classifiers: accuracy, bytes and latency of each variant, next to its original."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import mean, median

from service.modeling import spec
from training import pages
from training.records import Record
from training.variants import VARIANTS

MARK = "compression"
HEADING = "## Price"
COLUMNS = (
    *("set", "family", "variant", "runs", "training, s", "bytes", "of the original"),
    *(f"{device} {figure}" for device in ("CPU", "GPU") for figure in ("%", "points", "ms")),
)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of a version folder without its card."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != spec.CARD)


def write_card(folder: Path, table: list[str]) -> None:
    """Put a table at the end of a card, in place of an earlier table."""
    card = (folder / spec.CARD).read_text().partition(f"\n{HEADING}\n")[0].rstrip()
    (folder / spec.CARD).write_text("\n".join([card, "", HEADING, "", *table, ""]))


def of_kind(measured: list[Record], quick: bool = False, holdout: int | None = None) -> list[Record]:
    """Return the records of one kind of run. The README uses neither quick trials nor runs on a tenth of the training part."""
    return [record for record in measured if (record["quick"], record["holdout"]) == (quick, holdout)]


def lines(measured: list[Record], variants: Collection[str] = tuple(VARIANTS)) -> list[str]:
    """Return the table of some variants. Figures with other choices than the newest model's are left out."""
    newest = list({(_model(record), *_place(record)): record for record in measured}.values())
    choices = {_model(record): record["choices"] for record in newest if record["kind"] == "training"}
    current = [record for record in newest if record["choices"] == choices.get(_model(record))]
    families = sorted({_family(record) for record in current})
    if not families:
        return [pages.EMPTY]
    rows = [row for family in families for row in _rows([record for record in current if _family(record) == family], variants)]
    return [*pages.table(COLUMNS, rows), "", *pages.machines(current)]


def _family(record: Record) -> tuple[str, str]:
    return record["set"], record["encoder"]


def _run(record: Record) -> tuple[object, ...]:
    return record["fold"], record["seed"]


def _model(record: Record) -> tuple[object, ...]:
    return (*_family(record), *_run(record), record["variant"])


def _place(record: Record) -> tuple[object, ...]:
    """Return the fields that identify a record of one model. Records of a GPU replace records of another GPU."""
    device = record.get("device")
    return record["kind"], device and pages.on_gpu(record), record.get("callers")


def _rows(family: list[Record], variants: Collection[str]) -> Iterator[list[str]]:
    """Yield the rows of a set and family."""
    originals = [record for record in family if record["variant"] == "original"]
    for variant in variants:
        group = [record for record in family if record["variant"] == variant]
        trainings = [record for record in group if record["kind"] == "training"]
        if not trainings:
            continue
        size = median(record["bytes"] for record in trainings)
        whole = [record["bytes"] for record in originals if record["kind"] == "training"]
        yield [
            *map(str, _family(group[0])),
            trainings[-1]["title"],
            str(len(trainings)),
            f"{median(record['training_seconds'] for record in trainings):.0f}",
            f"{size:,.0f}",
            f"{100 * size / median(whole):.0f} %" if whole else pages.MISSING,
            *_on_device(group, originals, False),
            *_on_device(group, originals, True),
        ]


def _on_device(group: list[Record], originals: list[Record], on_gpu: bool) -> list[str]:
    """Return accuracy, its difference to the originals of the same runs, and the latency of one caller, on one kind of device."""
    here, base = (
        [record for record in some if "device" in record and pages.on_gpu(record) == on_gpu] for some in (group, originals)
    )
    percents, before = (
        {_run(record): record["served_percent"] for record in some if record["kind"] == "served"} for some in (here, base)
    )
    differences = [percent - before[run] for run, percent in percents.items() if run in before]
    loads = [record for record in here if record["kind"] == "speed"]
    return [
        pages.spread(list(percents.values())),
        f"{mean(differences):+z.1f}" if differences else pages.MISSING,
        pages.speed(loads)[0],
    ]
