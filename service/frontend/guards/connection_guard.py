"""Limits on connections: how many there are, and how long each may be idle, send a request, or not read its reply."""

from __future__ import annotations

import asyncio
import heapq
import math
import resource
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from operator import itemgetter
from random import uniform
from typing import Protocol

from service.errors import RequestTimeout
from service.frontend.guards.delivery import delivery
from service.metrics import Metrics
from service.settings import Settings

RESERVED_FILES = 64
"""Open files that a frontend needs besides its connections, at least."""
FEW_BYTES = 1 << 16
"""Unread bytes for which no connection is closed when memory is short."""
MOST_CONNECTIONS = 1 << 16
PARTS, MIN_PART = 10, 256
"""How many parts a sweep has, and how many connections a part has at least. A look at 10,000 of them at once would take 40 ms."""
RECEIVE_SECONDS, RECEIVE_RATE = 10.0, 16 << 10
"""How long a request may take to arrive, plus one second for each RECEIVE_RATE bytes of it."""
SEND_SECONDS = 30.0
"""How long a client may read nothing of a reply before its connection is closed."""
MAX_UNREAD_BYTES = 256 << 20
"""Bytes of replies that wait for clients of one frontend; beyond it, the connections with the most bytes are closed."""
REPLICA_CONNECTION_SECONDS = 20.0
"""Age at which a connection to one of several replicas ends: a new replica has its share of the connections soon after it is ready."""
AGE_JITTER = 0.1
"""Share by which the longest ages of connections differ: connections that began together do not end together."""


class Phase(Enum):
    """The activity of a connection."""

    IDLE = "idle"
    KEPT = "kept"
    """Idle, but open for as long as there is room."""
    RECEIVING = "receiving"
    RUNNING = "running"
    CLOSING = "closing"


class UnreadBytes:
    """The bytes of replies that wait for one client, and since when the client has read none of them."""

    def __init__(self) -> None:
        self.size = 0
        self._taken: float = 0
        self._since = math.inf

    def since(self, transport: asyncio.Transport, now: float, written_bytes: int = 0) -> float | None:
        """Record how many bytes wait now. Return since when the client has read none of them, or None if none wait.

        written_bytes: to the transport so far, if known. Without it, and where the kernel does not tell what has arrived, a client that
        reads no more than is written seems to read nothing.
        """
        waiting = transport.get_write_buffer_size()
        delivered = delivery(transport) if waiting else None
        taken = written_bytes - waiting if delivered is None else delivered.acknowledged_bytes
        if waiting == 0 or self.size == 0 or taken > self._taken:
            self._since = now
        self.size, self._taken = waiting, taken
        return self._since if waiting else None


class GuardedConnection(Protocol):
    """A connection as the guard sees it. Times are seconds on the event loop's clock."""

    @property
    def phase(self) -> Phase:
        """The current activity."""

    @property
    def phase_began(self) -> float:
        """When it became idle, or began to receive the request."""

    @property
    def received_bytes(self) -> int:
        """How much of the request has arrived."""

    @property
    def unread_bytes(self) -> int:
        """How many bytes of replies wait for the client."""

    def unread_since(self, now: float) -> float | None:
        """Return since when the client has read nothing of a reply that waits for it, or None."""

    def close_idle(self) -> None:
        """Close the connection between two requests."""

    def refuse_slow_request(self) -> None:
        """Reply that the request takes too long, and close the connection."""

    def abort(self) -> None:
        """Close the connection without sending what waits."""


class ConnectionGuard:
    """Applies the limits to the connections of one frontend."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        connections: Callable[[], list[GuardedConnection]],
        report: Callable[[Exception], object],
    ) -> None:
        """connections: returns the open connections. report: called with an unexpected exception, which ends one connection."""
        self._settings = settings
        self._metrics = metrics
        self._connections = connections
        self._report = report
        self.limit = connection_limit(settings)
        self._unswept: list[GuardedConnection] = []
        """The connections that the sweep has not looked at yet."""
        self._part, self._unread_bytes = MIN_PART, 0
        """How many connections are one part of the sweep, and how many unread bytes the parts so far have."""

    def sweep(self, now: float) -> None:
        """Begin to close every connection that exceeds a limit of time, with the first part of them."""
        self._unswept = self._connections()
        self._part, self._unread_bytes = max(MIN_PART, math.ceil(len(self._unswept) / PARTS)), 0
        self.continue_sweep(now)

    def continue_sweep(self, now: float) -> None:
        """Look at the next part of the connections, if any are left. After the last part, limit the bytes that clients do not read."""
        if not self._unswept:
            return
        part = self._unswept[-self._part :]
        del self._unswept[-self._part :]
        for connection in part:
            try:
                self._limit_time(connection, now)
                self._unread_bytes += connection.unread_bytes
            except Exception as error:
                self._report(error)
                with suppress(Exception):  # whatever is wrong with it: the other connections still have limits
                    connection.abort()
        # Another look at all connections would take as long as the sweep.
        if not self._unswept and self._unread_bytes > MAX_UNREAD_BYTES:
            self._limit_unread_bytes()

    def free_unread(self, size: float) -> None:
        """Close the connections with the most unread bytes until `size` bytes are free. Nothing is closed if `size` is not positive.

        Connections with few unread bytes stay: closing them would free little, and their clients read.
        """
        for unread, connection in reversed(self._by_unread_bytes()) if size > 0 else ():
            if size <= 0 or unread <= FEW_BYTES:
                break
            self._close(connection.abort, "slow_reader")
            size -= unread

    def make_room(
        self, open_connections: int, connecting: int, may_close: Callable[[GuardedConnection], bool] = lambda _: True
    ) -> bool:
        """Return whether another connection may be accepted now. Otherwise close some that may close, so that it may be soon.

        connecting: accepted connections that are not open yet. While there are any, none is closed: an older connection that clients use
        would close instead of a new connection that is silent.

        Connections that have been idle for the longest time close first, then connections whose request has been arriving for the longest
        time. Several close at once, because each call looks at all connections.
        """
        if open_connections + connecting < self.limit:
            return True
        if connecting:
            return False
        connections, count = list(filter(may_close, self._connections())), max(1, self.limit // 64)
        for phase in (Phase.IDLE, Phase.KEPT, Phase.RECEIVING):
            candidates = (connection for connection in connections if connection.phase is phase)
            oldest = heapq.nsmallest(count, candidates, key=lambda connection: connection.phase_began)
            for connection in oldest:
                self._close(connection.abort, "too_many")
            if oldest:
                break
        return False

    def _limit_time(self, connection: GuardedConnection, now: float) -> None:
        seconds = now - connection.phase_began
        unread_since = connection.unread_since(now)
        if unread_since is not None and now - unread_since > SEND_SECONDS:
            self._close(connection.abort, "slow_reader")
            return
        phase = connection.phase
        if phase is Phase.IDLE and seconds > self._settings.idle_seconds:
            self._close(connection.close_idle, "idle")
        elif phase is Phase.RECEIVING and seconds > receive_seconds(connection.received_bytes):
            self._close(connection.refuse_slow_request, "slow_request")

    def _limit_unread_bytes(self) -> None:
        """Close the connections with the most unread bytes, until the rest is within the limit."""
        by_size = self._by_unread_bytes()
        total = sum(size for size, _ in by_size)
        while total > MAX_UNREAD_BYTES:
            size, connection = by_size.pop()
            self._close(connection.abort, "slow_reader")
            total -= size

    def _by_unread_bytes(self) -> list[tuple[int, GuardedConnection]]:
        return sorted(((connection.unread_bytes, connection) for connection in self._connections()), key=itemgetter(0))

    def _close(self, close: Callable[[], None], reason: str) -> None:
        self._metrics.connections_closed.add(reason)
        close()


def receive_seconds(received_bytes: int) -> float:
    """Return how long a request may take to arrive. received_bytes: its part that has arrived."""
    return RECEIVE_SECONDS + received_bytes / RECEIVE_RATE


def slow_request() -> RequestTimeout:
    """Return the error of a request that took longer."""
    return RequestTimeout(
        f"the request took longer to arrive than {RECEIVE_SECONDS:g} s, and 1 s more for each {RECEIVE_RATE} bytes: send it faster"
    )


def longest_age(settings: Settings) -> float:
    """Return the age at which a connection ends between two requests, infinite for none."""
    return REPLICA_CONNECTION_SECONDS if settings.replicated else math.inf


def retirement(now: float, max_seconds: float) -> float:
    """Return when a connection that begins now reaches its longest age. max_seconds: infinite for none."""
    return now + max_seconds * uniform(1 - AGE_JITTER, 1 + AGE_JITTER)


def connection_limit(settings: Settings) -> int:
    """Return the most connections that one frontend may have."""
    return settings.max_connections or _connections_of_open_files()


def _connections_of_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(1, soft - max(RESERVED_FILES, soft // 8)))
