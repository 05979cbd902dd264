"""A client that reads a little at a time has not stopped reading: over real sockets, with simulated times.

The reply is larger than all buffers of the kernel, and a test reads less of it than the kernel frees before it takes more: the write
buffer of the connection does not shrink.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from service.frontend.connection_guard import UnreadBytes
from service.frontend.delivery import Delivery, delivery
from service.frontend.websocket_protocol import WebSocketProtocol
from tests.frontend.ports import Ports, limited, watched, with_ports
from tests.raw_websocket import handshake

REPLY = bytes(16 << 20)
READS = 4
"""How often a client reads."""
SMALL_BUFFER = 4096


@asynccontextmanager
async def client_of(make_protocol: Any) -> AsyncIterator[socket.socket]:
    """A client with a small buffer, so that the other side soon learns that it reads."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make_protocol, "127.0.0.1")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        yield client
    server.close()


def delivered(transport: asyncio.Transport) -> Delivery:
    known = delivery(transport)
    assert known is not None, "the system tells nothing"
    return known


async def read_some(client: socket.socket, transport: asyncio.Transport) -> None:
    """Read until the service can notice it."""
    before = delivered(transport).acknowledged_bytes
    async with limited("nothing arrives"):
        while delivered(transport).acknowledged_bytes == before:
            await asyncio.get_running_loop().sock_recv(client, SMALL_BUFFER)


async def settle(transport: asyncio.Transport) -> None:
    """Wait until the client's system takes no more, because its buffer is full. An acknowledgement may be late."""
    before, now = None, delivered(transport)
    while before != now:
        await asyncio.sleep(0.3)
        before, now = now, delivered(transport)


def test_client_reads_until_it_has_stopped() -> None:
    async def test() -> None:
        accepted: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

        class Writing(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                cast(asyncio.Transport, transport).write(REPLY)
                accepted.set_result(cast(asyncio.Transport, transport))

        async with client_of(Writing) as client:
            transport, unread = await accepted, UnreadBytes()
            await settle(transport)
            size = transport.get_write_buffer_size()
            assert unread.since(transport, 0.0) == 0.0
            for now in range(10, 10 * READS, 10):
                await read_some(client, transport)
                assert unread.since(transport, now) == now
            assert transport.get_write_buffer_size() == size == unread.size
            await settle(transport)
            stopped = unread.since(transport, 90.0)
            assert unread.since(transport, 100.0) == unread.since(transport, 200.0) == stopped
            transport.abort()

    uvloop.run(test())


def test_without_the_kernel_the_write_buffer_tells_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.frontend.delivery._TCP_INFO", None)

    class Transport:
        waiting = 0

        def get_write_buffer_size(self) -> int:
            return self.waiting

        def get_extra_info(self, name: str) -> None:
            assert name == "socket"

    played, unread = Transport(), UnreadBytes()
    transport = cast(asyncio.Transport, played)
    for now, waiting, since in ((0, 100, 0), (1, 100, 0), (2, 90, 2), (3, 120, 2), (4, 0, None), (5, 10, 5)):
        played.waiting = waiting
        assert unread.since(transport, now) == since
    assert unread.since(transport, 6, written_bytes=200) == 6, "more was written, and the rest is no larger"


def test_ping_behind_unread_replies_may_be_answered_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a pong begins again while the client reads the data in front of the ping."""
    sockets = watched((WebSocketProtocol,), monkeypatch)

    async def test(ports: Ports) -> None:
        loop = asyncio.get_running_loop()
        async with client_of(ports.http) as client:
            await loop.sock_sendall(client, handshake("model=words"))
            assert (await loop.sock_recv(client, SMALL_BUFFER)).startswith(b"HTTP/1.1 101 ")
            protocol: Any = sockets[0]()
            protocol.send_text(REPLY)
            protocol.send_keepalive_ping()
            await settle(protocol.transport)
            for _ in range(READS):
                await read_some(client, protocol.transport)
                protocol.keepalive_timeout()
                assert protocol.pong_timer is not None and not protocol.close_sent
            await settle(protocol.transport)
            protocol.keepalive_timeout()
            protocol.keepalive_timeout()
            assert protocol.close_sent, "it reads nothing any more"

    with_ports(tmp_path, test)
