"""`python -m loadtest.scenarios NAME`: run one scenario, print its tables and write its records to loadtest/results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from loadtest.report import RESULTS
from loadtest.scenarios import codec, devices, endpoints, engine, plain_handler

SCENARIOS: dict[str, ModuleType] = {
    "plain-handler": plain_handler,
    "endpoints": endpoints,
    "codec": codec,
    "engine": engine,
    "devices": devices,
}
"""Each has `SUMMARY`, `add_options(parser)` and `run(options)`, which returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named scenario. Returns 0, or 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.scenarios", description="Measure one aspect of the service.")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(SCENARIOS))
    for name, scenario in SCENARIOS.items():
        command = commands.add_parser(name, help=scenario.SUMMARY, description=scenario.SUMMARY)
        scenario.add_options(command)
        command.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON lines (default: loadtest/results)")
        command.set_defaults(run=scenario.run)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
