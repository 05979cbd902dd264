"""The bytes of request bodies that a frontend holds: of incomplete requests, and of large requests that wait to be decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import Overloaded
from service.frontend.decoder.turns import Turns
from service.frontend.guards.memory_guard import MemoryGuard
from service.frontend.guards.start_queue import LongWaits
from service.settings import BODY_CEILING_BYTES

MAX_RECEIVING_BYTES = BODY_CEILING_BYTES
"""Bytes of requests that a frontend holds at most, over all HTTP connections, and the same over all gRPC connections. The largest body that
a setting allows has room."""
LONG_SECONDS = 1.0
"""A longer wait to be decompressed is long."""


class BodyBudget:
    """Counts the bytes of bodies on all connections."""

    def __init__(self, limit: int, memory: MemoryGuard) -> None:
        """limit: MAX_RECEIVING_BYTES of the service."""
        self._limit = limit
        self._memory = memory
        self.held_bytes = 0
        self.turns = Turns(LongWaits(LONG_SECONDS))
        """Of bodies that are decompressed to more than a few bytes."""

    def add(self, size: int) -> None:
        """Count a part of a body that has arrived, or that was freed if `size` is negative."""
        self.held_bytes += size
        if size > 0:
            self._memory.arrive(size)

    def check(self, *, large: bool = True) -> None:
        """Raise Overloaded when all bodies together are larger than the limit, or for a large body when memory is short."""
        if large:
            self._memory.check_large()
        if self.held_bytes > self._limit:
            raise Overloaded(
                f"requests that are not decoded yet hold {self.held_bytes} bytes and the limit is {self._limit}: "
                "retry later, or send less at once",
                retry_after=1,
            )

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count a body within this context; raises Overloaded."""
        self.held_bytes += size
        try:
            self.check()
            yield
        finally:
            self.held_bytes -= size
