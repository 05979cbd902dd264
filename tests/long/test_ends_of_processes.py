"""200 ends of engines and frontends under load, each at a random point on the way of a request.

Requests without a session are answered through every end of an engine. A killed frontend cuts off its own connections and no others. A
session on an engine that ended reports its loss once.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from service.ipc.session_placement import engine_of_session
from tests import models, planted
from tests.accumulator import NEW, Account
from tests.long.soak import CUT, FLAGS, Client, GrpcClient, HttpClient, Ledger
from tests.serving import Server, alive, client_ports, eventually, idle, serving
from tests.steady import open_files

ENDS = 200
CALLERS = {"http": 4, "grpc": 2, "session": 6}
PAUSE_SECONDS = 0.05
"""Between two requests of a client: processes that start need the processor too."""
MOST_STEPS = 1000
"""A session with more steps is left. Its sums are exact for a few thousand."""
RECONNECTS = 0.05
"""Share of the requests after which a client connects again: a frontend that has restarted gets connections too."""
FRESH = 4
"""This many new connections in a row reach a frontend that knows both engines, before the next processes end."""
EXPECTED = {
    "http": {"ok", CUT},
    "grpc": {"ok", "UNAVAILABLE"},
    "session": {"ok", CUT, "engine_lost", "session_lost", "unknown_session"},
}
"""The ends of requests. Only a killed frontend explains CUT and gRPC's UNAVAILABLE, and only a killed engine the others."""


class Watched(Ledger):
    """A ledger that also knows which connections were cut off, and which engines have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[int] = set()
        """The clients' ports of connections that were cut off."""
        self.engine_ends = Counter[int]()
        """Rises for each engine when its end is near, and when it has ended."""
        self.losses = 0

    def unexpected(self) -> list[str]:
        """Return the faults."""
        return [
            *self.faults,
            *[f"{count} {kind} {end}" for (kind, end), count in self.ends.items() if end not in EXPECTED[kind]],
        ]


class WatchedHttpClient(HttpClient):
    """Notes the connections that were cut off. `outcomes` has the outcome of each request."""

    def __init__(self, server: Server, ledger: Watched, chance: random.Random) -> None:
        super().__init__(server, ledger, chance)
        self.watched = ledger
        self.outcomes: list[str] = []

    async def _send(self, body: dict[str, Any]) -> tuple[str, Account | None]:
        try:
            outcome, told = await super()._send(body)
        except OSError:
            self.outcomes.append(CUT)
            self.watched.cut.add(self._port)
            raise
        self.outcomes.append(outcome)
        await asyncio.sleep(PAUSE_SECONDS)
        if self._caller is not None and self._chance.random() < RECONNECTS:
            self._caller.hang_up()
        return outcome, told

    @property
    def _port(self) -> int:
        return 0 if self._caller is None else self._caller.port


class PausingGrpcClient(GrpcClient):
    async def story(self) -> None:
        await super().story()
        await asyncio.sleep(PAUSE_SECONDS)


class SessionClient(WatchedHttpClient):
    """One session after another. Each continues until its engine ends, or until a frontend that has its chunk ends.

    After the end of its engine it reports the loss once, and then it is unknown.
    """

    kind = "session"

    async def story(self) -> None:
        name, self._account = f"{self._chance.getrandbits(64):x}", NEW
        place = engine_of_session(name, 2)
        ends = self.watched.engine_ends[place]
        first = len(self.outcomes)
        while await self._chunk(name) == "ok":
            if self._account.steps > MOST_STEPS:
                return
        if self._account != NEW and await self._patient_end(name) != CUT:
            if self.outcomes[-1] != "session_lost" or self.watched.engine_ends[place] == ends:
                self.watched.wrong(f"session {name} on engine {place} ended with {self.outcomes[first:][-5:]}")
            self.watched.losses += 1
            await self._check_forgotten(name, place)

    async def _check_forgotten(self, name: str, place: int) -> None:
        """Check that a session whose loss was reported is unknown.

        A chunk that its engine had when it ended reports a loss again: the next engine cannot know of the first report. The engine may
        have ended as soon as it had reported the loss, and a frontend may send it a chunk before it notices the end.
        """
        reported = self._ends_before
        await self._chunk(name)
        end = await self._patient_end(name)
        if end == "session_lost" and self.watched.engine_ends[place] > reported:
            await self._check_forgotten(name, place)
        elif end not in ("unknown_session", CUT):
            self.watched.wrong(f"session {name} was not forgotten: {self.outcomes[-5:]}")

    async def _patient_end(self, name: str) -> str:
        """Return the last outcome, once the engine of the session has restarted."""
        while self.outcomes[-1] == "engine_lost":
            await asyncio.sleep(PAUSE_SECONDS)
            await self._chunk(name)
        return self.outcomes[-1]

    async def _chunk(self, name: str) -> str:
        """Send a chunk, and return its outcome."""
        values = self.values()
        expected = self._account.plus(values)
        self._ends_before = self.watched.engine_ends[engine_of_session(name, 2)]
        body = {"model": "accumulator", "session": name, "inputs": [[value + 1 for value in values]]}
        if await self.ask(lambda: self._send(body | {"start": self._account == NEW}), expected, name):
            self._account = expected
        return self.outcomes[-1]


CLIENTS: dict[str, type[Client]] = {"http": WatchedHttpClient, "grpc": PausingGrpcClient, "session": SessionClient}


class Ends:
    """Ends one engine and one frontend in each round, each at a random point. The other engine and the other frontend keep running."""

    def __init__(self, server: Server, folder: Path, ledger: Watched, chance: random.Random) -> None:
        self._server = server
        self._folder = folder
        self._ledger = ledger
        self._chance = chance
        self.points: Counter[str] = Counter()

    def round(self, roles: Iterable[str] = ("engine", "frontend")) -> None:
        eventually(self._complete)
        places = {role: self._chance.randrange(2) for role in roles}
        pids = {role: self._server.pid(f"{role}-{place}") for role, place in places.items()}
        spared = client_ports(self._server.pid(f"frontend-{1 - places.get('frontend', 0)}"))
        self._ledger.cut.clear()
        self._ledger.engine_ends[places["engine"]] += 1
        for role, pid in pids.items():
            point = self._chance.choice(planted.POINTS if role == "engine" else planted.FRONTEND_POINTS)
            (self._folder / f"{pid}.new").write_text(point)
            (self._folder / f"{pid}.new").rename(self._folder / str(pid))
            self.points[f"{role} {point}"] += 1
        eventually(lambda: not any(map(alive, pids.values())))
        self._ledger.engine_ends[places["engine"]] += 1
        if wrongly := self._ledger.cut & spared:
            self._ledger.wrong(f"{len(wrongly)} connections to a frontend that lived were cut off")

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


async def load(server: Server, ledger: Watched, ends: Ends, rounds: int, roles: Iterable[str], chance: random.Random) -> None:
    """Send requests while processes end."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as running:
        for kind, count in CALLERS.items():
            for _ in range(count):
                running.create_task(CLIENTS[kind](server, ledger, random.Random(chance.getrandbits(64))).run(ended))
        try:
            for _ in range(rounds):
                await asyncio.to_thread(ends.round, roles)
                if ledger.unexpected():
                    break
            await asyncio.to_thread(eventually, ends._complete)
        finally:
            ended.set()


@contextmanager
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """A server of two engines and two frontends, and the folder that tells where its processes end."""
    folder = tmp_path / "ends"
    folder.mkdir()
    monkeypatch.setenv("ENDS", str(folder))
    planted.plant("ends-anywhere", monkeypatch)
    models.accumulator(tmp_path / "models")
    with serving(tmp_path / "models", tmp_path, *FLAGS) as server:
        yield server, folder


def children(pid: int) -> int:
    """Return the number of child processes, zombies included."""
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def test_200_ends_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with started(tmp_path, monkeypatch) as (server, folder):
        ledger, chance = Watched(), random.Random(0)
        ends = Ends(server, folder, ledger, chance)
        eventually(lambda: ends._complete() and idle(server))
        files, processes = open_files(server)["supervisor"], children(server.process.pid)
        began = time.monotonic()
        uvloop.run(load(server, ledger, ends, ENDS // 2, ("engine", "frontend"), chance))
        with capsys.disabled():
            print(f"\n{time.monotonic() - began:.0f} s, {ledger.losses} sessions lost, {json.dumps(dict(ends.points))}")
            print(", ".join(f"{kind} {end} {count}" for (kind, end), count in sorted(ledger.ends.items())))
        assert not ledger.unexpected(), ledger.unexpected()[:5]
        assert ledger.sent == ledger.ends.total()
        assert ends.points.total() == ENDS and len(server.events("child ended")) == ENDS
        assert ledger.losses
        eventually(lambda: idle(server) and open_files(server)["supervisor"] == files)
        assert children(server.process.pid) == processes
