"""Mixed load with one fault in each cycle, and an account of every request: `python -m tests.long.soak --hours 8`.

In each cycle clients send requests over HTTP and gRPC, chunks of sessions, and chunks over WebSockets, while one fault happens. Then the
clients finish, the server must come to rest, and the memory, the descriptors and the threads of each process are sampled.

Every answer is known beforehand. A request is answered once, refused once, or cut off, and the last two only where the fault of its cycle
explains it; see EXCUSED in clients.py. A frontend that has ended cuts off its own connections and no others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

import httpx
import pytest
import uvloop

from loadtest.target import Target
from tests import models, planted
from tests.accumulator import Counts
from tests.callers import Caller
from tests.long.clients import CLIENTS, FAULTS, Ledger
from tests.long.environment import full_disk
from tests.reloading import load
from tests.serving import Server, alive, client_ports, eventually, serving
from tests.steady import Sample, Slope, growth, processes, sample

CALLERS = {"http": 6, "grpc": 4, "session": 6, "stream": 2}
FLAGS = ("--device", "cpu,cpu", "--frontends", "2")
"""Two processes of each role, so that one answers while the other is replaced."""
FULL_SECONDS = 2.0
HANG_UPS = 20
CYCLE_SECONDS = 60.0
FRESH = 4
"""This many new connections in a row reach a frontend that knows both engines, before processes end."""
LIMITS = {"bytes": 30.0, "descriptors": 1e-4, "threads": 1e-4}
"""What a process may gain with each request. The whole interval of confidence of a leak lies above it."""


# Faults.


class FaultInjector:
    """Applies one fault to a server."""

    def __init__(self, server: Server, models_folder: Path, ends: Path, chance: random.Random) -> None:
        """ends: the folder that tells processes to end."""
        self._server = server
        self._models = models_folder
        self._ends = ends
        self._chance = chance
        self._version = 1

    def inject(self, fault: str, ledger: Ledger) -> None:
        verb, _, role = fault.partition(" ")
        if verb in ("stop", "end"):
            self._replace(verb, ("engine", "frontend") if role == "both" else (role,), ledger)
        elif fault == "reload":
            self._reload()
        elif fault == "hang up":
            uvloop.run(_hang_up(Target.of(self._server.address, "/infer"), self._chance))
        elif fault == "full disk":
            with full_disk(processes(self._server).values()):
                self._reload()
                time.sleep(FULL_SECONDS)

    def _replace(self, verb: str, roles: Sequence[str], ledger: Ledger) -> None:
        """Stop one process of each role, or let it end at a point on the way of a request, and wait until others have replaced them."""
        eventually(self._complete)
        places = {role: self._chance.randrange(2) for role in roles}
        pids = {f"{role}-{place}": self._server.pid(f"{role}-{place}") for role, place in places.items()}
        spared = client_ports(self._server.pid(f"frontend-{1 - places['frontend']}")) if "frontend" in roles else set()
        ledger.engine_ends[places.get("engine", -1)] += 1
        for name, pid in pids.items():
            points = planted.POINTS if name.startswith("engine") else planted.FRONTEND_POINTS
            if verb == "stop":
                os.kill(pid, signal.SIGSTOP)
            else:
                (self._ends / "new").write_text(self._chance.choice(points))
                (self._ends / "new").rename(self._ends / str(pid))
        eventually(lambda: not any(map(alive, pids.values())))
        ledger.engine_ends[places.get("engine", -1)] += 1
        if wrongly := ledger.cut & spared:
            ledger.faults.append(f"{len(wrongly)} connections to a frontend that lived were cut off")
        eventually(self._complete)

    def _complete(self) -> bool:
        """Return whether all processes run and the frontends know both engines."""
        newest = {event["child"]: event["pid"] for event in self._server.events("started")}
        return all(map(alive, newest.values())) and all(self._knows_both() for _ in range(FRESH))

    def _knows_both(self) -> bool:
        try:
            listed = httpx.get(f"{self._server.address}/models", timeout=60, trust_env=False).json()["models"]
        except httpx.TransportError:
            return False
        return bool(listed) and listed[0]["device"] == "cpu, cpu"

    def _reload(self) -> None:
        """Replace the version by an equal version. Sessions keep the old version."""
        folder, before = self._models / "accumulator", self._version
        self._version += 1
        shutil.copytree(folder / "1", folder / str(self._version))
        load(self._server, "accumulator", policy={"specific": {"versions": [self._version]}})
        if before > 1:
            shutil.rmtree(folder / str(before))


async def _hang_up(target: Target, chance: random.Random) -> None:
    """Disconnect while requests run."""
    request = target.request(json.dumps({"model": "accumulator", "inputs": [[1] * 20_000]}).encode())
    for _ in range(HANG_UPS):
        caller = await Caller.connect(target)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(chance.uniform(0, 0.05)):
                await caller.ask(request)
        caller.hang_up()


# The soak.


class Soak:
    """Cycles of load with one fault each, on one server."""

    def __init__(self, server: Server, models_folder: Path, ends: Path, seed: int, crowd: int) -> None:
        """crowd: by how many the numbers of CALLERS are multiplied."""
        self._server = server
        self._crowd = crowd
        self._chance = random.Random(seed)
        self._injector = FaultInjector(server, models_folder, ends, self._chance)
        self._samples: list[dict[str, Sample]] = []
        self.ends: Counter[tuple[str, str]] = Counter()
        self.losses = 0

    def cycle(self, fault: str, seconds: float) -> list[str]:
        """Run a cycle with a fault in it. Returns the faults found."""
        ledger = Ledger()
        uvloop.run(self._load(ledger, fault, seconds))
        found = ledger.unexplained(fault) + self._rest()
        self.ends += ledger.ends
        self.losses += ledger.losses
        self._samples.append(sample(self._server, self.ends.total()))
        return found

    def run(
        self, seconds: float, cycle_seconds: float, show: Callable[[str], object], faults: Sequence[str] = FAULTS
    ) -> list[str]:
        """Run cycles for a number of seconds, each with the next fault. Returns the faults found, including growth."""
        until, found = time.monotonic() + seconds, list[str]()
        for number, fault in enumerate(cycle(faults)):
            if number and time.monotonic() >= until:
                break
            wrong = self.cycle(fault, cycle_seconds)
            found += wrong
            show(
                f"cycle {number}, {fault}: {self.ends.total()} requests so far{''.join(f'; WRONG: {each}' for each in wrong[:5])}"
            )
        for name, each in self.growth().items():
            show(f"{name} per request: {each.middle:.2g}, from {each.low:.2g} to {each.high:.2g}")
            if each.low > LIMITS[name.partition(" ")[2]]:
                found.append(f"{name} grows by {each.middle:.3g} per request")
        show(f"ends: {', '.join(f'{kind} {outcome} {count}' for (kind, outcome), count in sorted(self.ends.items()))}")
        return found

    def growth(self) -> dict[str, Slope]:
        return growth(self._samples)

    async def _load(self, ledger: Ledger, fault: str, seconds: float) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as running:
            for kind, count in CALLERS.items():
                for _ in range(self._crowd * count):
                    client = CLIENTS[kind](self._server, ledger, random.Random(self._chance.getrandbits(64)))
                    running.create_task(client.run(ended))
            until = time.monotonic() + seconds
            try:
                await asyncio.sleep(seconds * self._chance.uniform(0.2, 0.5))
                await asyncio.to_thread(self._injector.inject, fault, ledger)
                await asyncio.sleep(max(0.0, until - time.monotonic()))
            finally:
                ended.set()

    def _rest(self) -> list[str]:
        """Wait until the server holds nothing and runs all its processes. Returns the disagreements of its counts."""
        names = ("requests_in_flight", "queue_depth", "sequences_begun")
        eventually(lambda: self._server.ready() and not any(self._server.metric(f"seqserve_{name}") for name in names), 60)
        counts = Counts.of(self._server.scrape())
        if counts.accepted != counts.in_flight + counts.outcomes.total():
            return [f"the server accepted {counts.accepted} requests, and {counts.outcomes.total()} have an outcome"]
        return []


@contextmanager
def soaked(
    scratch: Path, faults: str = "", seed: int = 0, crowd: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Soak, Server]]:
    """Run a server for a soak. faults: planted in its processes besides the points at which they end."""
    root, ends = scratch / "models", scratch / "ends"
    ends.mkdir()
    models.accumulator(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENDS", str(ends))
        planted.plant(f"ends-anywhere,{faults}", patch)
        with serving(root, scratch, *FLAGS, **(settings or {})) as server:
            yield Soak(server, root, ends, seed, crowd), server


def main() -> int:
    """Return 0 when every request is accounted for and nothing grows."""
    parser = argparse.ArgumentParser(description="Mixed load with one fault a minute, and an account of every request.")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, soaked(Path(folder), seed=options.seed) as (soak, _):
        found = soak.run(3600 * options.hours, CYCLE_SECONDS, lambda line: print(line, flush=True))
    print(f"{len(found)} faults" + "".join(f"\n  {each}" for each in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
