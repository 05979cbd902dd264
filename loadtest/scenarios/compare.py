"""Two versions of the service under the same load in turn: what a change did to rates, latencies and processor time.

OLD and NEW are commits, or folders with the project. Each server runs the code of its own folder; both have the models of OLD, which NEW
can read, and get the same requests from this generator. A pair is one trial of each, directly one after the other, while the other server
is idle. Other work on the machine affects both trials of a pair alike, so that ratios are taken within a pair. Every second pair has new
servers, because one process is always a little faster than another with the same code.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.bench.report import device_name, slug
from kernels.bench.tables import three_digits
from loadtest import discovery, realtime, report, servers
from loadtest.discovery import CannotMeasure
from loadtest.requests import ENGINE, FRONTENDS, KINDS, SENSOR, Clients, Requests
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import RATE
from loadtest.servers import ServerProcess

SUMMARY = "two versions of the service in turn: rates, latencies and processor time"
P50, P99 = "p50_ms", "p99_ms"
QUANTITIES = (RATE, FRONTENDS, ENGINE, P50, P99)
JUDGED = (RATE, FRONTENDS, ENGINE)
PAIRS = 2
"""Pairs with the same servers."""
PACKAGES = ("torch", "uvicorn", "uvloop", "httptools", "msgspec", "orjson", "grpcio")


class Cell(NamedTuple):
    """One load. kind: a name in KINDS; rate: requests a second of an open loop; longer: multiplies the duration.

    period: seconds between the chunks of a stream in real time, instead of a kind; callers are streams.
    """

    kind: str = ""
    callers: int = 32
    rate: float = 0.0
    in_flight: int = 1
    longer: float = 1.0
    period: float = 0.0

    @property
    def judged(self) -> tuple[str, ...]:
        """Return the quantities that are judged: the rate of an open loop is given."""
        return JUDGED[1:] if self.rate or self.period else JUDGED

    def requests(self, clients: Clients, seconds: float) -> Requests:
        """seconds: the duration of a trial with its warm-up."""
        if self.period:
            return realtime.requests(clients.url, discovery.find(clients.url, SENSOR), 1, self.period, self.longer * seconds)
        if self.kind == "chunk" and self.in_flight > 1:
            return clients.chunk(self.callers // self.in_flight)  # callers share the sessions
        return KINDS[self.kind](clients)


CELLS = {
    "text, 32 callers": Cell("text"),
    "text, 1 caller": Cell("text", 1),
    "text, 20 a second": Cell("text", rate=20, longer=2),
    "text, 200 a second": Cell("text", rate=200),
    "text, 1000 a second": Cell("text", rate=1000),
    "64 texts": Cell("texts", 8),
    "64 lists of ids": Cell("ids", 8),
    "chunk, 1 in flight": Cell("chunk"),
    "chunk, 4 in flight": Cell("chunk", in_flight=4),
    "WebSocket, 1 in flight": Cell("socket-binary"),
    "WebSocket, 4 in flight": Cell("socket-binary", in_flight=4),
    "streams in real time": Cell(callers=50, period=0.05),
    "OIP binary": Cell("oip"),
    "gRPC": Cell("grpc"),
}


class Version(NamedTuple):
    """The code of one side. name: of the commit or the folder; packages: folders with packages in other versions than ours."""

    name: str
    folder: Path
    packages: tuple[Path, ...] = ()


Comparison = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By cell and quantity: the medians of both sides (old, new), and the median of the ratios with its quartiles (low, ratio, high)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="a commit, or a folder with the project")
    parser.add_argument("new", metavar="NEW", help="a commit, or a folder with the project")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--floor", type=float, default=0.97, help="least geometric mean of the ratios of a judged quantity")
    parser.add_argument("--cell-floor", type=float, default=0.90, help="least ratio of a judged quantity in a cell")
    parser.add_argument("--pairs", type="count", default=12, help="pairs of trials")
    parser.add_argument("--seconds", type="amount", default=0.7, help="duration of a trial")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="what is compared")
    parser.add_argument("--logs", type=Path, default=Path("build/compare"), help="folder of the servers' logs")


def run(options: argparse.Namespace) -> int:
    """Compare both versions in all cells. Returns 1 when NEW is below a floor."""
    with tempfile.TemporaryDirectory() as scratch:
        old, new = (
            _checked_out(version, Path(scratch, side)) for side, version in (("old", options.old), ("new", options.new))
        )
        constraints = ((version.folder / "constraints.txt").read_text() for version in (old, new))
        if packages := other_packages(*constraints):
            old = old._replace(packages=(_installed(packages, Path(scratch, "packages")),))
        for version in (old, new):  # a server would compile its kernels while it answers
            environment = os.environ | {"PYTHONPATH": servers.python_path(version.folder, *version.packages)}
            if subprocess.run((sys.executable, "-m", "kernels.cpu"), cwd=version.folder, env=environment).returncode:
                raise CannotMeasure(f"{version.name}: its CPU kernels cannot be compiled")
        cells = {name: summary(values) for name, values in _measured((old, new), options).items()}
    machine = device_name(torch.device(options.device))
    means, faults = means_of(cells), below(cells, options.floor, options.cell_floor)
    print(f"\n{old.name} and {new.name}, {machine}, {date.today()}, {options.pairs} pairs of {options.seconds:g} s")
    print("ratios: the median of the pairs with its quartiles; more is better for NEW in all of them\n")
    print(report.table(list(_table(cells))))
    print("\ngeometric means: " + ", ".join(f"{quantity} {mean:.3f}" for quantity, mean in means.items()))
    print("\n".join(faults) or "no judged ratio is below its floor", flush=True)
    record = {"old": old.name, "new": new.name, "pairs": options.pairs, "seconds": options.seconds}
    record |= {"floor": options.floor, "cell_floor": options.cell_floor, "below": faults, "means": means, "cells": cells}
    _write(options.out / f"compare-{slug(machine)}.json", record | report.environment(machine, PACKAGES))
    return 1 if faults else 0


def summary(values: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """Return a cell of a comparison from its values (pairs, OLD and NEW, quantities). In every ratio, more is better for NEW."""
    old, new = values.swapaxes(0, 1)
    ratios = np.where([quantity == RATE for quantity in QUANTITIES], new / old, old / new)
    columns = (np.median(old, axis=0), np.median(new, axis=0), *np.percentile(ratios, (25, 50, 75), axis=0))
    rows = [[float(f"{value:.4g}") for value in row] for row in zip(*columns, strict=True)]
    return {
        quantity: dict(zip(("old", "new", "low", "ratio", "high"), row, strict=True))
        for quantity, row in zip(QUANTITIES, rows, strict=True)
    }


def below(cells: Comparison, floor: float, cell_floor: float) -> list[str]:
    """Return a line for each judged ratio that is below its floor."""
    means = ((f"{quantity}: the geometric mean", mean, floor) for quantity, mean in means_of(cells).items())
    ratios = (
        (f"{name}, {quantity}:", cell[quantity]["ratio"], cell_floor)
        for name, cell in cells.items()
        for quantity in CELLS[name].judged
    )
    return [f"{what} {ratio:.3f} is below {least}" for what, ratio, least in (*means, *ratios) if ratio < least]


def means_of(cells: Comparison) -> dict[str, float]:
    """Return the geometric mean of the ratios of each judged quantity, over the cells in which it is judged."""
    ratios = {
        quantity: [cell[quantity]["ratio"] for name, cell in cells.items() if quantity in CELLS[name].judged]
        for quantity in JUDGED
    }
    return {quantity: round(statistics.geometric_mean(each), 4) for quantity, each in ratios.items() if each}


def other_packages(old: str, new: str) -> list[str]:
    """Return the constraints of OLD that NEW does not have. More packages in NEW change nothing for OLD."""
    wanted, given = ({line for line in text.splitlines() if "==" in line} for text in (old, new))
    return sorted(wanted - given)


def _checked_out(version: str, destination: Path) -> Version:
    """Return a version: a folder as it is, or a commit of this repository, whose files are written to `destination`."""
    if (Path(version) / "service").is_dir() and (Path(version) / "constraints.txt").is_file():
        return Version(Path(version).resolve().name, Path(version).resolve())
    name = _git("rev-parse", "--short=10", f"{version}^{{commit}}").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", name))) as archive:
        archive.extractall(destination, filter="data")
    return Version(name, destination)


def _git(*words: str) -> bytes:
    completed = subprocess.run(("git", *words), cwd=servers.ROOT, capture_output=True)  # noqa: S607
    if completed.returncode:
        raise CannotMeasure(f"neither a folder with the project nor a commit: {completed.stderr.decode().strip()}")
    return completed.stdout


def _installed(packages: Sequence[str], destination: Path) -> Path:
    """Install packages into a folder that precedes the running environment."""
    print(f"installing {', '.join(packages)} for OLD", file=sys.stderr, flush=True)
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(destination))
    if subprocess.run((sys.executable, *install, *packages)).returncode:
        raise CannotMeasure("the packages of OLD cannot be installed")
    return destination


def _measured(versions: Sequence[Version], options: argparse.Namespace) -> dict[str, NDArray[np.float64]]:
    """Load OLD and NEW in turn. Returns the values of each cell: (pairs, OLD and NEW, quantities)."""
    values = {name: np.empty((options.pairs, 2, len(QUANTITIES))) for name in options.cells}
    requests, began = dict[str, Requests](), time.monotonic()
    for first in range(0, options.pairs, PAIRS):
        with ExitStack() as stack:
            running = [stack.enter_context(_serving(versions, side, options)) for side in (0, 1)]
            if not requests:
                clients = Clients(running[0].url, versions[0].folder / "models")  # NEW must answer as OLD does
                requests = {name: CELLS[name].requests(clients, 1.25 * options.seconds) for name in options.cells}
            for pair, name in product(range(first, min(first + PAIRS, options.pairs)), options.cells):
                progress = f"pair {pair + 1} of {options.pairs}, {time.monotonic() - began:.0f} s, {name}"
                print(f"\r{progress:<60}", end="", file=sys.stderr, flush=True)
                for side in (0, 1) if pair % 2 == 0 else (1, 0):
                    where = f"{versions[side].name}, {name}"
                    values[name][pair, side] = _trial(running[side], CELLS[name], requests[name], where, pair, options)
    print(file=sys.stderr)
    return values


def _serving(versions: Sequence[Version], side: int, options: argparse.Namespace) -> AbstractContextManager[ServerProcess]:
    """Run the server of one side, with flags that every version has."""
    version, log = versions[side], options.logs.resolve() / ("old.log", "new.log")[side]
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = ("--models", str(versions[0].folder / "models"), "--device", options.device)
    return servers.running(*flags, log=log, folders=(version.folder, *version.packages))


def _trial(
    server: ServerProcess, cell: Cell, requests: Requests, where: str, seed: int, options: argparse.Namespace
) -> list[float]:
    """Load one server. Returns a value of each quantity. Raises CannotMeasure for a wrong or failed answer, with its version and cell."""
    in_flight = cell.in_flight if requests.transport == "websocket" else 1
    load: dict[str, Any] = {
        "callers": cell.callers,
        "in_flight": in_flight,
        "rate": cell.rate,
        "period": cell.period,
        "seed": seed,
    }
    seconds = cell.longer * options.seconds
    result, costs = requests.measure(server, seconds=seconds, warm_up=options.seconds / 4, **load)
    if result.failures or not result.answers:
        raise CannotMeasure(f"{where}: {result.failures or 'no answer in time'}")
    values = {RATE: result.rate, **costs, **result.milliseconds()}
    return [values[quantity] for quantity in QUANTITIES]


def _table(cells: Comparison) -> Iterator[list[str]]:
    """Yield a line for each cell: the rates, and the median ratio of each quantity with its quartiles."""
    yield ["", "old/s", "new/s", *rounds.headings(QUANTITIES)]
    for name, cell in cells.items():
        rates = (three_digits(cell[RATE][side]) for side in ("old", "new"))
        yield [name, *rates, *("{ratio:.2f} ({low:.2f} to {high:.2f})".format(**cell[quantity]) for quantity in QUANTITIES)]


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a comparison beside those with other versions as OLD, one line for each."""
    records = json.loads(path.read_text()) if path.is_file() else {}
    records[record["old"]] = record
    path.write_text("{\n" + ",\n".join(f"{json.dumps(old)}: {json.dumps(each)}" for old, each in records.items()) + "\n}\n")
    print(f"written to {path}")
