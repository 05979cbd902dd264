"""Trials of the comparison by server, endpoint and load."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from loadtest.scenarios.rounds import Trial, by_case, ratios

NO_MODEL = "constant answer"
HELD = 0.95
"""Share of the due requests that must be answered in the measured time; below it, a rate is beyond a server."""
P50, P99, IN_TIME = "p50_ms", "p99_ms", "in_time"


class Case(NamedTuple):
    """One load on one endpoint. callers: of a closed loop; rate: requests a second of an open loop."""

    model: str
    server: str
    endpoint: str
    callers: int = 0
    rate: int = 0

    def labels(self) -> dict[str, object]:
        return {name: value for name, value in self._asdict().items() if value}


class Measurements:
    """All trials of a run."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._cases = {Case(**rounds[0].case): rounds for rounds in by_case(trials)}

    def cases(self) -> list[Case]:
        return list(self._cases)

    def values(self, case: Case, column: str) -> list[float]:
        """Return the values of all rounds that have a value."""
        return [trial.values[column] for trial in self._cases.get(case, ()) if column in trial.values]

    def ratios(self, case: Case, base: Case, column: str) -> list[float]:
        """Return the ratio of two cases in each round that has both."""
        return ratios(self._cases.get(case, ()), self._cases.get(base, ()), column)

    def median(self, case: Case, column: str, base: Case | None = None) -> float | None:
        """Return the median of the values, or of the ratios to another case in the same rounds."""
        values = self.ratios(case, base, column) if base else self.values(case, column)
        return statistics.median(values) if values else None

    def holds(self, case: Case) -> bool:
        """Return whether a server holds a rate in most rounds."""
        return (self.median(case, IN_TIME) or 0.0) >= HELD
