"""Connections in the event loop of the test: closed ones are freed at once, requests wait for a later tick, and clients read slowly."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from loadtest.oip_requests import METHOD, PATH
from service.frontend import connection_guard, http_protocol, websocket_protocol
from service.frontend.connection_guard import UnreadBytes
from service.frontend.delivery import Delivery, delivery
from service.frontend.http2 import connection
from service.frontend.http2.connection import Http2Connection
from service.frontend.http_protocol import HttpProtocol
from service.frontend.oip.grpc_wire import frame_message
from service.frontend.start_queue import StartQueue
from service.frontend.websocket_protocol import WebSocketProtocol
from service.metrics import CUT_OFF, GONE
from tests.frontend.http2 import peer
from tests.frontend.http2.peer import reset
from tests.frontend.ports import (
    BODY,
    LATE_BODY,
    LATE_STEPS,
    Ports,
    connected,
    hot,
    late_timers,
    limited,
    until,
    watched,
    with_ports,
)
from tests.raw_websocket import CLOSE, CONTINUATION, TEXT, frame, handshake
from tests.serving import LIMIT_SECONDS, eventually

# A closed connection is freed at once, however it ended. A garbage collection of many connections would take long.

CHUNK, LATE_CHUNK = (frame(TEXT, b'{"input": [1, 2, 3%b]}' % more) for more in (b"", b", 1"))
SENT = b""
"""Stands for a reply: the client leaves once the engine has its request."""


class Conversation(NamedTuple):
    """The bytes that a client sends, and the reply after which it aborts the connection. opening: a handshake before the bytes."""

    data: bytes
    reply: bytes = SENT
    opening: bytes = b""


def general(body: bytes) -> bytes:
    """Return a request for the general path."""
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def chunks(*frames: bytes, reply: bytes = SENT) -> Conversation:
    return Conversation(b"".join(frames), reply, handshake("model=words"))


def call(path: str, message: bytes = b"", *, stream: int = 1, ended: bool = True) -> bytes:
    fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    head = peer.frame(peer.HEADERS, peer.END_HEADERS, stream, peer.block(*fields, path=path.encode()))
    return head + peer.frame(peer.DATA, peer.END_STREAM if ended else 0, stream, frame_message(message))


def infer(steps: int = 3) -> bytes:
    request = METHOD.request_type(model_name="words", raw_input_contents=[struct.pack(f"<{steps}i", *[1] * steps)])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, steps])
    serialised: bytes = request.SerializeToString()
    return serialised


STREAM, LIVE = (f"{PATH.rpartition('/')[0]}/{name}" for name in ("ModelStreamInfer", "ServerLive"))
GREETING = peer.PREFACE + peer.settings()
CONVERSATIONS = {
    "http": {
        "hot request": Conversation(hot(BODY), b'"outputs"'),
        "running and waiting hot requests": Conversation(hot(LATE_BODY) + hot(BODY) * 3),
        "running and waiting general requests": Conversation(general(LATE_BODY) + general(BODY) * 3),
        "no HTTP": Conversation(b"\0\r\n\r\n", b"not valid HTTP"),
        "refusal behind a reply": Conversation(general(LATE_BODY) + b"GET /models HTTP/1.1\r\n\r\n"),
    },
    "websocket": {
        "closed socket": chunks(CHUNK, frame(CLOSE, struct.pack(">H", 1000)), reply=b"\x88\x02\x03\xe8"),
        "running chunks": chunks(CHUNK, *[LATE_CHUNK] * 2),
        "incomplete frame": chunks(CHUNK, CHUNK[:-1], reply=b'"outputs"'),
        "wrong frame": chunks(frame(CONTINUATION, CHUNK), reply=b"\x88"),
    },
    "grpc": {
        "hot call": Conversation(GREETING + call(PATH, infer()), b"grpc-status\x010"),
        "running hot call": Conversation(GREETING + call(PATH, infer(LATE_STEPS))),
        "refused call": Conversation(GREETING + call("/nothing"), b"grpc-status\x0212"),
        "reset call": Conversation(
            GREETING + call(STREAM, infer(), ended=False) + peer.reset(1) + call(LIVE, stream=3), b"grpc-status\x010"
        ),
        "call after a fault": Conversation(GREETING + call(STREAM, infer(), ended=False) + peer.frame(peer.PING), b"PING"),
        "open stream": Conversation(GREETING + call(STREAM, infer(), ended=False), b"scores"),
        "running stream": Conversation(GREETING + call(STREAM, infer(LATE_STEPS), ended=False)),
        "no HTTP/2": Conversation(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/2"),
    },
}
PROTOCOLS: dict[str, tuple[type, ...]] = {
    "http": (HttpProtocol,),
    "websocket": (HttpProtocol, WebSocketProtocol),
    "grpc": (Http2Connection,),
}
"""The classes with an object for each connection."""


async def hold(ports: Ports, kind: str, conversation: Conversation, name: str) -> None:
    """Hold a conversation."""
    ports.late.clear()
    async with connected(ports.grpc if kind == "grpc" else ports.http) as (reader, writer), limited(f"{name} gets no reply"):
        if conversation.opening:
            writer.write(conversation.opening)
            await reader.readuntil(b"\r\n\r\n")
        writer.write(conversation.data)
        await (reader.readuntil(conversation.reply) if conversation.reply else ports.late.wait())


class BusyTicks(StartQueue):
    """Every request waits for the next tick."""

    def must_wait(self, now: float) -> bool:
        return True


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("queue", [StartQueue, BusyTicks])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_closed_connection_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, queue: type[StartQueue]
) -> None:
    """Also the timer that closes a refused connection, which would keep the transport in memory."""
    connections = watched(PROTOCOLS[kind], monkeypatch)
    for module in (http_protocol, connection):
        monkeypatch.setattr(module, "LINGER_SECONDS", 2 * LIMIT_SECONDS)

    async def test(ports: Ports) -> None:
        before = late_timers()
        for name, conversation in CONVERSATIONS[kind].items():
            await hold(ports, kind, conversation, name)
            assert len(connections) == len(PROTOCOLS[kind]), name
            async with limited(f"{name} leaves its connection in memory"):
                while any(reference() is not None for reference in connections):
                    await asyncio.sleep(0.001)
            assert late_timers() <= before, name
            connections.clear()

    with_ports(tmp_path, test, queue)


# Requests that wait for a later tick of the event loop, which the test lets start.

FRAME_HEAD_BYTES = 7
"""Of a small frame, and the first byte of its content."""


class HeldStarts(StartQueue):
    """Every request waits until `release`."""

    def must_wait(self, now: float) -> bool:
        return True

    def _schedule(self) -> None:
        """Schedule nothing."""

    @property
    def held(self) -> int:
        return len(self._waiting)

    def release(self) -> None:
        while self._waiting:
            self._next_tick()


def starts_of(ports: Ports) -> HeldStarts:
    assert isinstance(ports.frontend.starts, HeldStarts)
    return ports.frontend.starts


def test_grpc_requests_that_end_before_their_turn_are_counted(tmp_path: Path) -> None:
    async def test(ports: Ports) -> None:
        starts, application, metrics = starts_of(ports), ports.application, ports.frontend.metrics
        async with connected(ports.grpc) as (_, writer):
            writer.write(GREETING + call(PATH, infer()))
            await until(lambda: starts.held == 1)
            writer.write(reset(1))
            await until(lambda: not application.open_calls)
            starts.release()
            writer.write(call(PATH, infer(), stream=3))
            await until(lambda: starts.held == 1)
            application.cut_off()
            starts.release()
        assert application.held_bytes == 0
        metrics.snapshot()
        assert {labels[2]: count for labels, [count] in metrics.requests.values.items() if count} == {GONE: 1, CUT_OFF: 1}

    with_ports(tmp_path, test, HeldStarts)


def test_waiting_requests_count_as_one_and_keep_their_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of pipelined requests are many, and each is small. A timer of the general path closes only an idle connection."""
    protocols = watched((HttpProtocol,), monkeypatch)

    async def test(ports: Ports) -> None:
        bodies = ports.frontend.bodies

        def idle_timer() -> object:
            protocol: Any = protocols[0]()
            return protocol.timeout_keep_alive_task

        async with connected(ports.http) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await until(idle_timer)
            writer.write(hot(BODY) * 500)
            await until(lambda: starts_of(ports).held == 1)
            assert bodies.held_bytes == len(hot(BODY))
            assert idle_timer() is None
        await until(lambda: bodies.held_bytes == 0)

    with_ports(tmp_path, test, HeldStarts)


def test_slow_websocket_client_gains_no_time_from_a_busy_frontend(tmp_path: Path) -> None:
    async def test(ports: Ports) -> None:
        starts, message = starts_of(ports), frame(TEXT, b'{"input": [1, 2, 3]}')
        async with connected(ports.http) as (reader, writer):
            writer.write(handshake("model=words"))
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: [socket for socket in ports.sockets if socket._receiver is not None])
            [socket] = ports.sockets
            starts.release()
            began = []
            for byte in message[:-1]:
                writer.write(bytes([byte]))
                await until(lambda: starts.held == 1)
                starts.release()
                began.append(socket.phase_began)
            assert len(set(began[FRAME_HEAD_BYTES:])) == 1

    with_ports(tmp_path, test, HeldStarts)


# A client that reads a little at a time has not stopped reading. The tests play the kernel, which knows what has been received.


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
