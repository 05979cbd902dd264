"""Puts tables of a results file into a page, between marks with the name of the table. Requires the standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from training.records import Record

MISSING = "–"
EMPTY = "No measurements are recorded yet."


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def put(page: Path, name: str, lines: Iterable[str]) -> None:
    """Replace the lines between the marks of a table."""
    begin, end = marks(name)
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]))


def drawn(page: Path, name: str) -> list[str]:
    """Return the lines between the marks of a table."""
    begin, end = marks(name)
    return page.read_text().partition(begin)[2].partition(end)[0].strip().splitlines()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]


def places(records: Iterable[Record]) -> str:
    """Return a sentence with the processors, GPUs and dates of records."""
    some = list(records)
    return f"Measured on {_machines(some)}, {_dates(some)}."


def machines(records: Iterable[Record]) -> Iterator[str]:
    """Yield a sentence with the processors, GPUs and dates of the trainings, and a sentence with those of the speed measurements."""
    some = list(records)
    for kind, text in (("training", "Trained"), ("speed", "Served")):
        of_kind = [record for record in some if record["kind"] == kind]
        if of_kind:
            yield f"{text} on {_machines(of_kind)}, {_dates(of_kind)}."


def _machines(records: Sequence[Record]) -> str:
    places = {(record["processor"], record.get("gpu", "")) for record in records}
    return "; ".join(sorted(", ".join(filter(None, place)) for place in places))


def _dates(records: Sequence[Record]) -> str:
    dates = sorted(record["date"] for record in records)
    return f"from {dates[0]} to {dates[-1]}"


def on_gpu(record: Record) -> bool:
    """Return whether a record of a served model was measured on a GPU."""
    return bool(record["device"] != "cpu")


def speed(loads: Sequence[Record]) -> tuple[str, str]:
    """Return the milliseconds of one caller, and the sequences per second of many, from the loads of one model on one device."""
    if not loads:
        return MISSING, MISSING
    one = min(loads, key=lambda record: record["callers"])
    return f"{one['p50_ms']:.2f}", f"{max(record['texts_per_second'] for record in loads):,.0f}"


def spread(values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation over several runs."""
    if not values:
        return MISSING
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
