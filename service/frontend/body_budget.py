"""The bytes of request bodies that a frontend holds: of incomplete requests, and of large requests that wait to be decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import Overloaded


class BodyBudget:
    """Counts the bytes of bodies on all connections."""

    def __init__(self, limit: int) -> None:
        """limit: SEQSERVE_MAX_RECEIVING_BYTES."""
        self._limit = limit
        self.held_bytes = 0

    def check(self) -> None:
        """Raise Overloaded when all bodies together are larger than the limit."""
        if self.held_bytes > self._limit:
            raise Overloaded(
                f"requests that are not decoded yet hold {self.held_bytes} bytes and SEQSERVE_MAX_RECEIVING_BYTES is {self._limit}: "
                "retry later, or raise SEQSERVE_MAX_RECEIVING_BYTES",
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
