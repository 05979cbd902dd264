"""Sessions under long load: random events in an engine, exact sums of many clients, clients that hang up, and versions that go."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from websockets.asyncio.client import connect

from loadtest.target import Target
from tests import models
from tests.accumulator import NEW, REST_SECONDS, Account, at_rest, rests, watch
from tests.callers import Caller
from tests.engine.batching.story import tell_story
from tests.long import scaled
from tests.planted import constants
from tests.reloading import load, unload
from tests.serving import Server, eventually, serving
from tests.steady import open_files

EVENTS, EVENTS_OF_A_STORY = 1_000_000, 200
WAVE = 400
"""Clients that hang up."""
SESSIONS, CONNECTIONS, CHUNKS = 1000, 16, 3
"""Sessions of a model that is unloaded, their connections, and chunks of each after that."""

Show = Callable[[object], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.accumulator(tmp_path / "models")
    return tmp_path / "models"


def test_million_events_keep_states_and_sums_of_sessions() -> None:
    for seed in range(scaled(EVENTS / EVENTS_OF_A_STORY)):
        tell_story(seed, EVENTS_OF_A_STORY)


# Clients that hang up.


class Rude(Caller):
    """A client that resets its connection instead of closing it."""

    def hang_up(self) -> None:
        if self._transport is not None:
            own = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        super().hang_up()


def rows(steps: int) -> list[list[float]]:
    return np.random.default_rng(steps).normal(size=(steps, 3)).round(2).tolist()  # type: ignore[no-any-return]


async def leave(target: Target, request: bytes, seconds: float, chance: random.Random) -> int:
    """Disconnect after `seconds`. Returns the status of a reply before that, or 0."""
    caller = await chance.choice((Caller, Rude)).connect(target)
    try:
        async with asyncio.timeout(seconds):
            return (await caller.ask(request)).status
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        caller.hang_up()


async def leave_stream(target: Target, seconds: float, chance: random.Random) -> int:
    """Abort a WebSocket with chunks in flight."""
    async with connect(f"ws://{target.host}:{target.port}/stream?model=sensors", proxy=None, open_timeout=60) as stream:
        for _ in range(chance.randint(1, 4)):
            await stream.send(np.zeros((chance.randint(1, 4000), 3), np.float32).tobytes())
        await asyncio.sleep(seconds)
        stream.transport.abort()
    return 0


async def wave(target: Target, requests: Sequence[bytes], chance: random.Random) -> Counter[int]:
    """Send requests whose clients disconnect, and return the statuses of early replies. Scrapes must account for every request."""
    going = []
    for number in range(WAVE):
        seconds = chance.uniform(0.01, 1.5)
        if number % 5 == 0:
            going.append(leave_stream(target, seconds, chance))
            continue
        request = chance.choice(requests)
        # One in four before the body is whole, or even its head.
        cut = chance.choice((chance.randint(1, len(request) - 1), chance.randint(1, 100))) if number % 4 == 0 else len(request)
        going.append(leave(target, request[:cut], seconds, chance))
    ended = asyncio.Event()
    watching = asyncio.ensure_future(watch(target, ended))
    try:
        return Counter(await asyncio.gather(*going))
    finally:
        ended.set()
        await watching


def test_disconnected_clients_leave_nothing_behind(folder: Path, tmp_path: Path, show: Show) -> None:
    """Some race with their deadline, or with their answer."""
    models.sensors(folder, hidden=64)
    models.sensors(folder, "both", bidirectional=True, hidden=64)
    options: list[dict[str, Any]] = [{}, {}, {}, {"deadline_ms": 100}, {"deadline_ms": 700}, {"session": "left"}]
    bodies = [{"model": "sensors", "inputs": [rows(2000 + 200 * seed)], **option} for seed, option in enumerate(options)]
    bodies += [{"model": "accumulator", "inputs": [[1] * 20_000], **option} for option in options[:-1] * 2]
    bodies += [{"model": "both", "inputs": [rows(1500)], **option} for option in options[:-1]]
    with serving(folder, tmp_path) as server:
        at_rest(server)
        target, files = Target.of(server.address, "/infer"), open_files(server)
        requests = [target.request(json.dumps(body).encode()) for body in bodies]
        statuses = uvloop.run(wave(target, requests, random.Random(0)))
        show(dict(statuses))
        assert statuses.keys() <= {0, 200, 409, 503, 504}, statuses
        # Only the session with this name outlives its clients.
        eventually(lambda: server.client.delete("/sessions/left/state") and rests(server), REST_SECONDS)
        assert server.infer("sensors", [rows(3)]).status_code == 200
        at_rest(server).check()
        eventually(lambda: open_files(server) == files, REST_SECONDS)
        assert all(server.metric("seqserve_cancelled_total", **{"while": where}) for where in ("waiting", "running"))


# A model that is unloaded while it has sessions.


class Sessions:
    """Sessions with exact sums, which CONNECTIONS clients continue. `outcomes` has the codes of each session's replies, in their order."""

    def __init__(self, server: Server) -> None:
        self._target = Target.of(server.address, "/infer")
        self._chance = random.Random(0)
        self._accounts = {f"session {number}": NEW for number in range(SESSIONS)}
        self._outcomes: dict[str, list[str]] = {name: [] for name in self._accounts}

    async def each(self, count: int = 1, *, starts: bool = False, ends: bool = False) -> None:
        """Send `count` chunks of each session. The last chunk ends it if `ends` is true."""
        names = iter(list(self._accounts))

        async def call() -> None:
            caller = await Caller.connect(self._target)
            for name in names:
                for number in range(count):
                    await self._chunk(caller, name, {"start": starts, "end": ends and number == count - 1})
            caller.hang_up()

        async with asyncio.TaskGroup() as calls:
            for _ in range(CONNECTIONS):
                calls.create_task(call())

    async def _chunk(self, caller: Caller, name: str, flags: dict[str, bool]) -> None:
        values = self._chance.choices((-1, 0, 1), k=self._chance.randint(1, 5))
        body = {"model": "accumulator", "session": name, "inputs": [[value + 1 for value in values]], **flags}
        reply = await caller.ask(self._target.request(json.dumps(body).encode()))
        said = json.loads(reply.body)
        self._outcomes[name].append("ok" if reply.status == 200 else said["code"])
        if reply.status == 200:
            self._accounts[name] = self._accounts[name].plus(values)
            assert Account.told(said["outputs"][0]["value"]) == self._accounts[name], name

    def counted(self) -> Counter[tuple[str, ...]]:
        """Return the number of sessions by their replies, and forget the replies."""
        counted = Counter(map(tuple, self._outcomes.values()))
        self._outcomes = {name: [] for name in self._accounts}
        return counted


@pytest.fixture(params=[3600.0, 0.1], ids=["patient", "impatient"])
def unloading(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[tuple[Server, bool]]:
    """A server, and whether a version that is unloaded waits for its sessions."""
    unload_seconds = constants({"service.supervisor.reload.UNLOAD_SECONDS": request.param})
    with unload_seconds, serving(folder, tmp_path, session_idle_seconds="3600") as server:
        yield server, request.param > 1


def test_1000_sessions_go_on_to_their_end_or_report_it_once(unloading: tuple[Server, bool], folder: Path) -> None:
    """The model is unloaded between two chunks of some sessions and during a chunk of others; or another version replaces theirs."""
    server, patient = unloading
    sessions = Sessions(server)

    async def go_on() -> None:
        await sessions.each(starts=True)
        unloading = asyncio.create_task(asyncio.to_thread(unload, server, "accumulator"))
        await sessions.each(CHUNKS)
        await unloading
        assert not server.events("unloaded")
        await sessions.each(ends=True)

    if patient:
        uvloop.run(go_on())
        assert sessions.counted() == {("ok",) * (CHUNKS + 2): SESSIONS}
        eventually(lambda: server.events("unloaded") and rests(server))
        return
    uvloop.run(sessions.each(starts=True))
    assert sessions.counted() == {("ok",): SESSIONS}
    shutil.copytree(folder / "accumulator" / "1", folder / "accumulator" / "2")
    load(server, "accumulator", policy={"latest": {"num_versions": 1}})
    eventually(lambda: server.events("unloaded"))
    uvloop.run(sessions.each(count=2))
    assert sessions.counted() == {("session_lost", "unknown_session"): SESSIONS}
    assert server.metric("seqserve_sessions_ended_total", reason="unloaded") == SESSIONS
    eventually(lambda: rests(server))
