"""Models loaded and unloaded by a running server, and load on it meanwhile, whose answers are kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from typing import Any

import pytest

from loadtest.callers import Caller, Target
from tests.serving import Server

TEXT = "how far is the sea ?"
CALLERS = 16
MEASURED_SECONDS = 1.5


def load(server: Server, name: str, *, status: int = 200, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server says to that."""
    config = {} if policy is None else {"parameters": {"config": json.dumps({"version_policy": policy})}}
    answer = server.client.post(f"/v2/repository/models/{name}/load", json=config)
    assert answer.status_code == status, answer.text
    said: dict[str, Any] = answer.json()
    return said


def unload(server: Server, name: str, *, status: int = 200) -> dict[str, Any]:
    answer = server.client.post(f"/v2/repository/models/{name}/unload")
    assert answer.status_code == status, answer.text
    said: dict[str, Any] = answer.json()
    return said


def answered(server: Server, model: str = "words", **options: Any) -> tuple[str, dict[str, float]]:
    """The version, and the scores of TEXT."""
    said = server.infer(model, [TEXT], **options)
    assert said.status_code == 200, said.text
    return said.json()["version"], said.json()["outputs"][0]["scores"]


class Load:
    """Requests for the newest version at a steady rate, and what came of them, by version."""

    def __init__(self, server: Server, model: str = "words") -> None:
        self._target = Target.of(server.address, "/infer")
        self._request = self._target.request(json.dumps({"model": model, "inputs": [TEXT]}).encode())
        self._free: list[Caller] = []
        self.answers: dict[str, list[bytes]] = {}
        self.failures: Counter[str] = Counter()
        self.ended = threading.Event()

    async def capacity(self) -> float:
        """Requests a second of callers who wait for their answers."""
        until, asked = time.monotonic() + MEASURED_SECONDS, 0

        async def keep_asking() -> None:
            nonlocal asked
            while time.monotonic() < until:
                await self._ask()
                asked += 1

        await asyncio.gather(*(keep_asking() for _ in range(CALLERS)))
        self._hang_up()
        return asked / MEASURED_SECONDS

    async def keep(self, rate: float) -> None:
        """Requests that are due at this rate, until `ended` is set."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as asking:
            for number in itertools.count():
                if self.ended.is_set():
                    break
                await asyncio.sleep(start + number / rate - time.monotonic())
                asking.create_task(self._ask())
        self._hang_up()

    async def _ask(self) -> None:
        caller = self._free.pop() if self._free else await Caller.connect(self._target)
        reply = await caller.ask(self._request)
        if reply.status == 200:
            said = json.loads(reply.body)
            self.answers.setdefault(said["version"], []).append(reply.body)
        else:
            self.failures[reply.body.decode()] += 1
        if caller.connected:
            self._free.append(caller)

    def _hang_up(self) -> None:
        while self._free:
            self._free.pop().hang_up()

    def check(self, expected: dict[str, dict[str, float]]) -> int:
        """Every request was answered as the version does that it names, whose scores are expected; returns how many there were."""
        assert not self.failures
        for version, bodies in self.answers.items():
            for body in set(bodies):
                assert json.loads(body)["outputs"][0]["scores"] == pytest.approx(expected[version], abs=1e-5)
        return sum(map(len, self.answers.values()))
