"""`python -m loadtest SCENARIO`: run one load test or measurement, print its tables and write its results."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from loadtest.discovery import CannotMeasure
from loadtest.report import RESULTS
from loadtest.scenarios import capacity, compare, engine, fairness, locust_traffic, perf_analyzer, serving
from service.flags import above_zero

SCENARIOS: dict[str, tuple[ModuleType, Path]] = {
    "locust": (locust_traffic, Path("build/loadtest")),
    "serving": (serving, RESULTS),
    "capacity": (capacity, RESULTS),
    "engine": (engine, RESULTS),
    "compare": (compare, RESULTS),
    "fairness": (fairness, RESULTS),
    "perf-analyzer": (perf_analyzer, Path("build/perf-analyzer")),
}
"""Modules with `SUMMARY`, `add_options(parser)` and `run(options)`, which returns the exit status; and their output folders. The types
"count" and "amount" of options are whole and other numbers above zero."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named scenario. Returns 0, 1 when a request failed, or 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="Load tests and measurements of the service.")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(SCENARIOS))
    for name, (scenario, out) in SCENARIOS.items():
        command = commands.add_parser(
            name, help=scenario.SUMMARY, description=scenario.SUMMARY, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.register("type", "count", above_zero(int))
        command.register("type", "amount", above_zero(float))
        scenario.add_options(command)
        command.add_argument("--out", type=Path, default=out, help="output folder")
        command.set_defaults(run=scenario.run)
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    try:
        status: int = options.run(options)
    except CannotMeasure as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers that a scenario has started end before it does
    sys.exit(main())
