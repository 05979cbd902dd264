"""Load on one server, and what came of it: closed loops, in which each caller waits for its answer, and open ones, in which
requests arrive when they are due, whatever became of those before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.callers import Connection, Reachable, Reply

PATIENCE_SECONDS = 10.0
"""Requests that are open at the end may take this much longer."""
MOST_OPEN = 2000
"""An open loop has at most this many requests open; what is due beyond has failed, as nobody could answer it in time."""
PROGRESS_SECONDS = 1.0
RETRY_SECONDS = 0.1
"""A caller whose connection broke waits this long before it tries again."""


@dataclass(slots=True)
class Figures:
    """What came of one stretch of load: seconds that it took, seconds of each answer with 200, and why others failed."""

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
        """The time, in seconds, within which this share of the answers came; NaN when there was none."""
        ordered = sorted(self.answers)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

    def count(self, reply: Reply, seconds: float) -> None:
        if reply.status == 200:
            self.answers.append(seconds)
        else:
            self.failures[reason(reply)] += 1


Watch = Callable[[Figures], None]
"""Hears every second how far a stretch of load has come."""


async def closed(target: Reachable, requests: Iterator[bytes], callers: int, seconds: float, watch: Watch) -> Figures:
    """A fixed number of callers, each of whom sends its next request when it has its answer."""
    load = _Load(target, requests)
    await load.connect(callers)
    until = time.monotonic() + seconds

    async def keep_asking() -> None:
        while (start := time.monotonic()) < until:
            await load.ask(start)

    return await load.run(asyncio.gather(*(keep_asking() for _ in range(callers))), seconds, watch)


async def opened(target: Reachable, requests: Iterator[bytes], gaps: Iterator[float], seconds: float, watch: Watch) -> Figures:
    """Requests that arrive `gaps` seconds after one another; each one's time runs from the moment when it was due."""
    load = _Load(target, requests)

    async def arrive() -> None:
        async with asyncio.TaskGroup() as asking:
            for due in _due(gaps, time.monotonic(), seconds):
                await asyncio.sleep(due - time.monotonic())
                if load.open < MOST_OPEN:
                    asking.create_task(load.ask(due))
                else:
                    load.figures.failures[f"not sent, {MOST_OPEN} are open"] += 1

    return await load.run(asyncio.ensure_future(arrive()), seconds, watch)


class _Load:
    """One stretch of load: connections that are free, and what came of those that were used."""

    def __init__(self, target: Reachable, requests: Iterator[bytes]) -> None:
        self._target = target
        self._requests = requests
        self._free: list[Connection] = []
        self.figures = Figures()
        self.open = 0

    async def connect(self, callers: int) -> None:
        self._free += await asyncio.gather(*(self._target.connect() for _ in range(callers)))

    async def ask(self, start: float) -> None:
        """One request, whose time began at `start`."""
        self.open += 1
        caller = None
        try:
            caller = self._take() or await self._target.connect()
            reply = await caller.ask(next(self._requests))
        except OSError as fault:
            self.figures.failures[type(fault).__name__] += 1
            await asyncio.sleep(RETRY_SECONDS)
        except asyncio.CancelledError:
            self.figures.failures["unanswered"] += 1
            if caller is not None:
                caller.hang_up()
            raise
        else:
            self.figures.count(reply, time.monotonic() - start)
            if caller.connected:
                self._free.append(caller)
        finally:
            self.open -= 1

    def _take(self) -> Connection | None:
        """A connection that is free; those that the server has closed for their idleness are forgotten."""
        while self._free:
            if (caller := self._free.pop()).connected:
                return caller
        return None

    async def run(self, work: asyncio.Future[Any], seconds: float, watch: Watch) -> Figures:
        """Wait for the work, and at most PATIENCE_SECONDS longer than `seconds`."""
        start = time.monotonic()
        while not work.done() and time.monotonic() < start + seconds + PATIENCE_SECONDS:
            await asyncio.wait((work,), timeout=PROGRESS_SECONDS)
            self.figures.seconds = time.monotonic() - start
            watch(self.figures)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        for caller in self._free:
            caller.hang_up()
        return self.figures


def _due(gaps: Iterator[float], start: float, seconds: float) -> Iterator[float]:
    """When requests are due, on whole milliseconds: the loop's timers know none between, and would seem to delay answers."""
    at = start
    while (at := at + next(gaps)) < start + seconds:
        yield math.ceil(at * 1000) / 1000


def reason(reply: Reply) -> str:
    """The status and, where the body has one, the error's code."""
    try:
        return f"{reply.status} {json.loads(reply.body)['code']}"
    except (ValueError, KeyError, TypeError):
        return str(reply.status)
