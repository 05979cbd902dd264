"""Kills engines and replaces model versions, and records which errors this explains."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.long.endurance.load import Tally
from tests.reloading import load
from tests.serving import Server, eventually

ENGINES = 2
START_SECONDS = 600.0
"""Longest start of an engine, on a machine that is busy with the load."""


@dataclass
class Kill:
    """An engine that was killed. A request that was sent before the frontends noticed it may have been in that engine."""

    place: int
    began: float
    noticed: float = math.inf


@dataclass
class Explained:
    """The errors that the faults so far explain. unload_seconds: how long a replaced version still serves its sessions."""

    unload_seconds: float
    kills: list[Kill] = field(default_factory=list)
    replaced: dict[str, float] = field(default_factory=dict)
    """When each version was replaced."""

    def may_be_in_a_killed_engine(self, place: int, sent: float) -> bool:
        """Return whether a request that is answered now, and was sent then, may have been in an engine that was killed."""
        return any(kill.place == place and sent <= kill.noticed for kill in self.kills[-ENGINES:])

    def refused(self) -> None:
        """Note that a frontend has refused a session's chunk because its engine has ended: it has noticed."""
        if self.kills:
            self.kills[-1].noticed = min(self.kills[-1].noticed, time.monotonic())

    def unloaded(self, version: str) -> bool:
        """Return whether the sessions of a version may have ended with it."""
        return time.monotonic() - self.replaced.get(version, math.inf) >= self.unload_seconds


class Faults:
    """Kills engines in turn, and replaces the versions of the accumulator in between.

    on_kill: called right after an engine was killed, with its place.
    """

    def __init__(
        self, server: Server, models_folder: Path, explained: Explained, tally: Tally, on_kill: Callable[[int], None]
    ) -> None:
        self._server = server
        self._folder = models_folder / "accumulator"
        self._explained = explained
        self._tally = tally
        self._version = 1
        self._on_kill = on_kill

    async def run(self, every_seconds: float) -> None:
        """Inject a fault every `every_seconds` until the task is cancelled."""
        number = 0
        while True:
            await asyncio.sleep(every_seconds)
            if number % (ENGINES + 1) < ENGINES:
                await self._kill(number % (ENGINES + 1))
            else:
                await asyncio.to_thread(self._replace_version)
            number += 1

    async def _kill(self, place: int) -> None:
        name = f"engine-{place}"
        pid = await asyncio.to_thread(self._server.pid, name)
        kill = Kill(place, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        self._explained.kills.append(kill)
        self._on_kill(place)
        self._tally.counts["kills"] += 1
        await asyncio.to_thread(eventually, lambda: self._server.pid(name) != pid and self._whole(), START_SECONDS)
        kill.noticed = min(kill.noticed, time.monotonic())

    def _whole(self) -> bool:
        """Return whether all engines serve."""
        models = self._server.client.get("/models")
        return models.status_code == 200 and len(models.json()["models"][0]["device"].split(", ")) == ENGINES

    def _replace_version(self) -> None:
        """Replace the version by an equal version. Sessions keep the old version for a while."""
        before, self._version = self._version, self._version + 1
        shutil.copytree(self._folder / str(before), self._folder / str(self._version))
        self._explained.replaced[str(before)] = time.monotonic()
        load(self._server, "accumulator", policy={"specific": {"versions": [self._version]}})
        self._tally.counts["reloads"] += 1
