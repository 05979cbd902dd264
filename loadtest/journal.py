"""Every request of a load test, a line each in a CSV file, written as they end and read while more come.

Locust itself keeps no times, only counts of rounded ones: what is worked out from these lines is exact.
"""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from loadtest.load import Figures

ANSWERED, HUNG_UP = "answered", "hung up"


class Entry(NamedTuple):
    """One request: when it ended, in seconds since the start, whose it was, how long it took, and what came of it.

    The outcome is ANSWERED, HUNG_UP, which takes NaN ms, or why it failed.
    """

    at_s: float
    kind: str
    ms: float
    outcome: str


class Writer:
    """Writes each entry at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, newline="")
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._csv.writerow(Entry._fields)
        self._start: float | None = None

    def write(self, kind: str, ms: float, outcome: str) -> None:
        """The first one's start is the start of all."""
        now = time.perf_counter()
        if self._start is None:
            self._start = now - (0.0 if math.isnan(ms) else ms / 1000)
        self._csv.writerow(Entry(round(now - self._start, 6), kind, round(ms, 3), " ".join(outcome.split())))

    def close(self) -> None:
        self._file.close()


class Reader:
    """Reads what has been written since it last looked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> Iterator[Entry]:
        """Whole lines only; the first of all is the head."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode().splitlines()
        for at_s, kind, ms, outcome in csv.reader(lines if self._read else lines[1:]):
            yield Entry(float(at_s), kind, float(ms), outcome)
        self._read += len(whole)


class Tally:
    """What came of the requests so far, by kind of caller and in total."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.total = Figures()
        self.kinds: dict[str, Figures] = {}
        self.hung_up: Counter[str] = Counter()

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.entries.append(entry)
            for figures in (self.total, self.kinds.setdefault(entry.kind, Figures())):
                if entry.outcome == ANSWERED:
                    figures.answers.append(entry.ms / 1000)
                elif entry.outcome != HUNG_UP:
                    figures.failures[entry.outcome] += 1
            self.hung_up[entry.kind] += entry.outcome == HUNG_UP
        for figures in (self.total, *self.kinds.values()):
            figures.seconds = self.entries[-1].at_s if self.entries else 0.0
