"""Bodies take turns at the decoder, in the order of their arrival."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from service.frontend.start_queue import LongWaits, refusal

MAX_REFUSED = 100
"""Most bodies that are refused at once: each takes time of the event loop."""


class Turns:
    """A lock whose end refuses the waiting bodies that have waited too long, before another body gets the turn."""

    def __init__(self, waits: LongWaits) -> None:
        self._waits = waits
        self._taken = False
        self._waiting: deque[tuple[float, asyncio.Future[bool]]] = deque()
        """When each body arrived, and whether it gets the turn."""

    async def take(self) -> None:
        """Wait for the turn. Raises Overloaded after a long wait in an overload."""
        now = time.monotonic()
        if not self._taken:
            self._taken = True
            self._waits.handle(0.0, now)
            return
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((now, turn))
        try:
            granted = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.end()  # it came together with the cancellation
            raise
        if not granted:  # raised here: an exception of the future would keep it, and the body, until a garbage collection
            raise refusal()

    def end(self) -> None:
        """Give the turn to the next body."""
        now, refused = time.monotonic(), 0
        while self._waiting:
            arrived, turn = self._waiting.popleft()
            if turn.done():
                continue  # its request was cancelled
            if refused == MAX_REFUSED or not self._waits.refuses(now - arrived, now):
                self._waits.handle(now - arrived, now)
                turn.set_result(True)
                return
            self._waits.refuse(now)
            turn.set_result(False)
            refused += 1
        self._taken = False
