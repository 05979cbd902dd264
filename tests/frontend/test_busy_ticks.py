"""Requests at the end of a long tick are refused if all ticks of the last second were long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps

from service.errors import Overloaded
from service.frontend.busy_ticks import PATIENCE_SECONDS, SHARE, BusyTicks

DEADLINE_MS = 1000.0
MOST_SECONDS = SHARE * DEADLINE_MS / 1000
DECODING_SECONDS = MOST_SECONDS / 10
LONG, SHORT = 40, 5
"""Requests in a long tick and in a short one."""


class Frontend:
    """A frontend that takes DECODING_SECONDS for each request that is not refused."""

    def __init__(self) -> None:
        self.now = 100.0
        self._ticks = BusyTicks(DEADLINE_MS, lambda: self.now)

    async def tick(self, requests: int) -> int:
        """Return how many requests of a tick are refused."""
        refused = 0
        for _ in range(requests):
            try:
                self._ticks.check(self.now)
                self.now += DECODING_SECONDS
            except Overloaded:
                refused += 1
        await asyncio.sleep(0)
        return refused

    async def overload(self) -> None:
        """Run long ticks until requests are refused."""
        until = self.now + PATIENCE_SECONDS + LONG * DECODING_SECONDS
        while not await self.tick(LONG):
            assert self.now < until


def run(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def running() -> None:
        asyncio.run(test())

    return running


@run
async def test_burst_is_decoded() -> None:
    frontend = Frontend()
    for _ in range(3):
        assert await frontend.tick(LONG) == 0
        frontend.now += 2 * PATIENCE_SECONDS


@run
async def test_ticks_of_an_overload_are_cut_off() -> None:
    frontend = Frontend()
    await frontend.overload()
    for _ in range(5):
        before = frontend.now
        assert await frontend.tick(LONG) > LONG / 2
        assert frontend.now - before < MOST_SECONDS + 2 * DECODING_SECONDS


@run
async def test_endless_first_tick_is_cut_off() -> None:
    frontend = Frontend()
    requests = 10 * round(PATIENCE_SECONDS / DECODING_SECONDS)
    assert await frontend.tick(requests) >= 0.8 * requests


@run
async def test_overload_outlasts_short_ticks_for_a_while() -> None:
    frontend = Frontend()
    await frontend.overload()
    assert await frontend.tick(SHORT) == 0
    assert await frontend.tick(LONG) > 0
    calm = frontend.now + 1.5 * PATIENCE_SECONDS
    while frontend.now < calm:
        assert await frontend.tick(SHORT) == 0
    assert await frontend.tick(LONG) == 0


@run
async def test_pause_ends_the_overload() -> None:
    frontend = Frontend()
    await frontend.overload()
    frontend.now += 2 * PATIENCE_SECONDS
    assert await frontend.tick(LONG) == 0
