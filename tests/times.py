"""`pytest -p tests.times` ends with the processor time and the waiting time of the tests, by folder.

The time of a server belongs to the test after which it ended.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS, SECONDS, PROCESSOR = 0, 1, 2
_totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
_before = 0.0


def processor_seconds() -> float:
    """Return the processor time of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_collection_finish() -> None:
    global _before
    _before = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    global _before
    report = yield
    now = processor_seconds()
    report.__dict__["processor"], _before = now - _before, now  # a worker of pytest-xdist sends all attributes of a report
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    total = _totals["/".join(Path(report.nodeid.partition("::")[0]).parts[:2])]
    total[TESTS] += report.when == "call"
    total[SECONDS] += report.duration
    total[PROCESSOR] += getattr(report, "processor", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_sep("=", "seconds by folder")
    rows = [*_totals.items(), ("all", [sum(column) for column in zip(*_totals.values(), strict=True)])]
    for folder, (tests, seconds, processor) in sorted(rows, key=lambda row: row[1][SECONDS]):
        waiting = max(0.0, seconds - processor)
        terminalreporter.write_line(
            f"{folder:<28} {tests:>7.0f} tests {seconds:>8.1f} s {processor:>8.1f} processor {waiting:>8.1f} waiting"
        )
