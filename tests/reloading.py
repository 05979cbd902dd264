"""Load and unload models of a running server, and record its replies under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.target import Target
from tests.callers import Caller
from tests.serving import Server

TEXT = "how far is the sea ?"
CALLERS = 16
MEASURED_SECONDS = 1.5


def load(server: Server, name: str, *, status: int = 200, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load a model and return the reply."""
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
    """Return the version that answers, and the scores of TEXT."""
    said = server.infer(model, [TEXT], **options)
    assert said.status_code == 200, said.text
    return said.json()["version"], said.json()["outputs"][0]["scores"]


class Load:
    """Clients that send requests for the newest version at a steady rate, and their replies by version.

    Each client waits for its reply, so slow replies lower the rate, and there are never more open requests than clients.
    """

    def __init__(self, server: Server, model: str = "words") -> None:
        self._target = Target.of(server.address, "/infer")
        self._request = self._target.request(json.dumps({"model": model, "inputs": [TEXT]}).encode())
        self.answers: dict[str, list[bytes]] = {}
        self.failures: Counter[str] = Counter()
        self.ended = threading.Event()

    async def capacity(self) -> float:
        """Return the requests per second of clients that never pause."""
        asyncio.get_running_loop().call_later(MEASURED_SECONDS, self.ended.set)
        await self.keep(math.inf)
        return sum(map(len, self.answers.values())) / MEASURED_SECONDS

    async def keep(self, rate: float) -> None:
        """Send requests at this rate until `ended` is set."""
        start, numbers = time.monotonic(), itertools.count()
        async with asyncio.TaskGroup() as asking:
            for _ in range(CALLERS):
                asking.create_task(self._ask_each(start + number / rate for number in numbers))

    async def _ask_each(self, moments: Iterator[float]) -> None:
        """Send requests at these moments over one connection."""
        caller = await Caller.connect(self._target)
        for due in moments:
            await asyncio.sleep(due - time.monotonic())
            if self.ended.is_set():
                break
            reply = await caller.ask(self._request)
            if reply.status == 200:
                said = json.loads(reply.body)
                self.answers.setdefault(said["version"], []).append(reply.body)
            else:
                self.failures[reply.body.decode()] += 1
        caller.hang_up()

    def check(self, expected: dict[str, dict[str, float]]) -> int:
        """Check that each reply has the scores of its version. Returns the number of replies."""
        assert not self.failures
        for version, bodies in self.answers.items():
            for body in set(bodies):
                assert json.loads(body)["outputs"][0]["scores"] == pytest.approx(expected[version], abs=1e-5)
        return sum(map(len, self.answers.values()))
