"""Connections without a network: their data and reports are recorded."""

from __future__ import annotations

from typing import Any

from loadtest.generator.connection import Connection


class Exchange:
    """Records answers as (status, body), and the reason of a broken connection. An answered request stays open, for more answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.reasons: list[str] = []

    def answered(self, connection: Connection, status: int, body: bytes) -> None:
        self.answers.append((status, body))

    def broken(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)


class Transport:
    """Records the written data."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.aborted = True


def connected(connection: Connection) -> Transport:
    """Connect to nowhere."""
    transport: Any = Transport()
    connection.connection_made(transport)
    recorded: Transport = transport
    return recorded
