"""The largest rate of the service by number of frontends and size of a batch, and its latency at shares of that rate.

Several generator processes load one server: first in a closed loop, then in open loops at shares of the rate of the closed loop.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from loadtest import servers
from loadtest.bench import CONNECTIONS
from loadtest.requests import KINDS, MANY, Clients, Requests
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import RATE, Trial
from loadtest.servers import ServerProcess

SUMMARY = "the largest rate of the service by number of frontends and size of a batch, and its latency below it"
FEWER = 4
"""Requests with many inputs have this many times fewer callers, and never more than the queue of an engine holds."""
STEPS, WAITING = 64, 16
"""Time steps in a batch and sequences in the queue of an engine for each sequence in a batch, as in the service's defaults."""
COLUMNS = (RATE, "inputs_per_second", "p50_ms", "p99_ms", "frontends_us", "engine_us", "generators_us", "generators_busy")
LABELS = ("request", "frontends", "batch", "generators", "callers", "loop")
PACKAGES = ("torch", "uvicorn", "uvloop", "httptools", "msgspec", "orjson")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the clients send")
    parser.add_argument("--frontends", type="count", nargs="+", default=[1], help="numbers of frontends")
    parser.add_argument("--batches", type="count", nargs="+", default=[64], help="most sequences in a batch")
    parser.add_argument("--generators", type="count", default=1, help="load generator processes")
    parser.add_argument("--callers", type="count", nargs="+", default=[32], help="concurrent callers of each generator")
    parser.add_argument(
        "--share", type="amount", nargs="*", default=[0.7], help="rates of open loops as shares of the closed loop's"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--models", type=Path, default=servers.MODELS, help="models folder")
    parser.add_argument("--log", type=Path, help="log file of the servers")
    rounds.add_options(parser, seconds=3.0, rounds=3)


def run(options: argparse.Namespace) -> int:
    """Measure every kind with every number of frontends. Returns 1 when a request failed."""
    trials = [trial for number in range(options.rounds) for trial in _round(number, options)]
    return rounds.publish("capacity", trials, [list(_table(trials))], options, PACKAGES, options.device)


def _round(number: int, options: argparse.Namespace) -> Iterator[Trial]:
    for frontends, batch in product(options.frontends, options.batches):
        with _serving(frontends, batch, options) as server:
            for kind, callers in product(options.kinds, options.callers):
                requests = KINDS[kind](Clients(server.url, options.models))
                if requests.inputs > 1:
                    callers = max(1, min(callers // FEWER, WAITING * batch // MANY // options.generators))
                case = {
                    "request": kind,
                    "frontends": frontends,
                    "batch": batch,
                    "generators": options.generators,
                    "callers": callers,
                }
                yield from _measure(server, requests, case, number, options)


@contextmanager
def _serving(frontends: int, batch: int, options: argparse.Namespace) -> Iterator[ServerProcess]:
    """Run a server with batches of at most `batch` sequences."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "settings.toml")
        sizes = f"max_batch_sequences = {batch}\nmax_batch_tokens = {STEPS * batch}\n"
        config.write_text(f"{sizes}[limits]\nmax_waiting = {WAITING * batch}\n")
        flags = ("--models", str(options.models), "--device", options.device, "--frontends", str(frontends))
        with servers.running(*flags, "--config", str(config), log=options.log) as server:
            yield server


def _measure(
    server: ServerProcess, requests: Requests, case: dict[str, Any], number: int, options: argparse.Namespace
) -> Iterator[Trial]:
    """Yield the trials of the closed loop and of each open loop."""
    closed = _trial(server, requests, case | {"loop": "closed"}, number, options)
    yield closed
    for share in options.share:
        yield _trial(server, requests, case | {"loop": f"{share:.0%}"}, number, options, share * closed.values[RATE])


def _trial(
    server: ServerProcess,
    requests: Requests,
    case: dict[str, Any],
    number: int,
    options: argparse.Namespace,
    rate: float = 0.0,
) -> Trial:
    """Load the server. rate: requests a second of an open loop, or 0 for a closed loop.

    Values are the processor time in microseconds for each answer, and the share of its time in which a generator was busy.
    """
    callers = case["callers"] * options.generators
    result, costs = requests.measure(
        server,
        options.generators,
        callers=max(CONNECTIONS, callers) if rate and requests.inputs == 1 else callers,
        seconds=options.seconds,
        warm_up=options.seconds / 4,
        rate=rate,
        seed=number * options.generators,
    )
    values = {
        "inputs_per_second": requests.inputs * result.rate,
        **costs,
        "generators_busy": result.cpu_seconds / (options.generators * result.seconds),
    }
    return Trial.of(case, number, result, values)


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each case."""
    yield rounds.headings([*LABELS, *COLUMNS])
    for case in rounds.by_case(trials):
        yield [*(str(case[0].case[label]) for label in LABELS), *rounds.spreads(case, COLUMNS)]
