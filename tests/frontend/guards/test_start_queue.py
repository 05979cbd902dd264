"""A tick starts requests for a short time. In an overload it refuses some of those that have waited long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.errors import Overloaded
from service.frontend.guards.reading_turns import SLICE_SECONDS as READING_SLICE_SECONDS
from service.frontend.guards.reading_turns import ReadingTurn, ReadingTurns
from service.frontend.guards.start_queue import LONG_WAIT_SHARE, PATIENCE_SECONDS, SLICE_SECONDS, StartQueue, WaitingStart

DEADLINE_MS = 1000.0
LONG_WAIT = LONG_WAIT_SHARE * DEADLINE_MS / 1000
DECODING_SECONDS, REFUSING_SECONDS = SLICE_SECONDS / 5, SLICE_SECONDS / 50
MOST_TICK_SECONDS = 2 * SLICE_SECONDS + DECODING_SECONDS + REFUSING_SECONDS


class Frontend:
    """A frontend that takes DECODING_SECONDS for a request, and REFUSING_SECONDS for one that it refuses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = ReadingTurns(lambda: self.now)
        self.queue = StartQueue(DEADLINE_MS, self.turns, lambda: self.now)
        self.started: list[int] = []
        self.waits: list[float] = []
        """How long each request that was started has waited."""
        self.refused: list[int] = []
        self._last = 0

    def receive(self, requests: int, connection: object = None) -> list[WaitingStart]:
        """Take requests from the sockets of one tick, or from one connection. Return those that wait."""
        waiting = []
        for _ in range(requests):
            self._last += 1
            start, arrived = self._starter(self._last), self.now
            if self.queue.must_wait(arrived):
                waiting.append(self.queue.add(arrived, start, connection))
            else:
                start(arrived)
        return waiting

    async def tick(self, requests: int = 0) -> list[WaitingStart]:
        """Run one tick. It starts or refuses nothing for longer than its slices."""
        began, waiting = self.now, self.receive(requests)
        await asyncio.sleep(0)
        most = MOST_TICK_SECONDS if waiting or not requests else requests * DECODING_SECONDS + SLICE_SECONDS
        assert self.now - began <= most
        return waiting

    async def overload(self, requests: int, ticks: int) -> float:
        """Send this many requests in each tick until some are refused, and then for some ticks. Return how many can be decoded then."""
        until = self.now + PATIENCE_SECONDS + 10 * LONG_WAIT
        while not self.refused:
            await self.tick(requests)
            assert self.now < until
        for _ in range(ticks):  # refuses what has waited at the beginning
            await self.tick(requests)
        del self.started[:], self.refused[:], self.waits[:]
        began = self.now
        for _ in range(ticks):
            await self.tick(requests)
        return (self.now - began) / DECODING_SECONDS

    def _starter(self, name: int) -> Callable[[float], None]:
        def start(arrived: float) -> None:
            if self.queue.refusing:
                assert isinstance(self.queue.refuse(), Overloaded)
                self.refused.append(name)
                self.now += REFUSING_SECONDS
            else:
                self.started.append(name)
                self.waits.append(self.now - arrived)
                self.now += DECODING_SECONDS

        return start


def run(test: Callable[[Frontend], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Make a test of a coroutine."""

    async def within_a_loop() -> None:
        await test(Frontend())

    return lambda: asyncio.run(within_a_loop())


@run
async def test_requests_of_a_calm_tick_start_at_once(frontend: Frontend) -> None:
    for _ in range(5):
        assert await frontend.tick(3) == []
    assert frontend.waits == [0.0] * 15


@run
async def test_long_tick_is_divided_and_keeps_the_order(frontend: Frontend) -> None:
    """Of the requests that are not cancelled."""
    waiting = await frontend.tick(40)
    assert len(frontend.started) < 15
    waiting[-1].cancel()
    frontend.receive(2)
    while len(frontend.started) < 41:
        await frontend.tick()
    assert frontend.started == [*range(1, 40), 41, 42]
    assert await frontend.tick(1) == [], "nothing waits any more"


@run
async def test_connections_take_turns(frontend: Frontend) -> None:
    """In an overload too."""
    flood, quiet, wait = object(), object(), 0.0
    for _ in range(round(3 * PATIENCE_SECONDS / SLICE_SECONDS)):
        frontend.receive(20, flood)
        [waiting] = frontend.receive(1, quiet)
        sent = frontend.now
        while waiting.start is not None:
            await frontend.tick()
        wait = max(wait, frontend.now - sent)
    assert wait <= 2 * MOST_TICK_SECONDS
    while frontend.queue.waiting:
        await frontend.tick()
    assert sorted(frontend.started + frontend.refused) == [*range(1, frontend._last + 1)], "once"


@run
async def test_overload_by_one_connection_refuses_what_waited_longest(frontend: Frontend) -> None:
    """Also while a newer request of that connection is the first in the queue."""
    flood, waiting = object(), list[WaitingStart]()
    while frontend.now < 100 + 4 * PATIENCE_SECONDS:
        frontend.receive(1, flood)
        waiting = [request for request in waiting if request.start is not None] + await frontend.tick(20)
    assert frontend.now - min(request.arrived for request in waiting) < 1.5 * LONG_WAIT


@run
async def test_overload_by_one_connection_starts_its_newest_requests(frontend: Frontend) -> None:
    while frontend.now < 100 + 4 * PATIENCE_SECONDS:
        frontend.receive(20, frontend)
        await frontend.tick()
    assert max(frontend.waits[-50:]) < LONG_WAIT


@run
async def test_burst_is_decoded(frontend: Frontend) -> None:
    requests = round(0.8 * PATIENCE_SECONDS / DECODING_SECONDS)
    for burst in range(1, 4):
        frontend.receive(requests)
        while len(frontend.started) < burst * requests:
            await frontend.tick()
        frontend.now += 2 * PATIENCE_SECONDS
    assert max(frontend.waits) > LONG_WAIT and frontend.refused == []


@run
async def test_overload_is_refused_beside_what_can_be_decoded(frontend: Frontend) -> None:
    capacity = await frontend.overload(20, ticks=300)
    assert len(frontend.started) > 0.7 * capacity
    assert len(frontend.refused) > 2 * len(frontend.started)
    assert max(frontend.waits) < 1.5 * LONG_WAIT
    while await frontend.tick(1):
        pass
    calm = frontend.now + 1.5 * PATIENCE_SECONDS
    while frontend.now < calm:
        await frontend.tick(1)
    del frontend.refused[:]
    frontend.receive(round(2 * LONG_WAIT / DECODING_SECONDS))
    while frontend.queue.must_wait(frontend.now):
        await frontend.tick()
    assert frontend.refused == [], "the overload ends when nothing was refused for a while"


def test_overload_leaves_the_time_in_which_connections_are_read() -> None:
    """Otherwise requests would wait unread, where they cannot be refused."""

    class Connection:
        def read_turn(self, until: float) -> bool:
            self.seconds = until - frontend.now
            return False

        pause_turn = resume_turn = None  # it never waits

    async def run() -> None:
        await frontend.overload(requests=20, ticks=20)
        for _ in range(20):
            turn.take()
            await frontend.tick(20)
        assert connection.seconds == pytest.approx(READING_SLICE_SECONDS)

    frontend, connection = Frontend(), Connection()
    turn = ReadingTurn[Any](frontend.turns, connection)
    asyncio.run(run())
