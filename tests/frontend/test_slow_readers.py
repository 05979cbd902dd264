"""A client that reads a little at a time has not stopped reading. The tests play the kernel, which knows what has been received."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from service.frontend import connection_guard, websocket_protocol
from service.frontend.connection_guard import UnreadBytes
from service.frontend.delivery import Delivery, delivery
from service.frontend.websocket_protocol import WebSocketProtocol
from tests.frontend.ports import Ports, connected, until, watched, with_ports
from tests.raw_websocket import handshake
from tests.serving import eventually


class Transport:
    """A transport of which some bytes wait for the client."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.waiting, self._connection = 0, connection

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_extra_info(self, name: str) -> socket.socket | None:
        assert name == "socket"
        return self._connection


def test_kernel_tells_what_the_client_has_received() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            transport = cast(asyncio.Transport, Transport(connection))
            before = delivery(transport)
            connection.sendall(b"x" * 5)
            assert client.recv(5) == b"x" * 5
            assert before is not None
            # An acknowledgement may be late.
            eventually(lambda: delivery(transport) == Delivery(before.acknowledged_bytes + 5, 0))
    assert delivery(cast(asyncio.Transport, Transport())) is None


def test_client_reads_while_its_system_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the write buffer does not shrink."""
    played, unread, received = Transport(), UnreadBytes(), 0
    monkeypatch.setattr(connection_guard, "delivery", lambda _: Delivery(received, 1000))
    transport, played.waiting = cast(asyncio.Transport, played), 100
    for now, received, since in ((0, 0, 0), (10, 1, 10), (20, 2, 20), (50, 2, 20), (90, 2, 20), (91, 3, 91)):  # noqa: B007
        assert unread.since(transport, now) == since
    assert unread.size == 100
    played.waiting = 0
    assert unread.since(transport, 92) is None


def test_without_the_kernel_the_write_buffer_tells_what_is_read() -> None:
    played, unread = Transport(), UnreadBytes()
    transport = cast(asyncio.Transport, played)
    for now, waiting, since in ((0, 100, 0), (1, 100, 0), (2, 90, 2), (3, 120, 2), (4, 0, None), (5, 10, 5)):
        played.waiting = waiting
        assert unread.since(transport, now) == since
    assert unread.since(transport, 6, written_bytes=200) == 6, "more was written, and the rest is no larger"


def test_websocket_of_a_slow_reader_is_not_read_and_stays_open_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a pong begins again while the client reads the data in front of the ping."""
    sockets, known = watched((WebSocketProtocol,), monkeypatch), [Delivery(0, 10)]
    monkeypatch.setattr(websocket_protocol, "delivery", lambda _: known[-1])

    async def test(ports: Ports) -> None:
        async with connected(ports.http) as (reader, writer):
            writer.write(handshake("model=words"))
            await reader.readuntil(b"\r\n\r\n")
            protocol: Any = sockets[0]()
            await until(protocol.transport.is_reading)
            protocol.pause_writing()
            assert not protocol.transport.is_reading(), "only the buffers of the kernel fill"
            protocol.resume_writing()
            await until(protocol.transport.is_reading)
            protocol.send_keepalive_ping()
            for received in (1, 2):
                known.append(Delivery(received, 10))
                protocol.keepalive_timeout()
                assert protocol.pong_timer is not None and not protocol.close_sent
            protocol.keepalive_timeout()
            assert protocol.close_sent, "it reads nothing any more"

    with_ports(tmp_path, test)
