"""The health port: /healthz, /readyz and /metrics from the supervisor, which no client's request keeps busy.

The frontends have the same endpoints. There a check waits behind the requests that have arrived before it.

One request per connection, over plain HTTP, also where the other ports have TLS. Nothing that arrives here takes much of the
supervisor's time: the connections, their time and the size of a request are limited.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import h11
import msgspec

from service.access.policy import AccessPolicy
from service.access.refused_keys import RefusedKeys
from service.access.scopes import Scope
from service.errors import (
    STATUS,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    ServiceError,
    SettingsError,
    Unauthorized,
    Unavailable,
    UnknownRoute,
)
from service.exposition import expose
from service.log import Log
from service.metrics import Snapshot
from service.settings import Settings

MAX_CONNECTIONS = 64
"""Open connections. For a further connection, the oldest is closed: a probe is answered long before it is the oldest."""
REQUEST_SECONDS = 5.0
"""How long a connection may take until it has its answer."""
COLLECT_SECONDS = 0.1
"""Longest wait for the metrics of a busy process. Then its last known values count; they are at most as old as the last scrape."""
READ_BYTES = 4096
MAX_HEAD_BYTES = 2 * READ_BYTES
JSON = "application/json"


class HealthAnswer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    media_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class HealthPort:
    """Answers on the health port from `open` to `close`."""

    def __init__(
        self,
        listening: socket.socket,
        settings: Settings,
        is_ready: Callable[[], bool],
        collect: Callable[[float], Awaitable[Snapshot]],
        log: Log,
    ) -> None:
        """is_ready: whether requests are answered. collect: returns the metrics of all processes, waiting for each process this many
        seconds at most.
        """
        self._listening = listening
        self._is_ready = is_ready
        self._collect = collect
        self._log = log
        self._access = AccessPolicy(settings)
        self._refused_keys = RefusedKeys()
        # Keys would cross the network in plain text, and client certificates would not be required.
        self._has_metrics = not settings.tls_cert
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The open connections, the oldest first."""

    async def open(self) -> None:
        """Start to accept connections."""
        self._server = await asyncio.start_server(self._handle_connection, sock=self._listening)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()
        self._listening.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            # Cancelled when the service ends: asyncio would report the cancellation of a connection as an error.
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._handle_request(reader, writer)
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _handle_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request of a connection."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            request = await _read_request(connection, reader)
        except h11.RemoteProtocolError:
            answer = _error(InvalidRequest("the request is not valid HTTP: send it as RFC 9112 defines HTTP/1.1"))
        else:
            if request is None:
                return
            answer = await self._answer(request, str(writer.get_extra_info("peername", ("",))[0]))
        headers = [
            ("content-type", answer.media_type),
            ("content-length", str(len(answer.body))),
            ("connection", "close"),
            *answer.headers,
        ]
        head = connection.send(h11.Response(status_code=answer.status, headers=headers))
        writer.write((head or b"") + answer.body)
        await writer.drain()
        writer.write_eof()
        # A client that still sends would lose the answer with the connection.
        await reader.read(READ_BYTES)

    async def _answer(self, request: h11.Request, peer: str) -> HealthAnswer:
        try:
            return await self._route(request)
        except Unauthorized as error:
            await asyncio.sleep(self._refused_keys.delay(peer) if _header(request, b"authorization") else 0.0)
            return _error(error, ("www-authenticate", "Bearer"))
        except MethodNotAllowed as error:
            return _error(error, ("allow", "GET"))
        except ServiceError as error:
            return _error(error)

    async def _route(self, request: h11.Request) -> HealthAnswer:
        path = request.target.partition(b"?")[0]
        if path not in (b"/healthz", b"/readyz", b"/metrics") or (path == b"/metrics" and not self._has_metrics):
            raise UnknownRoute("the health port has no such path: see docs/operations.md")
        if request.method != b"GET":
            raise MethodNotAllowed("this path allows only GET")
        if path == b"/metrics":
            return await self._metrics(request)
        if path == b"/readyz" and not self._is_ready():
            raise Unavailable("not ready: no engine is ready, or the service is shutting down; retry later", retry_after=1)
        return HealthAnswer(200, msgspec.json.encode({"live" if path == b"/healthz" else "ready": True}))

    async def _metrics(self, request: h11.Request) -> HealthAnswer:
        await self._reload_keys()
        host, origin, key = (_header(request, name) for name in (b"host", b"origin", b"authorization"))
        if origin is not None:
            raise Forbidden("web pages may not use the health port: use the main port")
        self._access.identify(host or "", None, key).require(Scope.METRICS)
        text, media_type = expose(await self._collect(COLLECT_SECONDS), _header(request, b"accept") or "")
        return HealthAnswer(200, text, media_type, (("vary", "accept"),))

    async def _reload_keys(self) -> None:
        """Take over a changed key file, in a thread, because its disk may hang. If it cannot be read, the keys stay as they are."""
        try:
            await asyncio.to_thread(self._access.reload)
        except SettingsError as error:
            self._log.capped("error", "keys not reloaded", error=str(error))


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Return the head of a request, None when the client closes before its end. Raises h11.RemoteProtocolError."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(READ_BYTES))
    return event if isinstance(event, h11.Request) else None


def _header(request: h11.Request, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in request.headers if key == name), None)


def _error(error: ServiceError, *headers: tuple[str, str]) -> HealthAnswer:
    """Return the answer for an error, with the body that errors have on the other ports."""
    retry = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    body = msgspec.json.encode({"error": error.message, "code": error.code})
    return HealthAnswer(STATUS[type(error)].http, body, JSON, (*headers, *retry))
