"""The HTTP and gRPC ports of a frontend in the event loop of a test, which also plays the engine."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import uvicorn
from uvicorn.server import ServerState

from service.errors import UnknownSession
from service.frontend.app import build_app
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http2.connection import Http2Connection
from service.frontend.http2.floods import Floods
from service.frontend.http_protocol import HttpProtocol
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.oip.grpc_application import GrpcApplication
from service.frontend.oip.grpc_calls import GrpcShutdown
from service.frontend.oip.grpc_methods import rpc_handlers
from service.frontend.oip.grpc_server import _limits
from service.frontend.server import build_hot_path
from service.frontend.start_queue import StartQueue
from service.frontend.websocket_protocol import WebSocketProtocol
from service.ipc.channel import Frame, encode
from service.ipc.messages import Answer, EndSession, Refusal, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec import ModelSpec
from service.settings import Settings
from tests import models
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run
from tests.serving import LIMIT_SECONDS

SCORES = np.array([[0.25, 0.5, 0.25]], np.float32)
LATE_STEPS = 4
"""A request with this many steps is not answered."""
BODY, LATE_BODY = (json.dumps({"model": "words", "inputs": [[1] * steps]}).encode() for steps in (3, LATE_STEPS))


def hot(body: bytes) -> bytes:
    """Return a request for the hot path."""
    return b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def frontend_of(dispatcher: Dispatcher, metrics: Metrics, *specs: ModelSpec, **settings: Any) -> Frontend:
    """Return a frontend without a supervisor that serves version 1 of some models."""
    catalog = Catalog([ServedModel(spec, "1", None) for spec in specs], {})
    return Frontend(Settings(**settings), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))


@asynccontextmanager
async def limited(problem: str) -> AsyncIterator[None]:
    """Limit the time of a wait. problem: the meaning of reaching the limit."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise AssertionError(f"{problem}: {error!r}") from error


async def until(condition: Callable[[], object]) -> None:
    async with limited("the state is not reached"):
        while not condition():
            await asyncio.sleep(0.001)


class Ports:
    """The ports of a frontend, and the engine that it has met."""

    def __init__(self, frontend: Frontend, engine: EngineProcess) -> None:
        self.frontend = frontend
        self._engine = engine
        self.config = uvicorn.Config(
            build_app(frontend), http=HttpProtocol, ws=WebSocketProtocol, log_config=None, lifespan="off"
        )
        self.config.load()
        self.state, self._hot_path = ServerState(), build_hot_path(frontend)
        shutdown = GrpcShutdown()
        self.application = GrpcApplication(frontend, [rpc_handlers(frontend, shutdown)], shutdown)
        self._grpc, self._floods = set[Http2Connection](), Floods()
        self.late = asyncio.Event()
        """Set when the engine has a request that is not answered."""

    def http(self) -> asyncio.Protocol:
        return HttpProtocol(self.config, self.state, {}, hot_path=self._hot_path)

    @property
    def sockets(self) -> list[WebSocketProtocol]:
        """The open WebSockets."""
        return [opened for opened in self.state.connections if isinstance(opened, WebSocketProtocol)]

    def grpc(self) -> asyncio.Protocol:
        return Http2Connection(self.application, _limits(self.frontend.settings), self._grpc, self._floods)

    async def answer(self) -> None:
        """Answer the requests to the engine except requests with LATE_STEPS."""
        while True:
            for sent in await self._engine.frames(1):
                self._answer_frame(sent)

    def _answer_frame(self, sent: Frame) -> None:
        if isinstance(sent.message, EndSession):
            self._engine.send(encode(Refusal.of(UnknownSession("it ended")), sent.id))
        elif isinstance(sent.message, Request) and sent.message.lengths == [LATE_STEPS]:
            self.late.set()
        elif isinstance(sent.message, Request):
            self._engine.send(encode(Answer(scores=SCORES.shape, steps=[3]), sent.id, (SCORES.tobytes(),)))


Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(make_protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[Connected]:
    """A client's connection to a port. It is aborted at the end."""
    server = await asyncio.get_running_loop().create_server(make_protocol, "127.0.0.1")
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
    finally:
        server.close()


def with_ports(
    folder: Path, test: Callable[[Ports], Awaitable[None]], queue: type[StartQueue] = StartQueue, **settings: Any
) -> None:
    """Run a test with the ports of a frontend, whose requests wait in a queue of this type."""
    spec = models.words(folder, bidirectional=False)

    async def with_engine(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine, frontend = await meet(dispatcher), frontend_of(dispatcher, metrics, spec, **settings)
        frontend.starts = queue(frontend.settings.default_deadline_ms)
        ports = Ports(frontend, engine)
        answering = asyncio.ensure_future(ports.answer())
        await test(ports)
        answering.cancel()

    run(with_engine)


def late_timers() -> set[asyncio.TimerHandle]:
    """Return the timers of the running loop that are due after the longest wait of a test."""
    loop: Any = asyncio.get_running_loop()
    return {timer for timer in loop._scheduled if not timer.cancelled() and timer.when() > loop.time() + LIMIT_SECONDS}


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
