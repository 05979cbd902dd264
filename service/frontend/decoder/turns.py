"""Bodies take turns at a process or a thread, in the order of their arrival."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from service.frontend.guards.start_queue import LongWaits, refusal

MAX_REFUSED = 100
"""Most bodies that are refused at once: each takes time of the event loop."""


class Turns:
    """A semaphore. The end of a turn first refuses the bodies that have waited too long."""

    def __init__(self, waits: LongWaits, places: int = 1) -> None:
        self._waits = waits
        self._free = places
        self._waiting: deque[tuple[float, int, asyncio.Future[bool]]] = deque()
        """When each body arrived, the places that it needs, and whether it gets the turn."""

    async def take(self, places: int = 1) -> None:
        """Wait for the turn. Raises Overloaded after a long wait in an overload."""
        now = time.monotonic()
        if self._free >= places and not self._waiting:
            self._free -= places
            self._waits.handle(0.0, now)
            return
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((now, places, turn))
        try:
            granted = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.end(places)  # it came together with the cancellation
            raise
        if not granted:  # raised here: an exception of the future would keep it, and the body, until a garbage collection
            raise refusal()

    def end(self, places: int = 1) -> None:
        """Give the places to the next bodies."""
        self._free += places
        now, refused = time.monotonic(), 0
        while self._waiting:
            arrived, needed, turn = self._waiting[0]
            granted = refused == MAX_REFUSED or not self._waits.refuses(now - arrived, now)
            if granted and needed > self._free and not turn.done():
                return
            self._waiting.popleft()
            if turn.done():
                continue  # its request was cancelled
            turn.set_result(granted)
            if granted:
                self._free -= needed
                self._waits.handle(now - arrived, now)
            else:
                self._waits.refuse(now)
                refused += 1
