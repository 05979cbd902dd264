"""100 services get SIGTERM under load: each serves for its lame-duck time, loses nothing, and leaves nothing behind.

The device is planted: a batch takes a fixed time and no processor time. So the capacity of a service is known, and several services run
at once without taking it from each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from loadtest.generator.arrivals import poisson
from loadtest.target import Target
from tests import models, planted
from tests.accumulator import Account
from tests.callers import Caller
from tests.long.overload import LAGS, Lag
from tests.serving import Server, alive, descendants, eventually

STOPS, AT_ONCE = 100, 4
"""How many services are stopped, and how many of them run at the same time."""
BATCH = 4
RATE = 0.7 * BATCH / planted.DEVICE_SECONDS
"""0.7 times the requests per second that the device of a service can take."""
LAME_DUCK_SECONDS, DRAIN_SECONDS = 2.0, 30.0
BEFORE = 20
"""How many requests a service has answered before the signal."""
READY_SECONDS, END_SECONDS = 0.05, 1.0
"""Time within which a service must report that it is not ready, and how much longer than DRAIN_SECONDS it may take to end."""
AGAIN_SECONDS = 0.1
"""Between two signals. A countdown that a signal restarts would never end."""
FRESH = 0.5
"""Share of the requests that open a connection."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Stop:
    """One stop, as clients saw it. until: the earliest end of the lame-duck time. late: requests after it that got no reply."""

    faults: list[str] = field(default_factory=list)
    until: float = float("inf")
    before: int = 0
    served: int = 0
    late: int = 0
    not_ready_seconds: float = 0.0
    lag: float = 0.0


class Clients:
    """Clients that send requests at random moments, over new connections and over connections that the service left open."""

    def __init__(self, server: Server, stop: Stop, chance: random.Random) -> None:
        self._target = Target.of(server.address, "/infer")
        self._stop = stop
        self._chance = chance
        self._idle: deque[Caller] = deque()
        self.refused = asyncio.Event()
        """Set when the port is closed."""

    async def run(self) -> None:
        """Send requests at RATE until the port is closed, and wait for their replies."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as requests:
            for gap in poisson(RATE, self._chance.getrandbits(32)):
                due += gap
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.refused.wait(), max(0.0, due - time.monotonic()))
                if self.refused.is_set():
                    break
                requests.create_task(self._request())
        for caller in self._idle:
            caller.hang_up()

    async def _request(self) -> None:
        """Send one request. A request that was sent before the end of the lame-duck time must be answered."""
        values = self._chance.choices((-1, 0, 1), k=8)
        body = {"model": "accumulator", "inputs": [[value + 1 for value in values]]}
        sent, caller = float("inf"), self._idle_caller()
        try:
            if caller is None:
                caller = await Caller.connect(self._target)
            asked = asyncio.ensure_future(caller.ask(self._target.request(json.dumps(body).encode())))
            await asyncio.sleep(0)  # the request is written now
            sent = time.monotonic()
            reply = await asked
        except OSError as error:
            if min(sent, time.monotonic()) < self._stop.until:
                self._stop.faults.append(f"no reply, {self._stop.until - time.monotonic():.2f} s before the end: {error!r}")
            self._stop.late += 1
            if isinstance(error, ConnectionRefusedError):
                self.refused.set()
            return
        if reply.status != 200 or Account.told(json.loads(reply.body)["outputs"][0]["value"]) != Account().plus(values):
            self._stop.faults.append(f"reply {reply.status} {reply.body.decode()}")
        elif self._stop.until == float("inf"):
            self._stop.before += 1
        else:
            self._stop.served += 1
        if caller.connected:
            self._idle.append(caller)

    def _idle_caller(self) -> Caller | None:
        """Return a connection that the service left open, None if a new connection is due."""
        fresh = self._chance.random() < FRESH
        while self._idle and not fresh:
            caller = self._idle.popleft()
            if caller.connected:
                return caller
        return None


async def signalled(server: Server, stop: Stop, clients: Clients, limit: float) -> None:
    """Send SIGTERM under load, and again until the service has ended."""
    while stop.before < BEFORE:
        await asyncio.sleep(0.01)
    pids = [server.process.pid, *descendants(server.process.pid)]
    began = time.monotonic()
    stop.until = began + LAME_DUCK_SECONDS
    server.process.terminate()
    stop.not_ready_seconds = await asyncio.to_thread(not_ready_after, server, began)
    while server.process.poll() is None and time.monotonic() - began < limit:
        await asyncio.sleep(AGAIN_SECONDS)
        server.process.terminate()
    clients.refused.set()
    ended = time.monotonic()
    status = server.process.poll()
    if status != 0:
        stop.faults.append(f"status {status} after {ended - began:.1f} s")
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() - ended < END_SECONDS + LAGS * stop.lag:
        await asyncio.sleep(0.01)
    if left:
        stop.faults.append(f"{len(left)} processes are left")


def not_ready_after(server: Server, began: float) -> float:
    """Return the seconds until neither the health port nor the main port reports that the service is ready."""
    for address in (server.health, server.address):
        with suppress(OSError):  # a port that is closed is not ready either
            while readiness(address) != 503:
                pass
    return time.monotonic() - began


def readiness(address: str) -> int:
    """Return the status of a check over a new connection."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", "/readyz")
    status = connection.getresponse().status
    connection.close()
    return status


async def stopped_under_load(server: Server, stop: Stop, seed: int, limit: float) -> None:
    clients = Clients(server, stop, random.Random(seed))
    async with asyncio.TaskGroup() as running:
        running.create_task(clients.run())
        running.create_task(signalled(server, stop, clients, limit))


def stopped(folder: Path, scratch: Path, seed: int, limit: float = DRAIN_SECONDS + LAME_DUCK_SECONDS, **settings: str) -> Stop:
    """Start a service, stop it under load, and return the observations of its clients."""
    settings = {"lame_duck_seconds": str(LAME_DUCK_SECONDS), "drain_seconds": str(DRAIN_SECONDS)} | settings
    server, stop = Server(folder, scratch, "--health-port", "0", max_batch_sequences=str(BATCH), **settings), Stop()
    with Lag() as lag:
        uvloop.run(stopped_under_load(server, stop, seed, limit))
    stop.lag = lag.worst
    server.stop()
    if server.events("bug"):
        stop.faults.append(server.log_file.read_text())
    if stop.not_ready_seconds > READY_SECONDS + LAGS * stop.lag:
        stop.faults.append(f"not ready after {stop.not_ready_seconds:.3f} s")
    if not stop.served:
        stop.faults.append("no request was answered after the signal")
    return stop


def unused_shared_memory() -> set[str]:
    """Return the names of shared memory that no process has open or mapped."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to another user
            used |= {str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()}
            used |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
    return {str(file) for file in SHARED_MEMORY.iterdir()} - used


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder, whose services compute on the planted device."""
    planted.plant("slow-device", monkeypatch)
    models.accumulator(tmp_path / "models")
    return tmp_path / "models"


def test_100_stops_under_load_lose_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, began = unused_shared_memory(), time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stops = list(pool.map(lambda seed: stopped(folder, tmp_path, seed), range(STOPS)))
    not_ready = sorted(stop.not_ready_seconds for stop in stops)
    with capsys.disabled():
        print(
            f"\n{STOPS} stops in {time.monotonic() - began:.0f} s: {sum(stop.before for stop in stops)} requests answered before the "
            f"signal and {sum(stop.served for stop in stops)} after it, {sum(stop.late for stop in stops)} came after the end; not "
            f"ready after {1000 * statistics.median(not_ready):.0f} ms, at most {1000 * not_ready[-1]:.0f} ms; lag at most "
            f"{1000 * max(stop.lag for stop in stops):.0f} ms"
        )
    assert [fault for stop in stops for fault in stop.faults] == []
    eventually(lambda: unused_shared_memory() <= before)
