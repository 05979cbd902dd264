"""A model with 1,000 open sessions is unloaded. Each session continues to its end, or reports once that it was unloaded."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from loadtest.target import Target
from tests import models
from tests.accumulator import NEW, Account, rests
from tests.callers import Caller
from tests.planted import constants
from tests.reloading import load, unload
from tests.serving import Server, eventually, serving

SESSIONS, CALLERS = 1000, 16
CHUNKS = 3
"""Chunks of a session after its model was unloaded, if it continues."""
PATIENT = {"session_idle_seconds": "3600"}


class Sessions:
    """Sessions with exact sums, which CALLERS clients continue. `outcomes` has the codes of each session's replies, in their order."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self._target = Target.of(server.address, "/infer")
        self._chance = chance
        self.accounts = {f"session {number}": NEW for number in range(SESSIONS)}
        self.outcomes: dict[str, list[str]] = {name: [] for name in self.accounts}

    async def each(self, count: int = 1, *, starts: bool = False, ends: bool = False) -> None:
        """Send `count` chunks of each session. The last chunk ends it if `ends` is true."""
        names = iter(list(self.accounts))

        async def call() -> None:
            caller = await Caller.connect(self._target)
            for name in names:
                for number in range(count):
                    await self._chunk(caller, name, starts=starts, ends=ends and number == count - 1)
            caller.hang_up()

        async with asyncio.TaskGroup() as calls:
            for _ in range(CALLERS):
                calls.create_task(call())

    async def _chunk(self, caller: Caller, name: str, *, starts: bool, ends: bool) -> None:
        values = self._chance.choices((-1, 0, 1), k=self._chance.randint(1, 5))
        body = {
            "model": "accumulator",
            "session": name,
            "start": starts,
            "end": ends,
            "inputs": [[value + 1 for value in values]],
        }
        reply = await caller.ask(self._target.request(json.dumps(body).encode()))
        said = json.loads(reply.body)
        self.outcomes[name].append("ok" if reply.status == 200 else said["code"])
        if reply.status == 200:
            self.accounts[name] = self.accounts[name].plus(values)
            assert Account.told(said["outputs"][0]["value"]) == self.accounts[name], name

    def counted(self) -> Counter[tuple[str, ...]]:
        """Return the number of sessions by their replies, and forget the replies."""
        counted = Counter(map(tuple, self.outcomes.values()))
        self.outcomes = {name: [] for name in self.accounts}
        return counted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.accumulator(tmp_path / "models")
    models.words(tmp_path / "models")
    return tmp_path / "models"


def test_1000_sessions_go_on_to_their_end(folder: Path, tmp_path: Path) -> None:
    """The model is unloaded between two chunks of some sessions, and during a chunk of others."""
    with constants({"service.supervisor.reload.UNLOAD_SECONDS": 3600}), serving(folder, tmp_path, **PATIENT) as server:
        sessions = Sessions(server, random.Random(0))

        async def go_on() -> None:
            await sessions.each(starts=True)
            unloading = asyncio.create_task(asyncio.to_thread(unload, server, "accumulator"))
            await sessions.each(CHUNKS)
            await unloading
            assert not server.events("unloaded")
            await sessions.each(ends=True)

        uvloop.run(go_on())
        assert sessions.counted() == {("ok",) * (CHUNKS + 2): SESSIONS}
        eventually(lambda: server.events("unloaded") and rests(server))


def test_1000_sessions_report_their_end_once(folder: Path, tmp_path: Path) -> None:
    """Another version replaces the version of the sessions. The chunk after the report finds no session."""
    with constants({"service.supervisor.reload.UNLOAD_SECONDS": 0.1}), serving(folder, tmp_path, **PATIENT) as server:
        sessions = Sessions(server, random.Random(0))
        uvloop.run(sessions.each(starts=True))
        assert sessions.counted() == {("ok",): SESSIONS}
        shutil.copytree(folder / "accumulator" / "1", folder / "accumulator" / "2")
        load(server, "accumulator", policy={"latest": {"num_versions": 1}})
        eventually(lambda: server.events("unloaded"))
        uvloop.run(sessions.each(count=2))
        assert sessions.counted() == {("session_lost", "unknown_session"): SESSIONS}
        assert server.metric("seqserve_sessions_ended_total", reason="unloaded") == SESSIONS
        eventually(lambda: rests(server))
