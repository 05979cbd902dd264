"""A client that reads a little at a time has not stopped reading: over real sockets, with simulated times.

The reply is larger than all buffers of the kernel, and a test reads less of it than the kernel frees before it takes more: the write
buffer of the connection does not shrink.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from service.frontend.catalog import Catalog, ServedModel
from service.frontend.connection_guard import UnreadBytes
from service.frontend.delivery import Delivery, delivery
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.websocket_protocol import WebSocketProtocol
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests import models
from tests.frontend.dispatch.test_dispatcher import meet, run
from tests.frontend.test_freed_connections import Ports, limited, watched
from tests.raw_websocket import handshake

REPLY = bytes(16 << 20)
READS = 4
"""How often a client reads."""
SMALL_BUFFER = 4096


async def connect(address: tuple[str, int]) -> socket.socket:
    """Return a client with a small buffer, so that the other side soon learns that it reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    return client


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
    """Wait until the client's system takes no more, because its buffer is full."""
    before, now = None, delivered(transport)
    while before != now:
        await asyncio.sleep(0.5)
        before, now = now, delivered(transport)


Talk = Callable[[asyncio.Transport, socket.socket], Awaitable[None]]


def with_full_buffers(talk: Talk) -> None:
    """Let a service write the reply to a client that does not read yet."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        accepted = loop.create_future()

        class Writing(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                cast(asyncio.Transport, transport).write(REPLY)
                accepted.set_result(transport)

        server = await loop.create_server(Writing, "127.0.0.1")
        client = await connect(server.sockets[0].getsockname())
        transport = await accepted
        try:
            await settle(transport)
            await talk(transport, client)
        finally:
            transport.abort()
            client.close()
            server.close()

    uvloop.run(test())


def test_client_that_reads_a_little_at_a_time_reads() -> None:
    async def talk(transport: asyncio.Transport, client: socket.socket) -> None:
        unread, size = UnreadBytes(), transport.get_write_buffer_size()
        assert unread.since(transport, 0.0) == 0.0
        for now in range(10, 10 * READS, 10):
            await read_some(client, transport)
            assert unread.since(transport, now) == now
        assert transport.get_write_buffer_size() == size == unread.size

    with_full_buffers(talk)


def test_client_that_has_stopped_reads_nothing() -> None:
    async def talk(transport: asyncio.Transport, client: socket.socket) -> None:
        unread = UnreadBytes()
        assert unread.since(transport, 0.0) == 0.0
        await read_some(client, transport)
        await settle(transport)
        assert unread.since(transport, 10.0) == 10.0
        await asyncio.sleep(0.5)
        assert unread.since(transport, 50.0) == 10.0

    with_full_buffers(talk)


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
    spec = models.words(tmp_path, bidirectional=False)
    sockets = watched((WebSocketProtocol,), monkeypatch)

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        catalog, engine = Catalog([ServedModel(spec, "1", None)], {}), await meet(dispatcher)
        frontend = Frontend(Settings(), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Ports(frontend, engine).http, "127.0.0.1")
        client = await connect(server.sockets[0].getsockname())
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
        client.close()
        server.close()

    run(test)
