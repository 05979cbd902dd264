"""Load on one server. In a closed loop, each caller waits for its answer; in an open loop, requests are sent when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.callers import Connectable, Connection, Response

GRACE_SECONDS = 10.0
"""Time for the requests that are open at the end."""
MAX_OPEN = 2000
"""Open requests of an open loop. A request that is due beyond this limit fails: no server could answer it in time."""
PROGRESS_SECONDS = 1.0
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
            self.failures[reason(reply)] += 1


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered values that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


Watch = Callable[[Figures], None]
"""Called every second with the figures so far."""


async def closed(target: Connectable, requests: Iterator[bytes], callers: int, seconds: float, watch: Watch) -> Figures:
    """Run a fixed number of callers. A caller sends its next request after its answer."""
    load = _Load(target, requests)
    await load.connect(callers)
    end = time.monotonic() + seconds

    async def keep_asking() -> None:
        while (start := time.monotonic()) < end:
            await load.ask(start)

    return await load.run(asyncio.gather(*(keep_asking() for _ in range(callers))), seconds, watch)


async def opened(
    target: Connectable, requests: Iterator[bytes], gaps: Iterator[float], seconds: float, watch: Watch
) -> Figures:
    """Send requests `gaps` seconds apart. The latency of a request starts at the time when it is due."""
    load = _Load(target, requests)

    async def arrive() -> None:
        async with asyncio.TaskGroup() as tasks:
            for due in _due(gaps, time.monotonic(), seconds):
                await asyncio.sleep(due - time.monotonic())
                if load.open < MAX_OPEN:
                    tasks.create_task(load.ask(due))
                else:
                    load.figures.failures[f"not sent, {MAX_OPEN} are open"] += 1

    return await load.run(asyncio.ensure_future(arrive()), seconds, watch)


class _Load:
    """A pool of idle connections, and the figures of the requests."""

    def __init__(self, target: Connectable, requests: Iterator[bytes]) -> None:
        self._target = target
        self._requests = requests
        self._idle: list[Connection] = []
        self.figures = Figures()
        self.open = 0

    async def connect(self, callers: int) -> None:
        self._idle += await asyncio.gather(*(self._target.connect() for _ in range(callers)))

    async def ask(self, start: float) -> None:
        """Send one request. Its latency starts at `start`."""
        self.open += 1
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
        finally:
            self.open -= 1

    def _take_idle(self) -> Connection | None:
        """Return an idle connection. Connections that the server has closed are dropped."""
        while self._idle:
            if (caller := self._idle.pop()).connected:
                return caller
        return None

    async def run(self, work: asyncio.Future[Any], seconds: float, watch: Watch) -> Figures:
        """Wait for the work, at most GRACE_SECONDS longer than `seconds`."""
        start = time.monotonic()
        while not work.done() and time.monotonic() < start + seconds + GRACE_SECONDS:
            await asyncio.wait((work,), timeout=PROGRESS_SECONDS)
            self.figures.seconds = time.monotonic() - start
            watch(self.figures)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        for caller in self._idle:
            caller.hang_up()
        return self.figures


def _due(gaps: Iterator[float], start: float, seconds: float) -> Iterator[float]:
    """Yield due times on whole milliseconds: the event loop's timers are no finer, and would seem to delay answers."""
    at = start
    while (at := at + next(gaps)) < start + seconds:
        yield math.ceil(at * 1000) / 1000


def reason(reply: Response) -> str:
    """Return the status, and the error code where the body has one."""
    try:
        return f"{reply.status} {json.loads(reply.body)['code']}"
    except (ValueError, KeyError, TypeError):
        return str(reply.status)
