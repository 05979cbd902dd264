"""Measured figures of one machine, read from the records of `make bench-capacity`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.fleet.queueing import BatchServer
from loadtest.report import RESULTS

Record = dict[str, Any]
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica for one kind of request. Times are seconds.

    rate: answers a second in a closed loop; alone: p50 of a single caller; frontend, engine: processor time of an answer in the closed
    loop; levels: of the open loops, answers a second and p99; cores: that the service may use; price: of an hour, in the reader's currency.
    """

    name: str
    device: str
    date: str
    request: str
    rate: float
    alone: float
    frontend: float
    engine: float
    levels: tuple[tuple[float, float], ...]
    frontends: int
    cores: int
    price: float = 1.0

    def rate_within(self, p99_seconds: float) -> float:
        """Return the highest measured rate with at most this p99. Raises ValueError if there is none."""
        rates = [rate for rate, p99 in self.levels if p99 <= p99_seconds]
        if not rates:
            best = 1000 * min(p99 for _, p99 in self.levels)
            raise ValueError(
                f"{self.name} was measured with a p99 of {best:.3g} ms or more for {KINDS[self.request]}: allow more than "
                f"{1000 * p99_seconds:g} ms, or measure lower rates with `make bench-capacity`"
            )
        return max(rates)

    @property
    def server(self) -> BatchServer:
        return BatchServer.of(self.alone, self.rate)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a machine's records are. case: the fields that select them; alone: the fields that select the single caller."""

    file: str
    case: Record
    alone: Record
    cores: int


SOURCES = {
    "2-core CPU": Source("sizing-epyc-2core.jsonl", {"callers": 32}, {"callers": 1}, 2),
    "H200": Source("capacity-h200.jsonl", {"callers": 64, "frontends": 8, "batch": 512}, {"callers": 1, "request": "text"}, 16),
}
"""The H200 was measured with a single caller only for texts: the other kinds of requests use that time as well."""
KINDS = {"text": "one text", "session": "chunk over /infer", "socket-binary": "chunk in a binary message"}


def read(name: str, request: str, price: float = 1.0, folder: Path = RESULTS) -> Machine:
    """Return the figures of a machine of SOURCES for a kind of request: medians over the rounds."""
    source = SOURCES[name]
    records = load(folder / source.file)
    loaded = select(records, {"request": request} | source.case)
    alone = select(records, {"request": request, "loop": CLOSED} | source.alone)
    closed = select(loaded, {"loop": CLOSED})
    loops = dict.fromkeys(record["loop"] for record in loaded if record["loop"] != CLOSED)
    levels = [select(loaded, {"loop": loop}) for loop in loops]
    return Machine(
        name,
        closed[0]["machine"],
        closed[0]["date"],
        request,
        median(closed, "answers/s"),
        median(alone, "p50_ms") / 1000,
        median(closed, "frontends_us") / 1e6,
        median(closed, "engine_us") / 1e6,
        tuple((median(level, "answers/s"), median(level, "p99_ms") / 1000) for level in levels),
        closed[0]["frontends"],
        source.cores,
        price,
    )


def load(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def select(records: Sequence[Record], fields: Record) -> list[Record]:
    """Return the records with these fields. Raises LookupError if there is none."""
    found = [record for record in records if fields.items() <= record.items()]
    if not found:
        raise LookupError(f"no record has {fields}: measure it with `make bench-capacity`")
    return found


def median(records: Sequence[Record], field: str) -> float:
    return statistics.median([float(record[field]) for record in records])
