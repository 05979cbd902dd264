"""The front process: one uvicorn server on the port that the supervisor opened, and the supervisor's words beside it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from service.errors import StartError
from service.frontend.control import Control
from service.frontend.inference import Frontend
from service.frontend.oip.grpc_server import GrpcServer
from service.frontend.rest.websocket import SERVICE_RESTART
from service.log import Log

MEETING_SECONDS = 1.0
"""How long a front that follows another waits for an engine before it says that there is none."""
KEEP_ALIVE_SECONDS = 15
PING_SECONDS = 20.0
"""A socket is asked so often whether somebody is still there, and closed when nobody answers for so long."""
MOMENT_SECONDS, MOST_AT_ONCE = 0.001, 64
"""How long connections are left to other fronts after some were taken, and how many are taken at most before that."""
PAUSE_SECONDS = 1.0
"""How long no connection is taken when one could not be."""
GOODBYE_SECONDS = 1.0
"""How long the end of the service waits for a caller to close his side of a socket."""


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's, which may not hold up the end of the service, and may not be cut off by it either."""

    def shutdown(self) -> None:
        """The service ends: whoever serves the socket hears of it behind the messages that came, answers these, and closes."""
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self.close_timeout = GOODBYE_SECONDS
            self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVICE_RESTART, "reason": None})
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # What asks for an upgrade and is no handshake would keep its connection for nothing.
            self.transport.close()

    def handle_parser_exception(self) -> None:
        """A message is too large, or none at all. Who closes while data comes takes back what he has just sent: the code that says why."""
        if self.close_timer is not None:
            return
        assert self.conn.close_sent is not None, "the parser has failed the connection"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": self.conn.close_sent.code, "reason": None})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(GOODBYE_SECONDS, self.transport.close)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            # A handshake that is refused is one that was answered: an error would be logged for it.
            self.handshake_complete = True


class Listener:
    """The port that all fronts share. A front that took all connections that wait there, as servers do by themselves, would leave none to
    the others: it takes one, leaves them a moment, and takes twice as many while there still are some."""

    def __init__(self, listening: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """make: what serves one connection."""
        listening.setblocking(False)
        self._listening = listening
        self._make = make
        self._taken: set[asyncio.Task[Any]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._at_once = 1
        self._took_at = 0.0

    def open(self) -> None:
        """Take connections from now on."""
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._take)

    def close(self) -> None:
        """Take none any more."""
        if self._later is not None:
            self._later.cancel()
        asyncio.get_running_loop().remove_reader(self._listening.fileno())

    def _take(self) -> None:
        now = asyncio.get_running_loop().time()
        self._at_once = min(MOST_AT_ONCE, 2 * self._at_once) if now - self._took_at < 5 * MOMENT_SECONDS else 1
        self._took_at = now
        try:
            for _ in range(self._at_once):
                self._begin(self._listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # another front was faster, or the caller has gone
        except OSError:
            # As a rule there are no descriptors left: the loop would do nothing but try.
            self._pause(PAUSE_SECONDS)
            return
        self._pause(MOMENT_SECONDS)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening.fileno())
        self._later = loop.call_later(seconds, self.open)

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._taken.add(task)
        task.add_done_callback(self._taken.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection)
        except OSError:
            connection.close()  # the caller has gone


class Server(uvicorn.Server):
    """uvicorn, with the gRPC door beside it, listening to the supervisor once both take connections. SIGTERM drains it; an interrupt is
    not its business.

    follows: another front was here before, and engines are likely to be there: what waits on the port is not taken before one is met.
    """

    def __init__(
        self, config: uvicorn.Config, control: Control, frontend: Frontend, grpc: GrpcServer | None, *, follows: bool
    ) -> None:
        super().__init__(config)
        self._follows = follows
        self._listeners: list[Listener] = []
        self._control = control
        self._frontend = frontend
        self._grpc = grpc

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._follows:
            self._control.listen(self._frontend)
            await self._frontend.engines.wait_for_engine(MEETING_SECONDS)
        await super().startup([])
        for listening in sockets or []:
            self._listeners.append(Listener(listening, self._protocol))
            self._listeners[-1].open()
        if self._grpc is not None:
            await self._grpc.open()
        if not self._follows:
            self._control.listen(self._frontend)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._frontend.draining = True
        for listener in self._listeners:
            listener.close()
        closing = [super().shutdown(sockets)]
        if self._grpc is not None:
            closing.append(self._grpc.close())
        await asyncio.gather(*closing)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class _Lines(logging.Handler):
    """What others say in this process becomes a line of ours."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.warning(
            "server said", said=record.getMessage().strip(), error=repr(record.exc_info[1]) if record.exc_info else None
        )


def serve(
    app: FastAPI, frontend: Frontend, control: Control, listening: socket.socket, grpc: str | None, *, follows: bool
) -> None:
    """Serve until SIGTERM, gRPC on this address; requests in flight then have `drain_seconds` to end. follows: as `Server` has it."""
    frontend.metrics.start(one.key.labels for one in frontend.models.served)
    for said in ("uvicorn.error", "grpc", "asyncio"):
        logging.getLogger(said).addHandler(_Lines(frontend.log))
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws=Socket,
        ws_max_size=frontend.settings.max_body_bytes,
        ws_ping_interval=PING_SECONDS,
        # A socket whose caller has sent far ahead is not read, and no pong seen, before a chunk is answered or late.
        ws_ping_timeout=PING_SECONDS + frontend.settings.max_deadline_ms / 1000,
        # Chunks are small, and what is compressed may be large.
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(frontend.settings.drain_seconds)),
    )
    try:
        Server(config, control, frontend, GrpcServer(frontend, grpc) if grpc else None, follows=follows).run(
            sockets=[listening]
        )
    except StartError as fault:
        control.failed(str(fault))
