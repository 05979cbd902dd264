"""A closed connection is freed at once, however it ended. A garbage collection of many connections would take long."""

from __future__ import annotations

import asyncio
import json
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import uvicorn
from uvicorn.server import ServerState

from loadtest.oip_requests import PATH
from service.errors import UnknownSession
from service.frontend import http_protocol
from service.frontend.app import build_app
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http2 import connection
from service.frontend.http2.connection import Http2Connection
from service.frontend.http2.floods import Floods
from service.frontend.http_protocol import HttpProtocol
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.oip.grpc_application import GrpcApplication
from service.frontend.oip.grpc_calls import GrpcShutdown
from service.frontend.oip.grpc_methods import rpc_handlers
from service.frontend.oip.grpc_server import _limits
from service.frontend.oip.grpc_wire import frame_message
from service.frontend.server import build_hot_path
from service.frontend.start_queue import StartQueue
from service.frontend.websocket_protocol import WebSocketProtocol
from service.ipc.channel import Frame, encode
from service.ipc.messages import Answer, EndSession, Refusal, Request
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests import models
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run
from tests.frontend.http2 import peer
from tests.frontend.oip.messages import tensors
from tests.raw_websocket import CLOSE, CONTINUATION, TEXT, frame, handshake
from tests.serving import LIMIT_SECONDS

SCORES = np.array([[0.25, 0.5, 0.25]], np.float32)
BODY = json.dumps({"model": "words", "inputs": [[1, 2, 3]]}).encode()
LATE_BODY = json.dumps({"model": "words", "inputs": [[1, 2, 3, 1]]}).encode()
"""A request with four time steps is not answered."""
LATE_STEPS = 4
CHUNK, LATE_CHUNK = (b'{"input": [%b]}' % steps for steps in (b"1, 2, 3", b"1, 2, 3, 1"))
SENT = b""
"""Stands for a reply: the client leaves once the engine has its request."""


class Conversation(NamedTuple):
    """The bytes that a client sends, and the reply after which it aborts the connection. opening: a handshake before the bytes."""

    data: bytes
    reply: bytes = SENT
    opening: bytes = b""


def post(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(("POST /infer HTTP/1.1", "Host: localhost", *headers, "", "")).encode() + body


def hot(body: bytes) -> bytes:
    return post(body, f"Content-Length: {len(body)}")


def general(body: bytes) -> bytes:
    return post(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "Transfer-Encoding: chunked")


def socket(*frames: bytes, reply: bytes = SENT) -> Conversation:
    return Conversation(b"".join(frames), reply, handshake("model=words"))


HTTP = {
    "hot request": Conversation(hot(BODY), b'"outputs"'),
    "general request": Conversation(general(BODY), b'"outputs"'),
    "running hot request": Conversation(hot(LATE_BODY)),
    "running general request": Conversation(general(LATE_BODY)),
    "waiting hot requests": Conversation(hot(LATE_BODY) + hot(BODY) * 3),
    "waiting general requests": Conversation(general(LATE_BODY) + general(BODY) * 3),
    "wrong handshake": Conversation(handshake().replace(b"Version: 13", b"Version: 1"), b"HTTP/1.1 4"),
    "incomplete body": Conversation(hot(BODY) + hot(BODY)[:-1], b'"outputs"'),
    "incomplete chunk": Conversation(hot(BODY) + general(BODY)[:-9], b'"outputs"'),
    "no HTTP": Conversation(b"\0\r\n\r\n", b"not valid HTTP"),
    "refused head": Conversation(b"GET /models HTTP/1.1\r\n\r\n", b"Host"),
    "refusal behind a reply": Conversation(general(LATE_BODY) + b"GET /models HTTP/1.1\r\n\r\n"),
    "unknown upgrade": Conversation(
        b"GET /models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"200"
    ),
}
WEBSOCKET = {
    "closed socket": socket(frame(TEXT, CHUNK), frame(CLOSE, struct.pack(">H", 1000)), reply=b"\x88\x02\x03\xe8"),
    "socket that is cut off": socket(frame(TEXT, CHUNK), reply=b'"outputs"'),
    "running chunk": socket(frame(TEXT, LATE_CHUNK)),
    "running chunks": socket(frame(TEXT, CHUNK), *[frame(TEXT, LATE_CHUNK)] * 2),
    "incomplete frame": socket(frame(TEXT, CHUNK), frame(TEXT, CHUNK)[:-1], reply=b'"outputs"'),
    "incomplete message": socket(frame(TEXT, CHUNK), frame(TEXT, CHUNK, last=False), reply=b'"outputs"'),
    "wrong frame": socket(frame(CONTINUATION, CHUNK), reply=b"\x88"),
    "wrong reason": socket(frame(CLOSE, b"\x03\xe8\xff"), reply=b"\x88"),
    "no UTF-8": socket(frame(TEXT, b"\xff"), reply=b"\x88"),
    "refused handshake": Conversation(handshake("model=nobody"), b"404"),
    "unknown path": Conversation(handshake().replace(b"/stream", b"/other"), b"404"),
}


def call(path: str, *messages: bytes, stream: int = 1, ended: bool = True) -> bytes:
    fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    head = peer.frame(peer.HEADERS, peer.END_HEADERS, stream, peer.block(*fields, path=path.encode()))
    data = b"".join(map(frame_message, messages))
    return head + peer.frame(peer.DATA, peer.END_STREAM if ended else 0, stream, data)


def infer(steps: int, **fields: Any) -> bytes:
    ids = ("ids", "INT32", [1, steps], struct.pack(f"<{steps}i", *[1] * steps))
    request: bytes = tensors(ids, **fields).SerializeToString()
    return request


SERVICE = PATH.rpartition("/")[0]
STREAM, LIVE = f"{SERVICE}/ModelStreamInfer", f"{SERVICE}/ServerLive"
GREETING = peer.PREFACE + peer.settings()
OK = b"grpc-status\x010"
GRPC = {
    "hot call": Conversation(GREETING + call(PATH, infer(3)), OK),
    "running hot call": Conversation(GREETING + call(PATH, infer(LATE_STEPS))),
    "malformed hot call": Conversation(GREETING + call(PATH, b"\xff"), b"grpc-status\x013"),
    "other call": Conversation(GREETING + call(LIVE, b""), OK),
    "refused call": Conversation(GREETING + call("/nothing", b""), b"grpc-status\x0212"),
    "incomplete call": Conversation(GREETING + call(LIVE, b"") + call(PATH, infer(3)[:-1], stream=3, ended=False), OK),
    "reset call": Conversation(GREETING + call(STREAM, infer(3), ended=False) + peer.reset(1) + call(LIVE, b"", stream=3), OK),
    "call after a fault": Conversation(GREETING + call(STREAM, infer(3), ended=False) + peer.frame(peer.PING), b"PING"),
    "stream": Conversation(GREETING + call(STREAM, infer(3), infer(3)), OK),
    "open stream": Conversation(GREETING + call(STREAM, infer(3), ended=False), b"scores"),
    "running stream": Conversation(GREETING + call(STREAM, infer(LATE_STEPS), infer(3), ended=False)),
    "stream that ends in a message": Conversation(
        GREETING + call(STREAM, infer(3)).replace(b"\0\0\0\0", b"\0\0\0\1", 1), b"grpc-status"
    ),
    "no HTTP/2": Conversation(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/2"),
}


CONVERSATIONS = {"http": HTTP, "websocket": WEBSOCKET, "grpc": GRPC}
PROTOCOLS: dict[str, tuple[type, ...]] = {
    "http": (HttpProtocol,),
    "websocket": (HttpProtocol, WebSocketProtocol),
    "grpc": (Http2Connection,),
}
"""The classes with an object for each connection."""


@asynccontextmanager
async def limited(problem: str) -> AsyncIterator[None]:
    """Limit the time of a wait. problem: the meaning of reaching the limit."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise AssertionError(f"{problem}: {error!r}") from error


class Ports:
    """The ports of a frontend, and the engine that it has met."""

    def __init__(self, frontend: Frontend, engine: EngineProcess) -> None:
        self._frontend = frontend
        self._engine = engine
        self._config = uvicorn.Config(
            build_app(frontend), http=HttpProtocol, ws=WebSocketProtocol, log_config=None, lifespan="off"
        )
        self._config.load()
        self._state, self._hot_path = ServerState(), build_hot_path(frontend)
        shutdown = GrpcShutdown()
        self.application = GrpcApplication(frontend, [rpc_handlers(frontend, shutdown)], shutdown)
        self._grpc, self._floods = set[Http2Connection](), Floods()
        self._late = asyncio.Event()

    def http(self) -> asyncio.Protocol:
        return HttpProtocol(self._config, self._state, {}, hot_path=self._hot_path)

    @property
    def sockets(self) -> list[WebSocketProtocol]:
        """The open WebSockets."""
        return [opened for opened in self._state.connections if isinstance(opened, WebSocketProtocol)]

    def grpc(self) -> asyncio.Protocol:
        return Http2Connection(self.application, _limits(self._frontend.settings), self._grpc, self._floods)

    async def answer(self) -> None:
        """Answer the requests to the engine except requests with LATE_STEPS."""
        while True:
            for sent in await self._engine.frames(1):
                self._answer_frame(sent)

    def _answer_frame(self, sent: Frame) -> None:
        if isinstance(sent.message, EndSession):
            self._engine.send(encode(Refusal.of(UnknownSession("it ended")), sent.id))
        elif isinstance(sent.message, Request) and sent.message.lengths == [LATE_STEPS]:
            self._late.set()
        elif isinstance(sent.message, Request):
            self._engine.send(encode(Answer(scores=SCORES.shape, steps=[3]), sent.id, (SCORES.tobytes(),)))

    async def hold(self, make_protocol: Callable[[], asyncio.Protocol], conversation: Conversation, name: str) -> None:
        """Hold a conversation."""
        server = await asyncio.get_running_loop().create_server(make_protocol, "127.0.0.1")
        self._late.clear()
        try:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            async with limited(f"{name} gets no reply"):
                if conversation.opening:
                    writer.write(conversation.opening)
                    await reader.readuntil(b"\r\n\r\n")
                writer.write(conversation.data)
                await (reader.readuntil(conversation.reply) if conversation.reply else self._late.wait())
            writer.transport.abort()
        finally:
            server.close()


def watched(kinds: tuple[type, ...], monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return a list of references to the objects of some classes that are created from now on. They do not keep the objects."""
    references: list[weakref.ref[Any]] = []

    def watch(kind: type) -> None:
        create = kind.__init__  # type: ignore[misc]

        def watched_create(self: Any, *arguments: Any, **options: Any) -> None:
            references.append(weakref.ref(self))
            create(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", watched_create)

    for kind in kinds:
        watch(kind)
    return references


def late_timers() -> set[asyncio.TimerHandle]:
    """Return the timers of the running loop that are due after the longest wait of a test."""
    loop: Any = asyncio.get_running_loop()
    return {timer for timer in loop._scheduled if not timer.cancelled() and timer.when() > loop.time() + LIMIT_SECONDS}


class BusyTicks(StartQueue):
    """Every request waits for the next tick."""

    def must_wait(self, now: float) -> bool:
        return True


def with_ports(
    folder: Path, test: Callable[[Frontend, Ports], Awaitable[None]], queue: type[StartQueue], **settings: Any
) -> None:
    """Run a test with the ports of a frontend, whose requests wait in a queue of this type."""
    spec = models.words(folder, bidirectional=False)

    async def with_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
        catalog, engine = Catalog([ServedModel(spec, "1", None)], {}), await meet(dispatcher)
        frontend = Frontend(Settings(**settings), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
        frontend.starts = queue(frontend.settings.default_deadline_ms)
        ports = Ports(frontend, engine)
        answering = asyncio.ensure_future(ports.answer())
        await test(frontend, ports)
        answering.cancel()

    run(with_engine)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_refused_connection_leaves_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A timer closes a refused connection, and keeps its transport in memory. It ends with the connection."""
    for module in (http_protocol, connection):
        monkeypatch.setattr(module, "LINGER_SECONDS", 2 * LIMIT_SECONDS)
    refused = {"http": "no HTTP", "grpc": "no HTTP/2"}[kind]
    lost = asyncio.Event()

    async def test(_: Frontend, ports: Ports) -> None:
        before = late_timers()
        await ports.hold(ports.grpc if kind == "grpc" else ports.http, CONVERSATIONS[kind][refused], refused)
        async with limited(f"{refused} leaves its connection open"):
            await lost.wait()
        assert late_timers() <= before

    protocol: Any = PROTOCOLS[kind][0]
    lose = protocol.connection_lost

    def watched_lose(self: Any, error: Exception | None) -> None:
        lose(self, error)
        lost.set()

    monkeypatch.setattr(protocol, "connection_lost", watched_lose)
    with_ports(tmp_path, test, StartQueue)


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("queue", [StartQueue, BusyTicks])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_closed_connection_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, queue: type[StartQueue]
) -> None:
    connections = watched(PROTOCOLS[kind], monkeypatch)

    async def test(_: Frontend, ports: Ports) -> None:
        for name, conversation in CONVERSATIONS[kind].items():
            await ports.hold(ports.grpc if kind == "grpc" else ports.http, conversation, name)
            assert len(connections) == len(PROTOCOLS[kind]), name
            async with limited(f"{name} leaves its connection in memory"):
                while any(reference() is not None for reference in connections):
                    await asyncio.sleep(0.01)
            connections.clear()

    with_ports(tmp_path, test, queue)
