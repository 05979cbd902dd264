"""This frontend's end of the supervisor's control channel: engines to attach, metrics to return, models to change."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

from service.errors import InvalidModel, ModelError, Unavailable, UnknownModel
from service.frontend.run.catalog import read_served_model
from service.frontend.run.frontend import Frontend
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode, send_now
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import (
    Attach,
    CollectMetrics,
    Drain,
    Failed,
    ForgetModel,
    ListModels,
    LoadModel,
    MetricsCollected,
    ModelsListed,
    NotLoaded,
    PrepareModel,
    Ready,
    ScrapeMetrics,
    ServeModels,
    UnloadModel,
)
from service.ipc.messages.message import Done, Message, Refusal, Reply
from service.ipc.messages.models import IndexEntry, ModelKey, ModelVersion
from service.ipc.rpc import Rpc, SharedCall
from service.metrics import Snapshot, stale
from service.modeling.spec import NAME

SCRAPE_SECONDS = 0.26
"""Longest wait for the metrics that the supervisor collects: /metrics answers within 300 ms."""
FORGET_SECONDS = 0.05
"""Time between the last answer of a version and the removal of its series, in which its reply is counted."""
INDEX_SECONDS = 1.0
"""Longest wait for the supervisor's model index."""


class Control:
    """The control channel of one frontend. Calls `on_change` after each change of the served models."""

    def __init__(
        self, channel: Channel, heartbeat: Heartbeat | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._raw_channel = channel
        self._heartbeat = heartbeat
        self._on_change = on_change
        self._channel: AsyncChannel | None = None
        self._rpc = Rpc(self._send, "the supervisor")
        self._changes: set[asyncio.Task[None]] = set()
        self._last_scrape: Snapshot = {}
        self._scrapes, self._indexes = SharedCall(self._scrape), SharedCall(self._list_models)

    def listen(self, frontend: Frontend) -> None:
        """Handle messages from now on: the server accepts connections."""
        handlers: dict[type[Message], Callable[[Frame, Any, Frontend], None]] = {
            Attach: self._handle_attach,
            Drain: self._handle_drain,
            CollectMetrics: self._handle_collect_metrics,
            ForgetModel: self._handle_forget_model,
            PrepareModel: self._handle_prepare_model,
            ServeModels: self._handle_serve_models,
        }

        def handle(frame: Frame) -> None:
            if not self._rpc.handle_reply(frame) and type(frame.message) in handlers:
                handlers[type(frame.message)](frame, frame.message, frontend)

        self._last_scrape = frontend.metrics.snapshot()
        if self._heartbeat is not None:
            self._heartbeat.beat_from_loop()
        # Without the supervisor there are no ports and no engine left to drain to.
        self._channel = AsyncChannel(self._raw_channel, handle, on_close=lambda: os._exit(1))

    def ready(self) -> None:
        """Tell the supervisor that an engine has connected and requests are answered."""
        self._send(encode(Ready()))

    def failed(self, reason: str) -> None:
        """Tell the supervisor that this frontend cannot start."""
        send_now(self._raw_channel, Failed(reason))

    def not_loaded(self, message: NotLoaded) -> None:
        """Tell the supervisor that this frontend starts without a model version."""
        send_now(self._raw_channel, message)

    async def scrape(self) -> Snapshot:
        """Return the metrics of all processes, or the last known metrics when the supervisor is late."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SCRAPE_SECONDS):
                return await self._scrapes.result()
        return stale(self._last_scrape)

    async def _scrape(self) -> Snapshot:
        with contextlib.suppress(Unavailable):
            reply, _ = await self._rpc.call(ScrapeMetrics(), MetricsCollected, timeout=SCRAPE_SECONDS)
            self._last_scrape = reply.snapshot
            return self._last_scrape
        return stale(self._last_scrape)

    async def index(self) -> list[IndexEntry]:
        """Return every version in the models folder; raises Unavailable when the supervisor is late."""
        return await self._indexes.result()

    async def _list_models(self) -> list[IndexEntry]:
        reply, _ = await self._rpc.call(ListModels(), ModelsListed, timeout=INDEX_SECONDS)
        return reply.entries

    async def load(self, name: str, policy: str | None = None) -> None:
        """Serve the current content of a model's folder; raises a ServiceError."""
        _check_name(name)
        await self._rpc.call_done(LoadModel(name, policy))

    async def unload(self, name: str) -> None:
        """Stop serving a model; raises a ServiceError."""
        _check_name(name)
        await self._rpc.call_done(UnloadModel(name))

    def _send(self, frame: bytes) -> None:
        assert self._channel is not None, "listen() comes first"
        self._channel.send(frame)

    def _reply(self, frame: Frame, reply: Reply) -> None:
        self._send(encode(reply, frame.id))

    def _handle_attach(self, frame: Frame, message: Attach, frontend: Frontend) -> None:
        assert frame.attached is not None, "an Attach message carries a socket"
        frontend.dispatcher.attach(Channel(frame.attached))

    def _handle_drain(self, frame: Frame, message: Drain, frontend: Frontend) -> None:
        frontend.draining = True

    def _handle_collect_metrics(self, frame: Frame, message: CollectMetrics, frontend: Frontend) -> None:
        self._reply(frame, MetricsCollected(frontend.metrics.snapshot()))

    def _handle_forget_model(self, frame: Frame, message: ForgetModel, frontend: Frontend) -> None:
        self._start(_forget(message.key, frontend))

    def _handle_prepare_model(self, frame: Frame, message: PrepareModel, frontend: Frontend) -> None:
        async def prepare() -> None:
            try:
                await _read_new(message.model_version, frontend)
            except ModelError as error:
                self._reply(frame, Refusal.of(InvalidModel(str(error))))
            else:
                self._reply(frame, Done())

        self._start(prepare())

    def _handle_serve_models(self, frame: Frame, message: ServeModels, frontend: Frontend) -> None:
        manifest = message.manifest

        async def switch() -> None:
            for version in manifest.model_versions:
                try:
                    await _read_new(version, frontend)
                except ModelError as error:  # this frontend has started without the version
                    frontend.log.error("not loaded", model=version.name, version=version.version, error=str(error))
            frontend.serve(manifest)
            self._on_change()
            self._reply(frame, Done())

        self._start(switch())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)


def _check_name(name: str) -> None:
    """Raise UnknownModel for a string that cannot be a model's name: it may be as large as a request."""
    if not NAME.fullmatch(name):
        raise UnknownModel(f"{name[:100]!r} cannot be the name of a model: see POST /v2/repository/index", field="model")


async def _forget(key: ModelKey, frontend: Frontend) -> None:
    """Drop a version after its last reply: the message may overtake the engine's last answers, and counting these restores its series."""
    while frontend.dispatcher.has_requests_of(key):
        await asyncio.sleep(FORGET_SECONDS)
    await asyncio.sleep(FORGET_SECONDS)
    frontend.forget(key)


async def _read_new(model_version: ModelVersion, frontend: Frontend) -> None:
    """Add a version if this frontend does not know it yet. It is read in a thread, as a tokenizer may take a while."""
    if model_version.key not in frontend.catalog:
        frontend.catalog.add(await asyncio.to_thread(read_served_model, model_version))
