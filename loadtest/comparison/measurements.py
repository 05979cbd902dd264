"""Trials of the comparison, and access to their values by server, endpoint and load."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loadtest.generator.job import Result
from loadtest.scenarios.rounds import Trial, by_case, ratios

NO_MODEL = "constant answer"
HELD = 0.95
"""Share of the due requests that must be answered in the measured time; below it, a rate is beyond a server."""
P50, P99 = "p50_ms", "p99_ms"
CPU, FRONTEND, GENERATOR, IN_TIME = "cpu_us", "frontend_us", "generator_us", "in_time"


class Case(NamedTuple):
    """One load on one endpoint. callers: of a closed loop; rate: requests a second of an open loop."""

    model: str
    server: str
    endpoint: str
    callers: int = 0
    rate: int = 0

    def labels(self) -> dict[str, object]:
        load = {"rate": self.rate} if self.rate else {"callers": self.callers}
        return {"model": self.model, "server": self.server, "endpoint": self.endpoint, **load}


def trial_of(case: Case, round: int, result: Result, frontends: Sequence[bool]) -> Trial:
    """Return the trial with microseconds of processor time for each answer. frontends: which processes of the server are frontends."""
    per_answer = 1e6 / max(1, result.answers)
    values = {CPU: per_answer * sum(result.server_cpu_seconds), GENERATOR: per_answer * result.cpu_seconds}
    if any(frontends):
        used = [seconds for seconds, own in zip(result.server_cpu_seconds, frontends, strict=True) if own]
        values[FRONTEND] = per_answer * sum(used)
    if case.rate:
        values[IN_TIME] = result.answers / max(1, result.due)
    return Trial.of(case.labels(), round, result, values)


class Measurements:
    """All trials of a run."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._cases = {Case(**rounds[0].case): rounds for rounds in by_case(trials)}

    def cases(self) -> list[Case]:
        return list(self._cases)

    def values(self, case: Case, column: str) -> list[float]:
        """Return the values of all rounds that have a value."""
        return [trial.values[column] for trial in self._cases.get(case, ()) if column in trial.values]

    def median(self, case: Case, column: str, base: Case | None = None) -> float | None:
        """Return the median of the values, or of the ratios to another case in the same rounds."""
        values = self.ratios(case, base, column) if base else self.values(case, column)
        return statistics.median(values) if values else None

    def ratios(self, case: Case, base: Case, column: str) -> list[float]:
        """Return the ratio of two cases in each round that has both."""
        return ratios(self._cases.get(case, ()), self._cases.get(base, ()), column)

    def holds(self, case: Case) -> bool:
        """Return whether a server holds a rate in most rounds."""
        share = self.median(case, IN_TIME)
        return share is not None and share >= HELD
