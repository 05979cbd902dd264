"""Refuses requests while the memory limit of the container is nearly used up, so that the kernel kills no process.

From a share of the limit all inference requests are refused, and from SHED_EARLIER below it large requests and new sessions. Each tick
of the frontend reads the share in use. Bytes that arrive before the next reading are added to it: a fast network could fill the rest within
a tick. Memory that admitted requests will need for large answers, or while their bodies are parsed, is reserved.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable
from functools import partial

import msgspec

from service.errors import Overloaded
from service.ipc.messages.inference import Request
from service.log import Log
from service.memory_limit import NO_LIMIT, MemoryUse, return_freed_memory
from service.metrics import MEMORY, Metrics

SHED_EARLIER = 0.1
LARGE_BYTES = 1 << 16
"""A larger body is refused earlier. Smaller bodies are decoded on the event loop and take little more than their size."""
ANSWER_BYTES = 17
"""Most bytes for a number of a large answer, in all processes together: as parts, joined, on its way, and as JSON. Measured: 16 to 17
for 8 and 32 requests at once, each for 2,000 vectors of 256 numbers (2026-11-26, two cores)."""
TRIM_TICKS = 10
"""Ticks between two attempts to return freed memory, while any is wanted."""
TRIM_BYTES, QUIET_BYTES = 64 << 20, 1 << 20
"""Bytes of bodies after which freed memory is returned in any case, as soon as fewer than QUIET_BYTES arrive in each of TRIM_TICKS."""


class MemoryGuard:
    """The memory of the container, as one frontend knows it."""

    def __init__(
        self, max_share: float, read: Callable[[], MemoryUse], metrics: Metrics, log: Log, trim: Callable[[], object]
    ) -> None:
        """max_share: share of the limit from which all requests are refused; 1 means never.

        trim: returns freed memory of this process to the system.
        """
        self._refuse_share = max_share if max_share < 1 else math.inf
        self._shed_share = self._refuse_share - SHED_EARLIER
        self._read = read
        self._metrics = metrics
        self._log = log
        self._trim = trim
        self._use = NO_LIMIT
        self.limited = False
        """Whether requests may be refused. An attribute, because every request reads it."""
        self.excess_bytes = -math.inf
        """How many bytes are in use beyond the share from which all requests are refused; negative if there is room."""
        self._arrived = 0
        """Bytes of incomplete and decompressed bodies since the last reading."""
        self._untrimmed = self._quiet_ticks = 0
        """Such bytes since freed memory was returned, and ticks since many of them have arrived."""
        self._reserved = 0
        """Bytes that admitted requests may still need."""
        self._short = False
        self._refused = False
        """Whether a request was refused since freed memory was returned."""
        self._ticks_to_trim = 0

    def update(self) -> None:
        """Read how much memory is in use. Called on each tick."""
        self._quiet_ticks = self._quiet_ticks + 1 if self._arrived < QUIET_BYTES else 0
        self._untrimmed += self._arrived
        self._use, self._arrived = self._read(), 0
        self.limited = self._use is not NO_LIMIT and self._refuse_share < 1
        self.excess_bytes = self._use.beyond(self._refuse_share)
        share, was_short = self._use.share, self._short
        self._short = share >= self._shed_share
        self._metrics.memory_limit_used.set(share)
        if self._short != was_short:
            level, event = ("warning", "memory short") if self._short else ("info", "memory free")
            self._log.capped(level, event, share=round(share, 3))
        self._ticks_to_trim -= 1
        wanted = self._short or self._refused
        if (wanted or (self._untrimmed > TRIM_BYTES and self._quiet_ticks >= TRIM_TICKS)) and self._ticks_to_trim <= 0:
            # Memory that this process has freed and keeps counts as used: it would be refused to the next requests.
            self._refused, self._ticks_to_trim, self._untrimmed = False, TRIM_TICKS, 0
            if wanted:
                gc.collect()  # a connection that closed with unread bytes keeps them in a cycle of references
            self._trim()

    def arrive(self, size: int) -> None:
        """Count a part of a body that is not complete yet, or was decompressed."""
        self._arrived += size

    def check_large(self) -> None:
        """Raise Overloaded if no large body is taken."""
        if self._use.beyond(self._shed_share) + self._arrived >= 0 or self.excess_bytes + self._arrived + self._reserved >= 0:
            raise self._refusal()

    def check_new_session(self) -> None:
        """Raise Overloaded if no session and no WebSocket may be opened."""
        if self._short:
            raise self._refusal()

    def reserve(self, size: int) -> Callable[[], None]:
        """Count bytes that a request may need. Returns a function to call once when it no longer needs them. Raises Overloaded."""
        if self.excess_bytes + self._arrived + self._reserved + size >= 0:
            raise self._refusal()
        self._reserved += size
        return partial(self._release, size)

    def admit(self, request: Request, size: int, answer_numbers: int) -> tuple[Request, Callable[[], None] | None]:
        """Return an inference request as the engine may run it, and a function to call at its end, if needed; raises Overloaded.

        size: bytes of its values. answer_numbers: numbers in its answer.
        """
        if self.excess_bytes >= 0:
            raise self._refusal()
        if self._short:
            if size > LARGE_BYTES:
                raise self._refusal()
            if request.session is not None:
                request = msgspec.structs.replace(request, opens_session=False)
        answer = answer_numbers * ANSWER_BYTES
        return request, self.reserve(answer) if answer > LARGE_BYTES else None

    def _release(self, size: int) -> None:
        self._reserved -= size

    def _refusal(self) -> Overloaded:
        self._refused = True
        self._metrics.refused.add(MEMORY)
        return Overloaded(
            f"{self._use.share:.0%} of the memory limit of the service is in use: retry later, send less at once, "
            "or give the service more memory",
            retry_after=1,
        )


def trim_heap() -> None:
    """Return freed memory of this process to the system."""
    asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
