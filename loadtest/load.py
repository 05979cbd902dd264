"""A closed loop on one server, for connections of every kind: each caller waits for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.callers import Connectable, Connection, Response
from loadtest.generator.readers import refusal

GRACE_SECONDS = 10.0
"""Time for the requests that are open at the end."""
RETRY_SECONDS = 0.1
"""Pause of a caller after a broken connection."""


@dataclass(slots=True)
class Figures:
    """Results of a load: its duration in seconds, the seconds of each answer with status 200, and the reasons of failures."""

    seconds: float = 0.0
    answers: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.answers) / self.seconds if self.seconds else 0.0

    def quantile(self, share: float) -> float:
        """Return the time in seconds within which this share of the answers arrived, or NaN without answers."""
        return nearest_rank(sorted(self.answers), share) if self.answers else math.nan

    def count(self, reply: Response, seconds: float) -> None:
        if reply.status == 200:
            self.answers.append(seconds)
        else:
            self.failures[refusal(reply.status, reply.body)] += 1


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered values that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def closed(target: Connectable, requests: Iterator[bytes], callers: int, seconds: float) -> Figures:
    """Run a fixed number of callers. A caller sends its next request after its answer."""
    load = _Load(target, requests)
    await load.connect(callers)
    end = time.monotonic() + seconds

    async def keep_asking() -> None:
        while (start := time.monotonic()) < end:
            await load.ask(start)

    return await load.run(asyncio.gather(*(keep_asking() for _ in range(callers))), seconds)


class _Load:
    """A pool of idle connections, and the figures of the requests."""

    def __init__(self, target: Connectable, requests: Iterator[bytes]) -> None:
        self._target = target
        self._requests = requests
        self._idle: list[Connection] = []
        self.figures = Figures()

    async def connect(self, callers: int) -> None:
        self._idle += await asyncio.gather(*(self._target.connect() for _ in range(callers)))

    async def ask(self, start: float) -> None:
        """Send one request. Its latency starts at `start`."""
        caller = None
        try:
            caller = self._take_idle() or await self._target.connect()
            reply = await caller.ask(next(self._requests))
        except OSError as error:
            self.figures.failures[type(error).__name__] += 1
            await asyncio.sleep(RETRY_SECONDS)
        except asyncio.CancelledError:
            self.figures.failures["unanswered"] += 1
            if caller is not None:
                caller.hang_up()
            raise
        else:
            self.figures.count(reply, time.monotonic() - start)
            if caller.connected:
                self._idle.append(caller)

    def _take_idle(self) -> Connection | None:
        """Return an idle connection. Connections that the server has closed are dropped."""
        while self._idle:
            if (caller := self._idle.pop()).connected:
                return caller
        return None

    async def run(self, work: asyncio.Future[Any], seconds: float) -> Figures:
        """Wait for the work, at most GRACE_SECONDS longer than `seconds`."""
        start = time.monotonic()
        await asyncio.wait((work,), timeout=seconds + GRACE_SECONDS)
        self.figures.seconds = time.monotonic() - start
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        for caller in self._idle:
            caller.hang_up()
        return self.figures
