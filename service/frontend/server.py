"""Serve a frontend: accept connections on the shared port, run uvicorn and the gRPC server, and drain both on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.errors import StartError
from service.frontend.connection_guard import ConnectionGuard, GuardedConnection
from service.frontend.control import Control
from service.frontend.hot_calls import RequestTally
from service.frontend.http_protocol import HotPath, HttpProtocol
from service.frontend.inference import Frontend
from service.frontend.oip.grpc_server import GrpcServer
from service.frontend.oip.hot_infer import HotOipInfer
from service.frontend.rest.infer import HotInfer
from service.frontend.websocket_protocol import WebSocketProtocol
from service.log import Log

ENGINE_WAIT_SECONDS = 1.0
"""Longest wait of a restarted frontend for an engine before it accepts connections."""
PING_SECONDS = 20.0
"""Interval of WebSocket pings, and the wait for a pong before the socket is closed."""
ACCEPT_PAUSE_SECONDS, MAX_ACCEPTS = 0.001, 64
"""Pause between two rounds of accepting connections, and the most connections of one round."""
TICKS_PER_SECOND = 10
"""Calls of uvicorn's `on_tick`."""
FULL_PAUSE_SECONDS = 0.02
"""Pause before accepting a connection for which another must close."""
INVALID_HTTP = "Invalid HTTP request received."
ERROR_PAUSE_SECONDS = 1.0
"""Pause after accepting a connection has failed."""


class Listener:
    """Accepts connections on the socket that all frontends inherit, so that each frontend gets its share of them.

    The other ways to share a port break a promise that this class keeps:
    - uvicorn's `sockets=` accepts until no connection waits. The first frontend to wake would take a whole burst.
    - With SO_REUSEPORT the kernel assigns each connection to a frontend by a hash. Connections to a hanging frontend would wait although
      other frontends are free. The kernel would reset the connections that a frontend has not accepted when it dies.

    A frontend accepts one connection, pauses while the others accept, and doubles the number while connections keep waiting.
    """

    def __init__(
        self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol], make_room: Callable[[], bool]
    ) -> None:
        """make_protocol: returns the protocol for a new connection. make_room: returns whether another connection may be accepted."""
        listening.setblocking(False)
        self._listening = listening
        self._make_protocol = make_protocol
        self._make_room = make_room
        self._connecting: set[asyncio.Task[Any]] = set()
        self._reopening: asyncio.TimerHandle | None = None
        self._accepts_per_round = 1
        self._last_round = 0.0

    def open(self) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept_round)

    def close(self) -> None:
        """Stop accepting connections; other frontends accept the waiting connections."""
        if self._reopening is not None:
            self._reopening.cancel()
        asyncio.get_running_loop().remove_reader(self._listening.fileno())

    def _accept_round(self) -> None:
        now = asyncio.get_running_loop().time()
        busy = now - self._last_round < 5 * ACCEPT_PAUSE_SECONDS
        self._accepts_per_round = min(MAX_ACCEPTS, 2 * self._accepts_per_round) if busy else 1
        self._last_round = now
        try:
            for _ in range(self._accepts_per_round):
                if not self._make_room():
                    self._pause(FULL_PAUSE_SECONDS)
                    return
                self._start(self._listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # another frontend was faster, or the client disconnected
        except OSError:
            # Usually no file descriptor is left. Without the pause the event loop would do nothing but try again.
            self._pause(ERROR_PAUSE_SECONDS)
            return
        self._pause(ACCEPT_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening.fileno())
        self._reopening = loop.call_later(seconds, self.open)

    def _start(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client disconnected


class FrontendServer(uvicorn.Server):
    """uvicorn's server with a Listener for each socket, next to the gRPC server. SIGTERM drains both; SIGINT is the supervisor's.

    A restarted frontend (`is_restart`) accepts no connection before it has met an engine: clients wait in the socket's backlog instead
    of getting 503.
    """

    def __init__(
        self, config: uvicorn.Config, control: Control, frontend: Frontend, grpc: GrpcServer | None, *, is_restart: bool
    ) -> None:
        super().__init__(config)
        self._is_restart = is_restart
        self._listeners: list[Listener] = []
        self._hot_path = build_hot_path(frontend)
        self._guard = ConnectionGuard(frontend.settings, frontend.metrics, self._http_connections)
        self._control = control
        self._frontend = frontend
        self._grpc = grpc

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, and handle the supervisor's messages."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._is_restart:
            self._control.listen(self._frontend)
            await self._frontend.dispatcher.wait_for_engine(ENGINE_WAIT_SECONDS)
        await super().startup([])  # without sockets: the listeners accept instead of uvicorn
        for listening in sockets or []:
            self._listeners.append(Listener(listening, self._make_protocol, self._make_room))
            self._listeners[-1].open()
        if self._grpc is not None:
            await self._grpc.open()
        if not self._is_restart:
            self._control.listen(self._frontend)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for open requests until the drain deadline."""
        self._frontend.draining = True
        for listener in self._listeners:
            listener.close()
        closing = [super().shutdown(sockets)]
        if self._grpc is not None:
            closing.append(self._grpc.close())
        await asyncio.gather(*closing)

    async def on_tick(self, counter: int) -> bool:
        """Apply the connections' limits of time once a second: timers of each connection would cost more than its requests."""
        if counter % TICKS_PER_SECOND == 0:
            self._guard.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def _http_connections(self) -> list[GuardedConnection]:
        return [connection for connection in self.server_state.connections if isinstance(connection, HttpProtocol)]

    def _make_room(self) -> bool:
        return self._guard.make_room(len(self.server_state.connections))

    def _make_protocol(self) -> asyncio.Protocol:
        """Return a protocol for one connection, as uvicorn's own startup creates it."""
        return HttpProtocol(self.config, self.server_state, self.lifespan.state, hot_path=self._hot_path)


def build_hot_path(frontend: Frontend) -> HotPath:
    """Return the hot path that all connections of a frontend share."""
    tally = RequestTally(frontend.metrics)
    return HotPath(frontend, HotInfer(frontend, tally), HotOipInfer(frontend, tally))


class _JsonLogHandler(logging.Handler):
    """Writes the warnings of libraries as JSON lines to the service's log.

    It leaves out uvicorn's warning about a request that is not valid HTTP: clients could fill the log with it, and a metric counts them.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == INVALID_HTTP:
            return
        error = repr(record.exc_info[1]) if record.exc_info else None
        self._log.warning("library warning", message=record.getMessage().strip(), error=error)


def serve(
    app: FastAPI, frontend: Frontend, control: Control, listening: socket.socket, grpc: str | None, *, is_restart: bool
) -> None:
    """Serve until SIGTERM, with gRPC on the address `grpc`. Requests then have `drain_seconds` to finish."""
    frontend.metrics.start(model.key.labels for model in frontend.catalog.served)
    for logger in ("uvicorn.error", "grpc", "asyncio"):
        logging.getLogger(logger).addHandler(_JsonLogHandler(frontend.log))
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        loop="uvloop",
        ws=WebSocketProtocol,
        ws_max_size=frontend.settings.max_body_bytes,
        ws_ping_interval=PING_SECONDS,
        # uvicorn stops reading a socket while a message waits for its reply, so a pong may come as late as the longest deadline.
        ws_ping_timeout=PING_SECONDS + frontend.settings.max_deadline_ms / 1000,
        # Chunks are small, and a small compressed message may decompress to a large one.
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(max(1, frontend.settings.idle_seconds)),
        timeout_graceful_shutdown=max(1, round(frontend.settings.drain_seconds)),
    )
    server = FrontendServer(config, control, frontend, GrpcServer(frontend, grpc) if grpc else None, is_restart=is_restart)
    try:
        server.run(sockets=[listening])
    except StartError as error:
        control.failed(str(error))
