"""Shares the time of an event loop's tick between the connections whose bytes wait to be handled.

Bytes that are cheap to send may be costly to handle: frames without content, chunks of one byte, calls that are refused. With a limit of
time for each connection alone, many connections together would still delay all others. So all connections share the time of a tick. Those
that find none left wait with their reading paused, so that their further bytes stay in the kernel. The connection that has used least
goes first, by start-time fair queueing (Goyal, Vin, Cheng 1996): a connection that sends little is served next, however many others flood.

The work that the bytes cause may run later, in tasks. So the shared time shrinks while ticks are long. The time of the start queue in an
overload does not count: the queue bounds it, and a request that is not read cannot be refused.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

MAX_TICK_SECONDS, MIN_TICK_SECONDS = 0.005, 0.0005
"""Bounds of the time that all connections together have in a tick."""
LONG_TICK_SECONDS = 0.01
"""A longer tick halves the time of the next one."""
SLICE_SECONDS = 0.001
"""The longest turn of one connection."""


class Reader(Protocol):
    """A connection with bytes."""

    def read_turn(self, until: float) -> bool:
        """Handle bytes, at least some of them, until this monotonic time. Return whether others wait for another turn. Raises nothing."""

    def pause_turn(self) -> None:
        """Stop reading from the socket: the connection waits for its turn."""

    def resume_turn(self) -> None:
        """Read from the socket again: nothing waits any more."""


R = TypeVar("R", bound=Reader)


class ReadingTurn(Generic[R]):
    """The place of one connection in the order."""

    __slots__ = ("_turns", "finish", "paused", "reader", "waits")

    def __init__(self, turns: ReadingTurns, reader: R) -> None:
        self._turns = turns
        self.reader: R | None = reader
        self.finish = turns.virtual + SLICE_SECONDS
        """Virtual time at the end of the last turn. A new connection has had one, so that a client gains nothing by connecting again."""
        self.waits = self.paused = False
        """Whether it waits for its turn, and whether the socket is not read meanwhile."""

    def take(self) -> None:
        """Let the connection handle its bytes, now or when its turn has come."""
        if not self.waits:
            self._turns.take(self)

    def close(self) -> None:
        """Forget the connection."""
        self.reader, self.paused = None, False


class ReadingTurns:
    """The turns of all connections of a frontend."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int, ReadingTurn[Any]]] = []
        """A heap by the virtual time at which a turn may begin."""
        self._waits = 0
        """How many turns have waited so far."""
        self.virtual = 0.0
        """Virtual time: the beginning of the turn that was taken last."""
        self._ticking = False
        self._tick_began = self._tick_ends = 0.0
        self._tick_seconds = MAX_TICK_SECONDS

    def take(self, turn: ReadingTurn[Any]) -> None:
        """Let a connection that does not wait take its turn, now if it is first and time is left in this tick."""
        now = self._clock()
        if not self._ticking:
            self._begin_tick(now)
        begin = turn.finish if turn.finish > self.virtual else self.virtual
        if now < self._tick_ends and not (self._waiting and self._waiting[0][0] < begin):
            self._serve(turn, begin, now)
        else:
            self._wait(turn, begin)

    def excuse(self, seconds: float) -> None:
        """Do not count this time of the tick: others bound it."""
        self._tick_began = min(self._tick_began + seconds, self._clock())

    def _serve(self, turn: ReadingTurn[Any], begin: float, now: float) -> None:
        reader = turn.reader
        if reader is None:
            return
        self.virtual = begin
        more = reader.read_turn(min(now + SLICE_SECONDS, self._tick_ends))
        turn.finish = begin + self._clock() - now
        if more:
            self._wait(turn, turn.finish)
        elif turn.paused:
            turn.paused = False
            reader.resume_turn()

    def _wait(self, turn: ReadingTurn[Any], begin: float) -> None:
        """Let a turn wait that may begin at a virtual time."""
        turn.waits = True
        self._waits += 1
        heapq.heappush(self._waiting, (begin, self._waits, turn))
        if not turn.paused and turn.reader is not None:
            turn.paused = True
            turn.reader.pause_turn()

    def _begin_tick(self, now: float) -> None:
        self._ticking = True
        self._tick_began, self._tick_ends = now, now + self._tick_seconds
        asyncio.get_running_loop().call_soon(self._next_tick)  # when the sockets of this tick have been handled

    def _next_tick(self) -> None:
        now, self._ticking = self._clock(), False
        is_long = now - self._tick_began > LONG_TICK_SECONDS
        seconds = self._tick_seconds / 2 if is_long else self._tick_seconds * 1.25
        self._tick_seconds = min(MAX_TICK_SECONDS, max(MIN_TICK_SECONDS, seconds))
        if self._waiting:
            self._begin_tick(now)
        while self._waiting and now < self._tick_ends:
            begin, _, turn = heapq.heappop(self._waiting)
            turn.waits = False
            self._serve(turn, begin, now)
            now = self._clock()
