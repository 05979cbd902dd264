"""Run one kind of load: `python -m tests.long.endurance sessions|requests --size 10000000`. Fails if anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from loadtest.target import Target
from tests import models
from tests.accumulator import Counts, rests
from tests.long.endurance.faults import ENGINES, START_SECONDS, Explained, Faults
from tests.long.endurance.load import Client, Load, Tally
from tests.long.endurance.requests import RequestClient, echo
from tests.long.endurance.sessions import IDLE_SECONDS, SessionClient
from tests.planted import constants
from tests.serving import Server, eventually, serving

SIZE, SESSIONS, CLIENTS = 10_000_000, 10_000, 128
FAULT_SECONDS = 30.0
UNLOAD_SECONDS = 10.0
SHOW_SECONDS = 60.0
SETTINGS = {"max_sessions": str(2 * SESSIONS), "session_idle_seconds": str(IDLE_SECONDS), "start_seconds": str(START_SECONDS)}
"""One engine has room for all sessions. An engine may start slowly on a busy machine."""
Show = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """The requests of a run. It ends after `size` answers, or after `seconds`.

    sessions: of all clients. fault_seconds: time between two faults.
    """

    kind: str
    size: int = SIZE
    sessions: int = SESSIONS
    fault_seconds: float = FAULT_SECONDS
    seed: int = 0
    seconds: float = math.inf


def run(plan: Plan, scratch: Path, show: Show) -> Tally:
    """Start a service, send it everything, and return the record once the service is at rest."""
    folder = scratch / "models"
    models.accumulator(folder)
    echo(folder)
    frontends = "1" if plan.kind == "sessions" else "2"
    flags = ("--device", ",".join(["cpu"] * ENGINES), "--frontends", frontends)
    unloads = constants({"service.supervisor.reload.UNLOAD_SECONDS": UNLOAD_SECONDS})
    with unloads, serving(folder, scratch, *flags, **SETTINGS) as server:
        tally = uvloop.run(_run(plan, server, folder, show))
        eventually(lambda: rests(server))
        counts = Counts.of(server.scrape())
    if counts.accepted != counts.in_flight + counts.outcomes.total():
        tally.wrong(f"the server accepted {counts.accepted} requests, and {counts.outcomes.total()} have an outcome")
    lost, reported = (tally.counts[f"sessions in killed engines{of_them}"] for of_them in ("", ", reported"))
    if lost != reported:
        tally.wrong(f"{lost} sessions rested in engines that were killed, and {reported} were reported")
    return tally


async def _run(plan: Plan, server: Server, folder: Path, show: Show) -> Tally:
    tally, explained = Tally(), Explained(UNLOAD_SECONDS)
    target, clients = Target.of(server.address, "/infer"), list[Client]()
    for number in range(CLIENTS):
        chance = random.Random(f"{plan.seed}-{number}")
        if plan.kind == "requests":
            clients.append(RequestClient(target, number, tally, chance))
            continue
        names = [f"{plan.seed}-{name}" for name in range(number, plan.sessions, CLIENTS)]
        clients.append(SessionClient(target, names, explained, tally, chance))
    sessions = [client for client in clients if isinstance(client, SessionClient)]

    def on_kill(place: int) -> None:
        for client in sessions:
            client.engine_was_killed(place)

    faults = Faults(server, folder, explained, tally, on_kill)
    load = Load(server.address, clients, plan.size, plan.seconds, tally)
    others = [asyncio.ensure_future(faults.run(plan.fault_seconds)), asyncio.ensure_future(_show(load, tally, show))]
    try:
        await load.run()
    finally:
        for other in others:
            other.cancel()
        for other in others:
            with suppress(asyncio.CancelledError):
                await other
    return tally


async def _show(load: Load, tally: Tally, show: Show) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        seconds = time.monotonic() - began
        show(f"{load.answers} answers in {seconds:.0f} s, {load.answers / seconds:.0f} a second: {dict(tally.counts)}")


def main() -> int:
    """Return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description="Send requests with known answers to a service, and kill its engines.")
    parser.add_argument("kind", choices=["sessions", "requests"])
    parser.add_argument("--size", type=int, default=SIZE, help="answers")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--fault", type=float, default=FAULT_SECONDS, metavar="SECONDS", help="time between two faults")
    parser.add_argument("--hours", type=float, default=math.inf, help="end earlier than the size, after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan = Plan(options.kind, options.size, options.sessions, options.fault, options.seed, seconds=3600 * options.hours)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = run(plan, Path(folder), lambda line: print(line, flush=True))
    print(f"in {time.monotonic() - began:.0f} s: {dict(tally.counts)}")
    print(f"{tally.counts['wrong']} wrong" + "".join(f"\n  {fault}" for fault in tally.faults))
    return 1 if tally.counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
