"""Puts tables of a results file into a page, between marks with the name of the table. Requires the standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from training.records import Record

MISSING = "–"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def put(page: Path, name: str, lines: Iterable[str]) -> None:
    """Replace what is between the marks of a table."""
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
    """Return a sentence with the processors and the dates of records."""
    some = list(records)
    processors = "; ".join(sorted({record["processor"] for record in some}))
    dates = sorted(record["date"] for record in some)
    return f"Measured on {processors}, from {dates[0]} to {dates[-1]}."


def machines(records: Iterable[Record]) -> Iterator[str]:
    """Yield a sentence with the processors, GPUs and dates of the trainings, and one of the speeds."""
    some = list(records)
    for kind, text in (("training", "Trained"), ("speed", "Served")):
        places = {(record["processor"], record.get("gpu", "")) for record in some if record["kind"] == kind}
        dates = sorted(record["date"] for record in some if record["kind"] == kind)
        if dates:
            names = "; ".join(sorted(", ".join(filter(None, place)) for place in places))
            yield f"{text} on {names}, from {dates[0]} to {dates[-1]}."


def spread(values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation over several runs."""
    if not values:
        return MISSING
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
