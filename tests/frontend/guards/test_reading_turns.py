"""The time of a tick is shared by all connections: a flood on many of them does not delay a quiet one."""

from __future__ import annotations

import asyncio

from service.frontend.guards.reading_turns import (
    LONG_TICK_SECONDS,
    MAX_TICK_SECONDS,
    MIN_TICK_SECONDS,
    SLICE_SECONDS,
    ReadingTurn,
    ReadingTurns,
)
from tests.clock import Clock

FRAME_SECONDS = 0.0001
FLOODS = 500


class Connection:
    """Has a number of frames, which take FRAME_SECONDS each."""

    def __init__(self, turns: ReadingTurns, clock: Clock, frames: int = 0) -> None:
        self.turn, self.clock, self.frames = ReadingTurn(turns, self), clock, frames
        self.reading = True
        self.read_at = 0.0

    def receive(self, frames: int) -> None:
        self.frames += frames
        self.turn.take()

    def read_turn(self, until: float) -> bool:
        while self.frames:
            self.frames -= 1
            self.clock.now += FRAME_SECONDS
            self.read_at = self.clock.now
            if self.clock.now > until:
                break
        return self.frames > 0

    def pause_turn(self) -> None:
        self.reading = False

    def resume_turn(self) -> None:
        self.reading = True


def test_quiet_connection_is_read_next_beside_a_flood() -> None:
    async def run() -> None:
        clock = Clock()
        turns = ReadingTurns(clock)
        floods = [Connection(turns, clock) for _ in range(FLOODS)]
        quiet = Connection(turns, clock)
        for flood in floods:
            flood.receive(1000)
        assert clock.now < 100 + MAX_TICK_SECONDS + FRAME_SECONDS, "the connections share the time of the first tick"
        for _ in range(FLOODS):  # each has had a turn
            await asyncio.sleep(0)
        assert not any(flood.reading for flood in floods)
        for _ in range(20):
            sent = clock.now
            quiet.receive(1)
            await asyncio.sleep(0)
            assert quiet.read_at - sent <= MAX_TICK_SECONDS + SLICE_SECONDS
        used = [1000 - flood.frames for flood in floods]
        assert max(used) - min(used) <= 2 * SLICE_SECONDS / FRAME_SECONDS

    asyncio.run(run())


def test_client_gains_nothing_by_connecting_again() -> None:
    async def run() -> None:
        clock = Clock()
        turns = ReadingTurns(clock)
        quiet, busy = Connection(turns, clock), Connection(turns, clock)
        busy.receive(1000)
        for _ in range(FLOODS):
            Connection(turns, clock).receive(10)
        sent = clock.now
        quiet.receive(1)
        await asyncio.sleep(0)
        assert 0 < quiet.read_at - sent <= MAX_TICK_SECONDS + SLICE_SECONDS

    asyncio.run(run())


def test_connection_is_read_again_when_nothing_waits() -> None:
    async def run() -> None:
        clock = Clock()
        turns = ReadingTurns(clock)
        busy, closed = Connection(turns, clock), Connection(turns, clock)
        busy.receive(100)
        closed.receive(100)
        closed.turn.close()
        assert not busy.reading
        for _ in range(10):
            await asyncio.sleep(0)
        assert busy.reading and busy.frames == 0 and closed.frames > 0

    asyncio.run(run())


def test_long_ticks_leave_less_time() -> None:
    """The frames cause work that runs later."""

    async def run() -> None:
        clock = Clock()
        flood = Connection(ReadingTurns(clock), clock)
        flood.receive(100_000)
        for _ in range(10):
            asyncio.get_running_loop().call_soon(lambda: setattr(clock, "now", clock.now + 2 * LONG_TICK_SECONDS))
            await asyncio.sleep(0)
        before = flood.frames
        await asyncio.sleep(0)
        assert 0 < before - flood.frames <= MIN_TICK_SECONDS / FRAME_SECONDS + 1

    asyncio.run(run())
