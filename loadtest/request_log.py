"""A CSV file with one line for each request of a load test. The load test reads it while locust still writes it.

Locust keeps only counts of rounded times. Statistics from this file are exact.
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


class LoggedRequest(NamedTuple):
    """One request: seconds from the start of the test to its end, the kind of its user, its duration, and its outcome.

    outcome: ANSWERED, HUNG_UP (with NaN ms), or the reason of the failure.
    """

    at_s: float
    kind: str
    ms: float
    outcome: str


class RequestLogWriter:
    """Writes each request to the file immediately."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, newline="")
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._csv.writerow(LoggedRequest._fields)
        self._start: float | None = None

    def write(self, kind: str, ms: float, outcome: str) -> None:
        """Append a request that has just ended. The test starts when the first request starts."""
        now = time.perf_counter()
        if self._start is None:
            self._start = now - (0.0 if math.isnan(ms) else ms / 1000)
        self._csv.writerow(LoggedRequest(round(now - self._start, 6), kind, round(ms, 3), " ".join(outcome.split())))

    def close(self) -> None:
        self._file.close()


class RequestLogReader:
    """Reads the lines that were written since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[LoggedRequest]:
        """Yield the requests of whole new lines, without the heading."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.decode().splitlines()
        for at_s, kind, ms, outcome in csv.reader(lines if self._offset else lines[1:]):
            yield LoggedRequest(float(at_s), kind, float(ms), outcome)
        self._offset += len(whole)


class RequestTotals:
    """Figures of all requests so far, by kind of user and in total."""

    def __init__(self) -> None:
        self.requests: list[LoggedRequest] = []
        self.total = Figures()
        self.kinds: dict[str, Figures] = {}
        self.hung_up: Counter[str] = Counter()

    def add(self, requests: Iterable[LoggedRequest]) -> None:
        for request in requests:
            self.requests.append(request)
            for figures in (self.total, self.kinds.setdefault(request.kind, Figures())):
                if request.outcome == ANSWERED:
                    figures.answers.append(request.ms / 1000)
                elif request.outcome != HUNG_UP:
                    figures.failures[request.outcome] += 1
            self.hung_up[request.kind] += request.outcome == HUNG_UP
        for figures in (self.total, *self.kinds.values()):
            figures.seconds = self.requests[-1].at_s if self.requests else 0.0
