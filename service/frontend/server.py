"""Serve a frontend: accept connections on the shared port, run uvicorn and the gRPC server, and drain both on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from service.access.scopes import Scope
from service.frontend.grpc.server import GrpcServer
from service.frontend.guards.connection_guard import ConnectionGuard, GuardedConnection
from service.frontend.http1.hot_path import HotPath
from service.frontend.http1.http_protocol import ACCEPT_SECONDS, HttpProtocol
from service.frontend.http1.key_refusals import KeyRefusals
from service.frontend.http1.listener import Listener, SharedPort
from service.frontend.http1.websocket_protocol import WebSocketProtocol
from service.frontend.oip.http_infer import HttpRunner
from service.frontend.rest.app import build_app
from service.frontend.rest.infer import InferRunner
from service.frontend.rest.scopes import ADMIN_PORT_SCOPES
from service.frontend.run.control import Control
from service.frontend.run.frontend import Frontend
from service.ipc.process_config import freeze_heap, use_huge_pages
from service.log import LogHandler

ENGINE_WAIT_SECONDS = 1.0
"""Longest wait of a restarted frontend for an engine before it accepts connections."""
PING_SECONDS = 20.0
"""Interval of WebSocket pings, and the wait for a pong before the socket is closed."""
COLLECTIONS = (700, 10, 100)
"""Thresholds of the garbage collector. With 10,000 connections a collection of the oldest generation pauses the event loop for 100 ms, so
it is ten times as rare as Python's default. Closed connections are not garbage: they are freed at once."""
TICKS_PER_SECOND = 10
"""Calls of uvicorn's `on_tick`."""
ADMIN_CONNECTIONS = 16
INVALID_HTTP = "Invalid HTTP request received."


class AdminPort(NamedTuple):
    """The admin port, and uvicorn's configuration with its application."""

    port: SharedPort
    config: uvicorn.Config


class FrontendServer(uvicorn.Server):
    """uvicorn's server with a Listener, next to the gRPC server. SIGTERM drains both; SIGINT is the supervisor's.

    A restarted frontend (`is_restart`) accepts no connection before it has met an engine: clients wait in the socket's backlog instead
    of getting 503.

    The admin port has a separate application. It accepts ADMIN_CONNECTIONS connections beyond the limit, so that administrators reach a
    frontend whose connections are all in use.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        control: Control,
        frontend: Frontend,
        http: SharedPort,
        grpc: SharedPort | None,
        admin: AdminPort | None,
        *,
        is_restart: bool,
    ) -> None:
        """grpc, admin: None without these ports."""
        super().__init__(config)
        self._is_restart = is_restart
        self._hot_path = build_hot_path(frontend)
        self._listeners = [self._listen(http, config, self._hot_path, self._make_room)]
        self._paths = [self._hot_path]
        if admin is not None:
            admin_path = HotPath(frontend)
            self._listeners.append(self._listen(admin.port, admin.config, admin_path, self._make_admin_room))
            self._paths.append(admin_path)
        self._guard = ConnectionGuard(frontend.settings, frontend.metrics, self._connections, frontend.internal_error)
        self._control = control
        self._frontend = frontend
        self._grpc = GrpcServer(frontend, grpc, self._make_room) if grpc is not None else None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, and handle the supervisor's messages."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._is_restart:
            self._control.listen(self._frontend)
            await self._frontend.dispatcher.wait_for_engine(ENGINE_WAIT_SECONDS)
        await super().startup([])  # without sockets: the listener accepts instead of uvicorn
        for listener in self._listeners:
            listener.open()
        if self._grpc is not None:
            self._grpc.open()
        if not self._is_restart:
            self._control.listen(self._frontend)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for open requests until the drain deadline."""
        self._frontend.draining = True
        for listener in self._listeners:
            listener.close()
        closing = [self._close_connections()]
        if self._grpc is not None:
            closing.append(self._grpc.close())
        await asyncio.gather(*closing)
        self._frontend.decoder.close()

    async def _close_connections(self) -> None:
        await asyncio.sleep(ACCEPT_SECONDS)  # the connections that were accepted last are open then
        await super().shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Do the work that is due now. An unexpected exception is reported: passed on to uvicorn, it would end the frontend."""
        try:
            self._run_periodic_work(counter)
        except Exception as error:
            self._frontend.internal_error(error)
        return await super().on_tick(counter)

    def _run_periodic_work(self, counter: int) -> None:
        """Apply the connections' limits of time once a second: timers of each connection would cost more than its requests.

        Each tick looks at a part of many connections: a look at all of them would delay the requests of this moment.
        """
        self._frontend.limits.memory.update()
        self._guard.free_unread(self._frontend.limits.memory.excess_bytes)
        for listener in self._listeners:
            listener.publish()
        if self._grpc is not None:
            self._grpc.publish()
            if self._frontend.draining:
                self._grpc.leave()
        if counter % TICKS_PER_SECOND == 0:
            now = asyncio.get_running_loop().time()
            self._guard.sweep(now)
            self._reload_access()
            if self._grpc is not None:
                self._grpc.sweep(now)
        else:
            self._guard.continue_sweep(asyncio.get_running_loop().time())

    def _reload_access(self) -> None:
        access, log = self._frontend.access, self._frontend.log
        if access.reload_keys(log):
            for path in self._paths:
                path.heads.forget()
            access.streams.recheck()
        access.reload_secrets(log)

    def _connections(self) -> list[GuardedConnection]:
        open_connections = self.server_state.connections
        http = [connection for connection in open_connections if isinstance(connection, HttpProtocol | WebSocketProtocol)]
        return [*http, *self._grpc.connections] if self._grpc is not None else [*http]

    def _make_room(self, connecting: int) -> bool:
        """Clients of the main ports close no connection of an administrator."""
        main = self._hot_path
        return self._guard.make_room(
            self._open_connections, connecting, lambda one: not isinstance(one, HttpProtocol) or one.hot_path is main
        )

    def _make_admin_room(self, connecting: int) -> bool:
        return self._guard.make_room(self._open_connections - ADMIN_CONNECTIONS, connecting)

    @property
    def _open_connections(self) -> int:
        return len(self.server_state.connections) + (len(self._grpc.connections) if self._grpc is not None else 0)

    def _listen(
        self, port: SharedPort, config: uvicorn.Config, hot_path: HotPath, make_room: Callable[[int], bool]
    ) -> Listener:
        """Return a listener for HTTP, with protocols as uvicorn's own startup creates them."""

        def make_protocol() -> asyncio.Protocol:
            return HttpProtocol(config, self.server_state, self.lifespan.state, hot_path=hot_path)

        return Listener(
            port, make_protocol, make_room, lambda: len(self.server_state.connections), lambda: self._frontend.access.tls.http
        )


def build_hot_path(frontend: Frontend) -> HotPath:
    """Return the hot path that all connections of a frontend share."""
    return HotPath(frontend, InferRunner(frontend), HttpRunner(frontend), KeyRefusals(frontend))


class _LibraryLogHandler(LogHandler):
    """Leaves out uvicorn's warning about a request that is not valid HTTP: a metric counts them."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg != INVALID_HTTP:
            super().emit(record)


def serve(
    frontend: Frontend,
    control: Control,
    http: SharedPort,
    grpc: SharedPort | None,
    admin: SharedPort | None,
    *,
    is_restart: bool,
) -> None:
    """Serve until SIGTERM, with gRPC and administration if they have ports. Requests then have `drain_seconds` to finish."""
    frontend.metrics.start(model.key.labels for model in frontend.catalog.served)
    for logger in ("uvicorn.error", "grpc", "asyncio"):
        logging.getLogger(logger).addHandler(_LibraryLogHandler(frontend.log))
    grpc_port = None if grpc is None else grpc.listening.getsockname()[1]
    if admin is None:
        config, admin_port = _config(frontend, build_app(frontend, grpc_port=grpc_port)), None
    else:
        config = _config(frontend, build_app(frontend, frozenset(Scope) - ADMIN_PORT_SCOPES, grpc_port))
        admin_port = AdminPort(admin, _config(frontend, build_app(frontend, ADMIN_PORT_SCOPES | {Scope.PUBLIC})))
        admin_port.config.load()  # uvicorn loads only the configuration of the server itself
    freeze_heap()
    use_huge_pages()
    gc.set_threshold(*COLLECTIONS)
    server = FrontendServer(config, control, frontend, http, grpc, admin_port, is_restart=is_restart)
    server.run(sockets=[http.listening])


def _config(frontend: Frontend, app: FastAPI) -> uvicorn.Config:
    app.openapi()  # keeps the document: making it for the first client would occupy the event loop for 40 ms
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        loop="uvloop",
        ws=WebSocketProtocol,
        ws_ping_interval=PING_SECONDS,
        # uvicorn stops reading a socket while a message waits for its reply, so a pong may come as late as the longest deadline.
        ws_ping_timeout=PING_SECONDS + frontend.settings.max_deadline_ms / 1000,
        lifespan="off",
        log_config=None,
        access_log=False,
        headers=[("x-content-type-options", "nosniff")],
        server_header=False,
        forwarded_allow_ips="127.0.0.1",  # only a proxy on this machine names its clients. By default a variable of uvicorn adds others
        timeout_keep_alive=round(max(1, frontend.settings.idle_seconds)),
        timeout_graceful_shutdown=max(1, round(frontend.settings.drain_seconds)),
    )
