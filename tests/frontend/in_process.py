"""A frontend with all its ports in a thread of this process. A stand-in plays the engine, and another one the supervisor.

Tests use it as they use a Server, and it starts in a moment. Its answers depend on nothing but the values of a sequence and of the chunks
before it in its session, so two ways to send the same sequence get the same answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import httpx
import numpy as np
import torch
import uvloop
from msgspec.structs import replace

from service.access.scopes import Scope
from service.engine.batching import session_state
from service.errors import InvalidInput, ServiceError, TooManySessions, UnknownModel, UnknownSession
from service.exposition import expose
from service.frontend.dispatch.dispatcher import Dispatcher, channel_limit
from service.frontend.guards.connection_share import ConnectionShare
from service.frontend.http1.listener import SharedPort
from service.frontend.rest.app import build_app
from service.frontend.rest.scopes import ADMIN_PORT_SCOPES
from service.frontend.run.catalog import Catalog, ServedModel, build_catalog
from service.frontend.run.control import Control
from service.frontend.run.frontend import Frontend, SupervisorClient
from service.frontend.server import AdminPort, FrontendServer, _config
from service.ipc.channel import Channel, Frame, encode, pair
from service.ipc.connection_counts import ConnectionCounts, Port
from service.ipc.messages.inference import Answer, Cancel, EngineStatus, LoadedModel, RecordTrace, Request, TrialEnded
from service.ipc.messages.message import Done, Refusal
from service.ipc.messages.models import READY, IndexEntry, ModelKey
from service.ipc.messages.sessions import EndSession, ExportSession, FindSession, ImportSession, SessionFound, session_tenant
from service.ipc.quota_counts import QuotaCounts
from service.ipc.session_file import StateOrigin
from service.log import Log
from service.metrics import Metrics, Snapshot
from service.modeling.spec import ModelSpec
from service.settings import Settings
from service.supervisor.repository import Repository
from tests.frontend.dispatch.frames import answer_frame, requests_of
from tests.serving import LIMIT_SECONDS, Server

STREAMS = ("accumulator", "forecaster", "numbers", "sensors", "speller")
"""Models whose sequences may arrive in chunks."""
EMBEDDING_WIDTH, STEP_WIDTH = 8, 5


class StandInEngine:
    """Answers requests in the event loop of a frontend. While it is held, requests wait."""

    def __init__(self, catalog: Catalog) -> None:
        self.held = False
        self.refusal: ServiceError | None = None
        """The answer to all requests, if the engine refuses them."""
        self.waiting: dict[int, Frame] = {}
        self.cancelled = 0
        self.received: list[Frame] = []
        """All requests."""
        self.last_call: object = None
        """The last message about a session, or for a trace."""
        self._catalog = catalog
        self._sessions: dict[str, tuple[ModelKey, int, int]] = {}
        """The model, the steps, and a checksum of their values."""

    def attach(self, dispatcher: Dispatcher) -> None:
        near, far = pair()
        self._channel = Channel(near)
        dispatcher.attach(Channel(far))
        models = [
            LoadedModel(
                model.spec.name, model.version, "cpu", ["stand-in"], model.spec.name in STREAMS, generation=model.generation
            )
            for model in self._catalog.served
        ]
        self._send(encode(EngineStatus(models)))
        for model in models:
            self._send(encode(TrialEnded(model.key, ran=True)))
        asyncio.get_running_loop().add_reader(near, self._read)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.fileno())
        loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def release(self) -> None:
        """Answer the requests that wait, the last one first, and later requests at once."""
        self.held = False
        for frame in reversed(list(self.waiting.values())):
            self._reply(frame)
        self.waiting.clear()

    def _send(self, data: bytes) -> None:
        self._channel.send(data)
        self._flush()

    def _flush(self) -> None:
        self._channel.flush()
        loop = asyncio.get_running_loop()
        if self._channel.outgoing:
            loop.add_writer(self._channel.fileno(), self._flush)
        else:
            loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        for frame in [part for whole in self._channel.receive() for part in requests_of(whole)]:
            if isinstance(frame.message, Cancel):
                self.cancelled += 1
                self.waiting.pop(frame.id, None)
                continue
            if isinstance(frame.message, Request):
                self.received.append(frame)
                if self.held:
                    self.waiting[frame.id] = replace(frame, tail=bytes(frame.tail))
                    continue
            self._reply(frame)

    def _reply(self, frame: Frame) -> None:
        message, data = frame.message, bytes(frame.tail)
        try:
            if isinstance(message, Request):
                self._send(answer_frame(frame.id, *self._run(message, data)))
                return
            reply, tail = self._call(message)
        except ServiceError as error:
            reply, tail = Refusal.of(error), b""
        if reply is not None:
            self._send(encode(reply, frame.id, (tail,)))

    def _call(self, message: Any) -> tuple[Any, bytes]:
        """Return the reply to a message about a session or for a trace, None for other messages."""
        if not isinstance(message, EndSession | ExportSession | FindSession | ImportSession | RecordTrace):
            return None, b""
        self.last_call = message
        if isinstance(message, RecordTrace):
            return Done(), b"[]"
        if isinstance(message, ImportSession):
            self._check_limit(message.session, message.session_limit)
            origin = message.origin
            self._sessions[message.session] = (ModelKey(origin.model, origin.version), origin.steps, 0)
        elif isinstance(message, FindSession):
            return SessionFound(self._sessions.get(message.session, (None,))[0]), b""
        else:
            _, steps, _ = self._session(message.session)
            if isinstance(message, ExportSession):
                return Done(), session_state.pack({"0.hidden": torch.zeros(1)}, StateOrigin("sensors", "1", "", steps))
            del self._sessions[message.session]
        return Done(), b""

    def _session(self, name: str) -> tuple[ModelKey, int, int]:
        if name not in self._sessions:
            raise UnknownSession("the session is not open", field="session")
        return self._sessions[name]

    def _check_limit(self, name: str, limit: int) -> None:
        same = [other for other in self._sessions if session_tenant(other) == session_tenant(name) and other != name]
        if limit and len(same) >= limit:
            raise TooManySessions("the tenant has too many sessions", retry_after=1)

    def _run(self, request: Request, data: bytes) -> tuple[Answer, bytes]:
        if self.refusal is not None:
            raise self.refusal
        spec, session = self._catalog[request.key].spec, request.session
        steps = checksum = 0
        if session is not None:
            if request.model not in STREAMS:
                raise InvalidInput(f"{request.model} has no sessions", field="session")
            if request.session_starts is False:
                self._session(session)
            if session not in self._sessions:
                self._check_limit(session, request.session_limit)
            if not request.session_starts:
                _, steps, checksum = self._sessions.get(session, (request.key, 0, 0))
        size, begin, checksums = spec.input.step_bytes, 0, list[list[int]]()
        for length in request.lengths:
            checksums.append([])
            for at in range(begin, begin + length):
                checksum = zlib.crc32(data[at * size : (at + 1) * size], checksum)
                checksums[-1].append(checksum)
            begin += length
            if session is None:
                checksum = 0
        if session is not None:
            steps += sum(request.lengths)
            self._sessions[session] = (request.key, steps, checksum)
            if request.session_ends:
                del self._sessions[session]
        arrays = arrays_of(spec, request, checksums)
        shapes: dict[str, Any] = {name: array.shape for name, array in arrays.items()}
        answer = Answer(**shapes, steps=request.lengths, session_steps=steps)
        return answer, b"".join(array.tobytes() for array in arrays.values())


def arrays_of(spec: ModelSpec, request: Request, checksums: Sequence[Sequence[int]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an answer. checksums: of the values up to each step, by sequence."""
    head: Any = spec.head
    last = [steps[-1] if steps else 0 for steps in checksums]
    each = [value for steps in checksums for value in steps]
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    match head.kind:
        case "classify":
            numbers = _numbers(last, len(head.labels))
            arrays["scores"] = numbers / numbers.sum(1, keepdims=True)
        case "regress":
            arrays["scores"] = _numbers(last, head.outputs)
        case "tag":
            arrays |= {"scores": _numbers(each, 1), "picks": (_numbers(each, 1) * len(head.labels)).astype("i4")}
        case "span":
            arrays |= {"scores": _numbers(last, 1), "picks": np.zeros((len(last), 2), "i4")}
        case "next":
            arrays |= {"scores": -np.sort(-_numbers(last, head.top)), "picks": (_numbers(last, head.top) * 9).astype("i4")}
    if head.kind == "embed" or request.returns.embedding:
        arrays["embedding"] = _numbers(last, EMBEDDING_WIDTH)
    if head.kind == "sequence" or request.returns.sequence:
        arrays["sequence"] = _numbers(each, STEP_WIDTH)
    return arrays


def _numbers(seeds: Sequence[int], count: int) -> np.ndarray[Any, Any]:
    """Return a row of numbers from 0 to 1 for each seed."""
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2_654_435_761)
    mixed = (np.array(seeds, np.uint64)[:, None] + places) * np.uint64(40_503) % np.uint64(65_521)
    return ((mixed + np.uint64(1)) / np.uint64(65_522)).astype("f4").reshape(len(seeds), count)


class StandInSupervisor:
    """Answers the calls of a frontend. Models are served again after they were loaded."""

    def __init__(self) -> None:
        self.frontend: Frontend
        self._unloaded = set[str]()

    def listen(self, frontend: Frontend) -> None:
        """As Control does. Nothing calls the frontend."""

    def ready(self) -> None:
        """Do nothing: the engine is attached before the ports open."""

    async def scrape(self) -> Snapshot:
        return self.frontend.metrics.snapshot()

    async def index(self) -> list[IndexEntry]:
        return [IndexEntry(model.spec.name, model.version, READY) for model in self.frontend.catalog.served]

    async def load(self, name: str, policy: str | None = None) -> None:
        self._serve(name, self._unloaded.discard)

    async def unload(self, name: str) -> None:
        self._serve(name, self._unloaded.add)

    def _serve(self, name: str, change: Callable[[str], None]) -> None:
        keys = list(self.frontend.catalog._known)
        if not any(key.name == name for key in keys):
            raise UnknownModel(f"unknown model {name}", field="model")
        change(name)
        self.frontend.catalog.serve([key for key in keys if key.name not in self._unloaded], {})


class InProcess(Server):
    """A frontend in a thread, with the methods of a Server, except those for its processes."""

    def __init__(
        self,
        models: Path,
        scratch: Path,
        *,
        admin: bool,
        run: Callable[..., Any],
        quota_counts: QuotaCounts,
        settings: Settings,
    ) -> None:
        self.log_file = scratch / f"log-{id(self)}"
        self._descriptor = os.open(self.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        log, metrics = Log("frontend", self._descriptor), Metrics()
        catalog = build_catalog(Repository(models).readable_manifest(), log, strict=True)
        supervisor = StandInSupervisor()
        dispatcher = Dispatcher(metrics, channel_limit(settings), lambda: None)
        self.engine = StandInEngine(catalog)
        self.frontend = supervisor.frontend = Frontend(settings, catalog, dispatcher, metrics, log, supervisor, quota_counts)
        metrics.start(model.key.labels for model in catalog.served)
        self._listening = {port: socket.create_server(("127.0.0.1", 0), backlog=256) for port in Port}
        ports = {
            port: SharedPort(listening, ConnectionShare(ConnectionCounts.create(1).on_port(port), 0))
            for port, listening in self._listening.items()
        }
        places = {port: listening.getsockname()[1] for port, listening in self._listening.items()}
        kind = "https" if settings.tls_cert else "http"
        self.address, self.grpc = f"{kind}://127.0.0.1:{places[Port.HTTP]}", f"127.0.0.1:{places[Port.GRPC]}"
        self.admin = f"{kind}://127.0.0.1:{places[Port.ADMIN]}" if admin else ""
        scopes = frozenset(Scope) - ADMIN_PORT_SCOPES if admin else frozenset(Scope)
        config = _config(self.frontend, build_app(self.frontend, scopes, places[Port.GRPC]))
        admin_port = None
        if admin:
            admin_port = AdminPort(
                ports[Port.ADMIN], _config(self.frontend, build_app(self.frontend, ADMIN_PORT_SCOPES | {Scope.PUBLIC}))
            )
            admin_port.config.load()
        self._server = FrontendServer(
            config, cast(Control, supervisor), self.frontend, ports[Port.HTTP], ports[Port.GRPC], admin_port, is_restart=False
        )
        self.client = httpx.Client(base_url=self.address, timeout=30, trust_env=False, verify=False)
        self._started = Future[None]()
        self._thread = threading.Thread(target=lambda: run(self._serve()), name="frontend")
        self._thread.start()
        self._started.result(LIMIT_SECONDS)

    def scrape(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the text of /metrics. The thread of the frontend makes it as if a client had asked: keys do not matter."""
        return expose(self.call(self.frontend.metrics.snapshot), "").text.decode()

    def call(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function that runs in the thread of the frontend."""

        async def run() -> Any:
            return function()

        return self.run(run())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that runs in the thread of the frontend."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_SECONDS)

    @contextmanager
    def held(self) -> Iterator[StandInEngine]:
        """The engine answers nothing within this context, and then everything."""
        self.engine.held = True
        try:
            yield self.engine
        finally:
            if self._thread.is_alive():
                self.call(self.engine.release)

    def begin_to_stop(self) -> None:
        """Drain, as at the end of the lame-duck time after SIGTERM."""
        self._server.should_exit = True

    def stop(self) -> None:  # type: ignore[override]
        """Drain, and wait for the end."""
        self.begin_to_stop()
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.client.close()
        self.stop()
        for listening in self._listening.values():
            listening.close()
        os.close(self._descriptor)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.attach(self.frontend.dispatcher)
        await self.frontend.dispatcher.wait_for_engine(LIMIT_SECONDS)
        started = self._server.startup

        async def startup(sockets: Any = None) -> None:
            with patch("signal.signal"):  # only the main thread may set a handler
                await started(sockets)
            self._started.set_result(None)

        self._server.startup = startup  # type: ignore[method-assign]
        try:
            await self._server.serve(sockets=[])
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise
        finally:
            self.engine.close()
            self.frontend.dispatcher.close()


@contextmanager
def in_process(
    models: Path,
    scratch: Path,
    *,
    admin: bool = False,
    run: Callable[..., Any] = uvloop.run,
    quota_counts: QuotaCounts | None = None,
    **settings: Any,
) -> Iterator[InProcess]:
    """Run a frontend until the end of the block. Then print its log, which pytest shows for a failed test.

    run: asyncio.run makes an event loop whose timers `late_timers` sees.
    """
    values: dict[str, Any] = {
        "default_deadline_ms": 60_000,
        "max_memory_share": 1,
        "models": str(models),
        "drain_seconds": 5,
    } | settings
    if admin:
        values["admin_port"] = 0
    counts = quota_counts or QuotaCounts.private()
    service = InProcess(models, scratch, admin=admin, run=run, quota_counts=counts, settings=Settings(**values))
    try:
        yield service
    finally:
        service.close()
        print(service.log_file.read_text())


def late_timers(service: InProcess) -> set[asyncio.TimerHandle]:
    """Return the timers in the loop of a frontend that are due long after the longest wait of a test, and after every deadline."""

    def read() -> set[asyncio.TimerHandle]:
        loop: Any = asyncio.get_running_loop()
        late = loop.time() + 1.5 * LIMIT_SECONDS
        return {timer for timer in loop._scheduled if not timer.cancelled() and timer.when() > late}

    timers: set[asyncio.TimerHandle] = service.call(read)
    return timers


def frontend_of(dispatcher: Dispatcher, metrics: Metrics, *specs: ModelSpec) -> Frontend:
    """Return a frontend without ports and without a supervisor that serves version 1 of some models."""
    catalog = Catalog([ServedModel(spec, "1", None) for spec in specs], {})
    return Frontend(Settings(), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
