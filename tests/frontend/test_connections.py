"""Connections in the event loop of the test: closed ones are freed at once, requests wait for a later tick, and clients read slowly."""

from __future__ import annotations

import asyncio
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from loadtest.oip_requests import PATH
from service.frontend.guards import connection_guard
from service.frontend.guards.connection_guard import UnreadBytes
from service.frontend.guards.delivery import Delivery, delivery
from service.frontend.guards.reading_turns import ReadingTurn, ReadingTurns
from service.frontend.guards.start_queue import StartQueue
from service.frontend.http1 import http_protocol, websocket_protocol
from service.frontend.http1.http_protocol import MAX_PARSE_BYTES, MAX_WAITING_BYTES, HttpProtocol
from service.frontend.http1.websocket_protocol import MessageReceiver, WebSocketProtocol
from service.frontend.http2 import connection
from service.frontend.http2.connection import Http2Connection
from service.metrics import CUT_OFF, GONE
from tests.frontend.grpc.test_calls import head, message
from tests.frontend.http2 import peer
from tests.frontend.in_process import InProcess, in_process, late_timers
from tests.frontend.oip.messages import ids
from tests.frontend.test_hot_path import request, through_the_general_path
from tests.raw_websocket import CLOSE, CONTINUATION, TEXT, frame, handshake
from tests.serving import LIMIT_SECONDS, eventually

# A closed connection is freed at once, however it ended. A garbage collection of many connections would take long.

CHUNK = frame(TEXT, b'{"input": [[1, 2, 3]]}')
HOT = request(b'{"model": "words", "inputs": [[1, 1, 1]]}')
GENERAL = through_the_general_path(HOT)
FRAME_HEAD_BYTES = 7
"""Of a small frame, and the first byte of its content."""
SENT = b""
"""Stands for a reply: the client leaves once the engine has its request, which it does not answer."""


class Conversation(NamedTuple):
    """The bytes that a client sends, and the reply after which it aborts the connection. opening: a handshake before the bytes."""

    data: bytes
    reply: bytes = SENT
    opening: bytes = b""


def chunks(*frames: bytes, reply: bytes = SENT) -> Conversation:
    return Conversation(b"".join(frames), reply, handshake())


def call(path: str, data: bytes = b"", *, stream: int = 1, ended: bool = True) -> bytes:
    body = peer.frame(peer.DATA, peer.END_STREAM if ended else 0, stream, message(data))
    return head(path.encode(), stream=stream) + body


STREAM, LIVE = (f"{PATH.rpartition('/')[0]}/{name}" for name in ("ModelStreamInfer", "ServerLive"))
GREETING, IDS = peer.PREFACE + peer.settings(), ids(bytes(12), "words").SerializeToString()
CONVERSATIONS = {
    "http": {
        "hot request": Conversation(HOT, b'"outputs"'),
        "running and waiting hot requests": Conversation(HOT + HOT * 3),
        "running and waiting general requests": Conversation(GENERAL + GENERAL * 3),
        "no HTTP": Conversation(b"\0\r\n\r\n", b"not valid HTTP"),
        "refusal behind a reply": Conversation(GENERAL + b"GET /models HTTP/1.1\r\n\r\n"),
    },
    "websocket": {
        "closed socket": chunks(CHUNK, frame(CLOSE, struct.pack(">H", 1000)), reply=b"\x88\x02\x03\xe8"),
        "running chunks": chunks(CHUNK, *[CHUNK] * 2),
        "incomplete frame": chunks(CHUNK, CHUNK[:-1], reply=b'"outputs"'),
        "wrong frame": chunks(frame(CONTINUATION, CHUNK), reply=b"\x88"),
    },
    "grpc": {
        "hot call": Conversation(GREETING + call(PATH, IDS), b"grpc-status\x010"),
        "running hot call": Conversation(GREETING + call(PATH, IDS)),
        "refused call": Conversation(GREETING + call("/nothing"), b"grpc-status\x0212"),
        "reset call": Conversation(
            GREETING + call(STREAM, IDS, ended=False) + peer.reset(1) + call(LIVE, stream=3), b"grpc-status\x010"
        ),
        "call after a fault": Conversation(GREETING + call(STREAM, IDS, ended=False) + peer.frame(peer.PING), b"PING"),
        "open stream": Conversation(GREETING + call(STREAM, IDS, ended=False), b"scores"),
        "running stream": Conversation(GREETING + call(STREAM, IDS, ended=False)),
        "no HTTP/2": Conversation(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/2"),
    },
}
PROTOCOLS: dict[str, tuple[type, ...]] = {
    "http": (HttpProtocol,),
    "websocket": (HttpProtocol, WebSocketProtocol),
    "grpc": (Http2Connection,),
}
"""The classes with an object for each connection."""


@pytest.fixture(scope="module")
def service(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with in_process(models_folder, tmp_path_factory.mktemp("log"), run=asyncio.run) as running:
        yield running


@contextmanager
def connected(service: InProcess, kind: str = "http") -> Iterator[socket.socket]:
    """A client's connection to a port. It is aborted at the end."""
    host, _, port = (service.grpc if kind == "grpc" else urlsplit(service.address).netloc).rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_SECONDS) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield client


def read_until(client: socket.socket, end: bytes) -> None:
    data = b""
    while end not in data:
        part = client.recv(1 << 16)
        assert part, data
        data += part


def watched(kinds: tuple[type, ...], monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Return a list of references to the objects of some classes that are created from now on. They do not keep the objects."""
    references: list[Callable[[], Any]] = []

    def watch(kind: type) -> None:
        create = kind.__init__  # type: ignore[misc]

        def watched_create(self: Any, *arguments: Any, **options: Any) -> None:
            references.append(weakref.ref(self))
            create(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", watched_create)

    for kind in kinds:
        watch(kind)
    return references


def hold(service: InProcess, kind: str, conversation: Conversation) -> None:
    """Hold a conversation."""
    with service.held() if conversation.reply == SENT else nullcontext(), connected(service, kind) as client:
        if conversation.opening:
            client.sendall(conversation.opening)
            read_until(client, b"\r\n\r\n")
        client.sendall(conversation.data)
        if conversation.reply == SENT:
            eventually(lambda: service.engine.waiting)
        else:
            read_until(client, conversation.reply)


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_closed_connection_is_freed(service: InProcess, monkeypatch: pytest.MonkeyPatch, kind: str, busy: bool) -> None:
    """Also the timer that closes a refused connection, which would keep the transport in memory. busy: all requests wait for a tick."""
    connections = watched(PROTOCOLS[kind], monkeypatch)
    if busy:
        monkeypatch.setattr(StartQueue, "must_wait", lambda *_: True)
    for module in (http_protocol, connection):
        monkeypatch.setattr(module, "LINGER_SECONDS", 2 * LIMIT_SECONDS)
    before = late_timers(service)
    for name, conversation in CONVERSATIONS[kind].items():
        hold(service, kind, conversation)
        assert len(connections) == len(PROTOCOLS[kind]), name
        eventually(lambda: not any(reference() for reference in connections))
        assert late_timers(service) <= before, name
        connections.clear()


# Requests that wait for a later tick of the event loop, which the test lets start.


class Starts:
    """The start queue of a frontend, in which every request waits until `release`."""

    def __init__(self, service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self._service, self._queue = service, service.frontend.limits.starts
        monkeypatch.setattr(StartQueue, "must_wait", lambda *_: True)
        monkeypatch.setattr(StartQueue, "_schedule", lambda _: None)

    @property
    def held(self) -> int:
        return len(self._queue._waiting)

    def await_one(self) -> None:
        eventually(lambda: self.held == 1)

    def release(self) -> None:
        while self.held:
            self._service.call(self._queue._next_tick)


@pytest.fixture
def starts(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    queue = Starts(service, monkeypatch)
    yield queue
    queue.release()


def test_grpc_requests_that_end_before_their_turn_are_counted(service: InProcess, starts: Starts) -> None:
    application = service._server._grpc._application  # type: ignore[union-attr]

    def counts() -> list[float]:
        return [service.metric("seqserve_requests_total", outcome=outcome) for outcome in (GONE, CUT_OFF)]

    before = counts()
    with connected(service, "grpc") as client:
        client.sendall(GREETING + call(PATH, IDS))
        starts.await_one()
        client.sendall(peer.reset(1))
        eventually(lambda: not (application.unary_calls or application.calls))
        starts.release()
        client.sendall(call(PATH, IDS, stream=3))
        starts.await_one()
        service.call(application.cut_off)
        starts.release()
    assert application.bodies.held_bytes == 0
    assert counts() == [count + 1 for count in before]


def test_waiting_requests_count_as_one_and_keep_their_connection_open(
    service: InProcess, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of pipelined requests are many, and each is small. A timer of the general path closes only an idle connection."""
    protocols, bodies = watched((HttpProtocol,), monkeypatch), service.frontend.limits.bodies
    with connected(service) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(client, b"\r\n\r\n")
        eventually(lambda: protocols[0]().timeout_keep_alive_task)
        client.sendall(HOT * 300)
        starts.await_one()
        eventually(lambda: bodies.held_bytes == len(HOT))
        assert protocols[0]().timeout_keep_alive_task is None
    eventually(lambda: bodies.held_bytes == 0)


def test_pipelined_requests_wait_in_the_kernel(service: InProcess, starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply lets no more requests in while many wait. One read of the socket has at most 256 KiB."""
    protocols = watched((HttpProtocol,), monkeypatch)
    with connected(service) as client:
        eventually(lambda: protocols and protocols[0]().transport)
        service.call(lambda: protocols[0]().data_received(HOT * 1000))
        assert protocols[0]().flow.read_paused, "the first read may have that much"
        for _ in send_as_accepted(client, HOT * 100_000):
            starts.await_one()
            service.call(service.frontend.limits.starts._next_tick)
        assert protocols[0]()._size <= MAX_WAITING_BYTES + (1 << 18)


def test_requests_behind_one_that_waits_are_not_parsed(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the general path, which would prepare all of them."""
    protocols = watched((HttpProtocol,), monkeypatch)
    with service.held(), connected(service) as client:
        client.sendall(GENERAL * 200)
        eventually(lambda: protocols and protocols[0]().pipeline)
        assert service.call(lambda: len(protocols[0]().pipeline)) <= MAX_PARSE_BYTES // len(GENERAL)


def test_requests_behind_a_general_request_wait_in_the_kernel(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application reads the socket meanwhile, to notice that the client disconnects."""
    protocols = watched((HttpProtocol,), monkeypatch)
    with service.held(), connected(service) as client:
        for _ in send_as_accepted(client, GENERAL * 100_000):
            eventually(lambda: service.engine.waiting)
        assert len(protocols[0]()._unparsed) <= MAX_WAITING_BYTES + (1 << 18)


def send_as_accepted(client: socket.socket, data: bytes) -> Iterator[int]:
    """Send as much as the kernel accepts, ten times."""
    client.setblocking(False)
    for attempt in range(10):
        with suppress(BlockingIOError):
            while data:
                data = data[client.send(data) :]
        yield attempt


def test_slow_websocket_client_gains_no_time_from_a_busy_frontend(
    service: InProcess, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets, began = watched((WebSocketProtocol,), monkeypatch), list[float]()
    with connected(service) as client:
        client.sendall(handshake())
        read_until(client, b"\r\n\r\n")
        eventually(lambda: sockets and sockets[0]()._receiver is not None)
        starts.release()
        for byte in CHUNK[:-1]:
            client.sendall(bytes([byte]))
            starts.await_one()
            starts.release()
            began.append(sockets[0]().phase_began)
        assert len(set(began[FRAME_HEAD_BYTES:])) == 1


# A client that reads a little at a time has not stopped reading. The tests play the kernel, which knows what has been received.


def test_kernel_tells_what_the_client_has_received() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            transport = Mock(**{"get_extra_info.return_value": connection})
            before = delivery(transport)
            connection.sendall(b"x" * 5)
            assert client.recv(5) == b"x" * 5
            assert before is not None
            # An acknowledgement may be late.
            eventually(lambda: delivery(transport) == Delivery(before.acknowledged_bytes + 5, 0))
    assert delivery(Mock(**{"get_extra_info.return_value": None})) is None


def test_client_reads_while_its_system_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the write buffer does not shrink."""
    transport, unread, received = Mock(**{"get_write_buffer_size.return_value": 100}), UnreadBytes(), 0
    monkeypatch.setattr(connection_guard, "delivery", lambda _: Delivery(received, 1000))
    for now, received, since in ((0, 0, 0), (10, 1, 10), (20, 2, 20), (50, 2, 20), (90, 2, 20), (91, 3, 91)):  # noqa: B007
        assert unread.since(transport, now) == since
    assert unread.size == 100
    transport.get_write_buffer_size.return_value = 0
    assert unread.since(transport, 92) is None


def test_without_the_kernel_the_write_buffer_tells_what_is_read() -> None:
    transport, unread = Mock(**{"get_extra_info.return_value": None}), UnreadBytes()
    for now, waiting, since in ((0, 100, 0), (1, 100, 0), (2, 90, 2), (3, 120, 2), (4, 0, None), (5, 10, 5)):
        transport.get_write_buffer_size.return_value = waiting
        assert unread.since(transport, now) == since
    assert unread.since(transport, 6, written_bytes=200) == 6, "more was written, and the rest is no larger"


def test_websocket_is_not_read_before_it_is_accepted(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its handshake waited for a turn: a flood would fill the memory."""
    reading, deliver_to = list[bool](), WebSocketProtocol.deliver_to

    def wait(turns: ReadingTurns, turn: ReadingTurn[Any]) -> None:
        turns._begin_tick(0.0)
        turns._wait(turn, turn.finish)

    def deliver(protocol: WebSocketProtocol, receiver: MessageReceiver) -> None:
        reading.append(protocol.transport.is_reading())
        deliver_to(protocol, receiver)

    monkeypatch.setattr(ReadingTurns, "take", wait)
    monkeypatch.setattr(WebSocketProtocol, "deliver_to", deliver)
    with connected(service) as client:
        client.sendall(handshake())
        read_until(client, b"\r\n\r\n")
        eventually(lambda: reading == [False])


def test_closed_websocket_is_read_rarely(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = watched((WebSocketProtocol,), monkeypatch)
    with connected(service) as client:
        client.sendall(handshake())
        read_until(client, b"\r\n\r\n")
        protocol: Any = sockets[0]()
        service.call(lambda: protocol.fail("a bug"))
        assert protocol.transport.is_reading(), "the client's close frame is read at once"
        service.call(lambda: protocol.data_received(b"garbage"))
        assert not protocol.transport.is_reading()
        eventually(lambda: protocol.transport.is_reading() or protocol.transport.is_closing())


def test_websocket_of_a_slow_reader_is_not_read_and_stays_open_while_it_reads(
    service: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a pong begins again while the client reads the data in front of the ping."""
    sockets, known = watched((WebSocketProtocol,), monkeypatch), [Delivery(0, 10)]
    monkeypatch.setattr(websocket_protocol, "delivery", lambda _: known[-1])
    with connected(service) as client:
        client.sendall(handshake())
        read_until(client, b"\r\n\r\n")
        protocol: Any = sockets[0]()
        eventually(lambda: protocol.transport.is_reading())
        service.call(protocol.pause_writing)
        assert not protocol.transport.is_reading(), "only the buffers of the kernel fill"
        service.call(protocol.resume_writing)
        eventually(lambda: protocol.transport.is_reading())
        service.call(protocol.send_keepalive_ping)
        for received in (1, 2):
            known.append(Delivery(received, 10))
            service.call(protocol.keepalive_timeout)
            assert protocol.pong_timer is not None and not protocol.close_sent
        service.call(protocol.keepalive_timeout)
        assert protocol.close_sent, "it reads nothing any more"
