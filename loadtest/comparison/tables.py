"""The trials of the comparison by server, endpoint and load, and their tables: closed loop, ratios and open loop."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loadtest import report
from loadtest.comparison.contenders import SEQSERVE
from loadtest.requests import CPU, FRONTENDS, GENERATORS
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import RATE, Table, Trial, headings

NO_MODEL = "constant answer"
HELD = 0.95
"""Share of the due requests that must be answered in the measured time; below it, a rate is beyond a server."""
P50, P99, IN_TIME = "p50_ms", "p99_ms", "in_time"
COLUMNS = (RATE, P50, P99, CPU, FRONTENDS, GENERATORS)


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
        self._cases = {Case(**case[0].case): case for case in rounds.by_case(trials)}

    def cases(self) -> list[Case]:
        return list(self._cases)

    def values(self, case: Case, column: str) -> list[float]:
        """Return the values of all rounds that have a value."""
        return [trial.values[column] for trial in self._cases.get(case, ()) if column in trial.values]

    def ratios(self, case: Case, base: Case, column: str) -> list[float]:
        """Return the ratio of two cases in each round that has both."""
        return rounds.ratios(self._cases.get(case, ()), self._cases.get(base, ()), column)

    def holds(self, case: Case) -> bool:
        """Return whether a server holds a rate in most rounds."""
        return statistics.median(self.values(case, IN_TIME) or (0.0,)) >= HELD


def closed_loop(measured: Measurements, model: str) -> Table:
    """Return one line for each endpoint and number of callers, with the spread over the rounds."""
    cases = [case for case in measured.cases() if case.model == model and case.callers]
    lines = [["callers", "server", "endpoint", *headings(COLUMNS)]]
    for case in sorted(cases, key=lambda case: case.callers):
        spreads = [report.spread(measured.values(case, column)) for column in COLUMNS]
        lines.append([str(case.callers), case.server, case.endpoint, *spreads])
    return lines


def ratios(measured: Measurements, model: str) -> Table:
    """Return the service's rate and p99 as ratios to each other server's in the same round."""
    cases = [case for case in measured.cases() if case.model == model and case.callers and case.server != SEQSERVE]
    levels = sorted({case.callers for case in cases})
    lines = [["seqserve over", "endpoint", "", *(f"{count} callers" for count in levels)]]
    for server, endpoint in dict.fromkeys((case.server, case.endpoint) for case in cases):
        pairs = [(Case(model, SEQSERVE, endpoint, count), Case(model, server, endpoint, count)) for count in levels]
        for column in (RATE, P99):
            lines.append(
                [server, endpoint, *headings([column]), *(report.spread(measured.ratios(*pair, column)) for pair in pairs)]
            )
    return lines if cases and model != NO_MODEL else []


def open_loop(measured: Measurements, model: str) -> Table:
    """Return p99 by rate for each endpoint. A server that does not hold a rate is not measured at higher rates."""
    cases = [case for case in measured.cases() if case.model == model and case.rate]
    rates = sorted({case.rate for case in cases})
    lines = [["p99 ms", "endpoint", *(f"{rate:,}/s" for rate in rates)]]
    for server, endpoint in dict.fromkeys((case.server, case.endpoint) for case in cases):
        loads = [Case(model, server, endpoint, rate=rate) for rate in rates]
        cells = [report.spread(measured.values(case, P99)) if measured.holds(case) else "beyond" for case in loads]
        lines.append([server, endpoint, *cells])
    return lines if cases else []


def of(measured: Measurements) -> Iterator[Table]:
    """Yield the tables of each model."""
    for model in dict.fromkeys(case.model for case in measured.cases()):
        for build in (closed_loop, ratios, open_loop):
            if table := build(measured, model):
                yield [[f"{model}: {line[0]}" if number == 0 else line[0], *line[1:]] for number, line in enumerate(table)]
