"""The interface between a load and its connections."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

OK = 200
"""Status of a right answer. gRPC's status 0 is reported with it, and its other statuses as they are."""
CLOSED = "closed by the server"
"""The reason for a broken connection that the server has closed."""


class Exchange(Protocol):
    """Receives the answers of connections."""

    def answered(self, connection: Connection, status: int, body: bytes) -> None:
        """The first open request of the connection is answered. The exchange removes it."""

    def broken(self, connection: Connection, reason: str) -> None:
        """The connection is unusable. It closes itself."""


class OpenRequest(NamedTuple):
    """A request without an answer: its number, and the time from which its latency counts."""

    number: int
    since: float


class Connection(asyncio.Protocol):
    """A persistent connection. open: its requests without an answer, which the server answers in this order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._received = b""
        self._transport: asyncio.Transport
        self.open: deque[OpenRequest] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment] # uvloop's transport is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self._break(CLOSED)

    def ask(self, number: int, since: float) -> None:
        """Send the request with this number. Its latency counts from `since`."""
        self.open.append(OpenRequest(number, since))
        self._send(number)

    def _send(self, number: int) -> None:
        raise NotImplementedError

    def hang_up(self) -> None:
        self._break = _ignore  # type: ignore[method-assign] # a closed connection reports nothing
        self._transport.abort()

    def _break(self, reason: str) -> None:
        self.hang_up()
        self._exchange.broken(self, reason)


def _ignore(reason: str) -> None:
    pass
