"""A tick starts requests for a short time. In an overload it refuses some of those that have waited long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps

from service.errors import Overloaded
from service.frontend.start_queue import LONG_WAIT_SHARE, PATIENCE_SECONDS, SLICE_SECONDS, StartQueue, WaitingStart

DEADLINE_MS = 1000.0
LONG_WAIT = LONG_WAIT_SHARE * DEADLINE_MS / 1000
DECODING_SECONDS, REFUSING_SECONDS = SLICE_SECONDS / 5, SLICE_SECONDS / 50
MOST_TICK_SECONDS = 2 * SLICE_SECONDS + DECODING_SECONDS + REFUSING_SECONDS


class Frontend:
    """A frontend that takes DECODING_SECONDS for a request, and REFUSING_SECONDS for one that it refuses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queue = StartQueue(DEADLINE_MS, lambda: self.now)
        self.started: list[tuple[int, float]] = []
        """Names of the requests that were started, and how long each has waited."""
        self.refused: list[int] = []
        self._last = 0

    def receive(self, requests: int) -> list[WaitingStart]:
        """Take requests from the sockets of one tick. Return those that wait."""
        waiting = []
        for _ in range(requests):
            self._last += 1
            start, arrived = self._starter(self._last), self.now
            if self.queue.must_wait(arrived):
                waiting.append(self.queue.add(arrived, start))
            else:
                start(arrived)
        return waiting

    async def tick(self, requests: int = 0) -> list[WaitingStart]:
        """Run one tick. It starts or refuses nothing for longer than its slices."""
        began = self.now
        waiting = self.receive(requests)
        await asyncio.sleep(0)
        assert self.now - began <= (
            MOST_TICK_SECONDS if waiting or not requests else requests * DECODING_SECONDS + SLICE_SECONDS
        )
        return waiting

    async def overload(self, requests: int) -> None:
        """Send this many requests in each tick until some are refused."""
        until = self.now + PATIENCE_SECONDS + 10 * LONG_WAIT
        while not self.refused:
            await self.tick(requests)
            assert self.now < until

    def _starter(self, name: int) -> Callable[[float], None]:
        def start(arrived: float) -> None:
            try:
                self.queue.check()
            except Overloaded:
                self.refused.append(name)
                self.now += REFUSING_SECONDS
            else:
                self.started.append((name, self.now - arrived))
                self.now += DECODING_SECONDS

        return start


def run(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def running() -> None:
        asyncio.run(test())

    return running


@run
async def test_requests_of_a_calm_tick_start_at_once() -> None:
    frontend = Frontend()
    for _ in range(5):
        assert await frontend.tick(3) == []
    assert [waited for _, waited in frontend.started] == [0.0] * 15


@run
async def test_long_tick_is_divided_and_keeps_the_order() -> None:
    frontend = Frontend()
    assert await frontend.tick(40)
    assert len(frontend.started) < 15
    frontend.receive(2)
    while len(frontend.started) < 42:
        await frontend.tick()
    assert [name for name, _ in frontend.started] == list(range(1, 43))
    assert await frontend.tick(1) == [], "nothing waits any more"


@run
async def test_cancelled_request_is_not_started() -> None:
    frontend = Frontend()
    waiting = await frontend.tick(40)
    waiting[-1].cancel()
    while len(frontend.started) < 39:
        await frontend.tick()
    for _ in range(3):
        await frontend.tick()
    assert [name for name, _ in frontend.started] == list(range(1, 40))


@run
async def test_burst_is_decoded() -> None:
    frontend = Frontend()
    requests = round(0.8 * PATIENCE_SECONDS / DECODING_SECONDS)
    for burst in range(1, 4):
        frontend.receive(requests)
        while len(frontend.started) < burst * requests:
            await frontend.tick()
        frontend.now += 2 * PATIENCE_SECONDS
    assert max(waited for _, waited in frontend.started) > LONG_WAIT
    assert frontend.refused == []


@run
async def test_overload_is_refused_beside_what_can_be_decoded() -> None:
    frontend = Frontend()
    await frontend.overload(20)
    for _ in range(300):  # refuses what has waited at the beginning
        await frontend.tick(20)
    del frontend.started[:], frontend.refused[:]
    began = frontend.now
    for _ in range(300):
        await frontend.tick(20)
    capacity = (frontend.now - began) / DECODING_SECONDS
    assert len(frontend.started) > 0.7 * capacity
    assert len(frontend.refused) > 2 * len(frontend.started)
    assert max(waited for _, waited in frontend.started) < 1.5 * LONG_WAIT


@run
async def test_flood_faster_than_refusals_leaves_half_of_the_capacity() -> None:
    frontend = Frontend()
    await frontend.overload(500)
    del frontend.started[:]
    began = frontend.now
    for _ in range(300):
        await frontend.tick(500)
    assert len(frontend.started) > 0.45 * (frontend.now - began) / DECODING_SECONDS
    assert max(waited for _, waited in frontend.started) < LONG_WAIT, "the newest requests are started"


@run
async def test_overload_ends_when_nothing_was_refused_for_a_while() -> None:
    frontend = Frontend()
    await frontend.overload(20)
    while await frontend.tick(1):
        pass
    calm = frontend.now + 1.5 * PATIENCE_SECONDS
    while frontend.now < calm:
        await frontend.tick(1)
    del frontend.refused[:]
    frontend.receive(round(2 * LONG_WAIT / DECODING_SECONDS))
    while frontend.queue.must_wait(frontend.now):
        await frontend.tick()
    assert frontend.refused == []
