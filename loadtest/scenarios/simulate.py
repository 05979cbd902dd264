"""Simulations without a server: batching policies on a virtual clock, and many replicas behind a proxy."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from loadtest.scenarios import simulate_batching, simulate_fleet

SUMMARY = "batching policies on a virtual clock, or many replicas: sessions, failures, autoscaling and cost"
PARTS: dict[str, ModuleType] = {"batching": simulate_batching, "fleet": simulate_fleet}


def add_options(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(required=True, metavar=" | ".join(PARTS))
    for name, part in PARTS.items():
        command = parts.add_parser(
            name, help=part.SUMMARY, description=part.SUMMARY, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        part.add_options(command)
        command.add_argument("--out", type=Path, default=argparse.SUPPRESS, help="output folder")
        command.set_defaults(simulate=part.run)


def run(options: argparse.Namespace) -> int:
    """Run the chosen simulation."""
    status: int = options.simulate(options)
    return status
