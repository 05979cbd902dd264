"""Predicted against measured: the formulae of docs/sizing.md, applied to the machines that were measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.fleet import machines
from loadtest.fleet.machines import CLOSED, KINDS, SOURCES, Record
from loadtest.fleet.sizing import Load
from loadtest.report import RESULTS

UTILISATION, P99_MS = Load(0, 0.0).utilisation, Load(0, 0.0).p99_ms
LATENCY_FIELDS = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Check:
    """One figure. what: its name with its unit."""

    machine: str
    request: str
    what: str
    predicted: float
    measured: float


def checks(folder: Path = RESULTS) -> Iterator[Check]:
    yield from rates(folder)
    yield from latencies(folder)
    yield two_devices(folder)


def rates(folder: Path) -> Iterator[Check]:
    """Yield the largest rate, by the processor time of an answer at 70 % of it, the lowest of the bounds; and the rate that the default
    utilisation allows, next to the highest measured rate with the default p99."""
    for name, request, records in _measured(folder):
        loaded = machines.select(records, {"loop": "70%"})
        frontend, engine, generator = (
            machines.median(loaded, f"{each}_us") / 1e6 for each in ("frontends", "engine", "generators")
        )
        bounds = loaded[0]["frontends"] / frontend, 1 / engine, SOURCES[name].cores / (frontend + engine + generator)
        machine = machines.read(name, request, folder=folder)
        yield Check(name, request, "answers/s at most", min(bounds), machine.rate)
        within = machine.rate_within(P99_MS / 1000)
        yield Check(name, request, f"answers/s with a p99 of {P99_MS:g} ms", UTILISATION * machine.rate, within)


def latencies(folder: Path) -> Iterator[Check]:
    """Yield the latencies of each open loop by the latency of a single caller and the largest rate."""
    for name, request, records in _measured(folder):
        server = machines.read(name, request, folder=folder).server
        for loop in dict.fromkeys(record["loop"] for record in records if record["loop"] != CLOSED):
            level = machines.select(records, {"loop": loop})
            rate = machines.median(level, "answers/s")
            for quantile, share in LATENCY_FIELDS.items():
                predicted = 1000 * server.latency(rate, share)
                yield Check(name, request, f"{quantile} ms at {loop}", predicted, machines.median(level, f"{quantile}_ms"))


def two_devices(folder: Path) -> Check:
    """Return the sequences a second of two GPUs, twice the rate of one GPU."""
    records = machines.load(folder / "devices-h200.jsonl")
    one, two = (
        machines.median([record for record in records if len(record["devices"]) == count], "sequences_per_second")
        for count in (1, 2)
    )
    return Check("2 H200", "4 LSTM layers of 1024 units", "sequences/s", 2 * one, two)


def _measured(folder: Path) -> Iterator[tuple[str, str, list[Record]]]:
    for name, source in SOURCES.items():
        records = machines.load(folder / source.file)
        for request in KINDS:
            yield name, request, machines.select(records, {"request": request} | source.case)


def ratio(check: Check) -> float:
    """Return the measured value as a multiple of the predicted one."""
    return check.measured / check.predicted if math.isfinite(check.predicted) else 0.0
