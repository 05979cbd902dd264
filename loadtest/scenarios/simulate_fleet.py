"""Simulate many replicas behind a proxy that hashes sessions: spread, moves, failures, autoscaling and cost. It needs no server."""

from __future__ import annotations

import argparse

from kernels.bench.tables import write
from loadtest.discovery import CannotMeasure
from loadtest.fleet import check, machines
from loadtest.fleet.plan import REPLICAS, FleetPlan
from loadtest.fleet.sizing import Load
from loadtest.fleet.tables import tables

SUMMARY = "many replicas: spread of sessions, moves, failures, autoscaling, number of replicas and cost"
NAME = "simulate-fleet.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    plan, load = FleetPlan(Load(0, 0.0)), Load(1_000_000, 1e6)
    parser.add_argument("--streams", type=int, default=load.streams, help="open sessions")
    parser.add_argument("--rate", type=float, default=load.rate, help="sequences, or chunks of all sessions, a second")
    parser.add_argument("--p99-ms", type=float, default=load.p99_ms, help="limit of the latency")
    parser.add_argument("--utilisation", type=float, default=load.utilisation, help="highest share of a replica's largest rate")
    parser.add_argument("--zones", type=int, default=load.zones, help="zones; one of them may fail")
    parser.add_argument("--max-sessions", type=int, default=load.max_sessions, help="SEQSERVE_MAX_SESSIONS")
    parser.add_argument("--max-waiting", type=int, default=plan.waiting, help="SEQSERVE_MAX_WAITING")
    parser.add_argument("--points", type=int, default=load.points, help="points of each replica on the proxy's ring")
    parser.add_argument(
        "--checkpoint", type=int, default=plan.checkpoint, help="chunks between two copies of a session's state"
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS), help="numbers of replicas")
    parser.add_argument(
        "--price", type=_price, nargs="+", default=list(plan.prices), metavar="MACHINE=PRICE",
        help=f"price of an hour of {' or '.join(machines.SOURCES)}, in any currency",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=plan.seed, help="seed of the session names")


def _price(text: str) -> tuple[str, float]:
    name, _, price = text.rpartition("=")
    if name not in machines.SOURCES:
        raise argparse.ArgumentTypeError(f"{name or text!r} is not one of {', '.join(machines.SOURCES)}")
    return name, float(price)


def plan_of(options: argparse.Namespace) -> FleetPlan:
    load = Load(
        *(
            options.streams,
            options.rate,
            options.p99_ms,
            options.utilisation,
            options.zones,
            options.max_sessions,
            options.points,
        )
    )
    return FleetPlan(
        *(load, options.replicas, tuple(options.price), options.checkpoint), waiting=options.max_waiting, seed=options.seed
    )


def run(options: argparse.Namespace) -> int:
    """Run every part, print the tables and write the records."""
    try:
        records = list(plan_of(options).records())
    except ValueError as error:
        raise CannotMeasure(str(error)) from None
    for name, table in tables(records, check.checks()).items():
        print(f"{name}\n\n{table}\n")
    write(options.out / NAME, records)
    return 0
