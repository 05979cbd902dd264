"""HTTP callers with little overhead: on a shared machine, a client library would take processor time from the server under test."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

JSON = "Content-Type: application/json"


class Response(NamedTuple):
    """A response: its HTTP status and its body."""

    status: int
    body: bytes


class Connection(Protocol):
    """A persistent connection that carries one request at a time."""

    @property
    def connected(self) -> bool: ...

    async def ask(self, request: bytes) -> Response:
        """Send a request and return the reply. Raises OSError when no reply arrives."""

    def hang_up(self) -> None: ...


class Connectable(Protocol):
    """A server to which a load can open connections."""

    async def connect(self) -> Connection: ...


class Target(NamedTuple):
    """The address of an HTTP server, the path of the requests, and whether the server speaks TLS."""

    host: str
    port: int
    path: str
    tls: bool = False

    @classmethod
    def of(cls, url: str, path: str) -> Target:
        """Parse an http:// or https:// address. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an address of the form http://host:port or https://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)

    def request(self, body: bytes, *headers: str) -> bytes:
        """Return the bytes of one POST. The body is JSON unless `headers` has another content type."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}",
            *(headers or (JSON,)),
            f"Content-Length: {len(body)}",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + body

    async def connect(self) -> Caller:
        return await Caller.connect(self)


class Caller(asyncio.Protocol):
    """An HTTP connection to a target."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Response] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._port = 0

    @classmethod
    async def connect(cls, target: Target) -> Caller:
        _, caller = await asyncio.get_running_loop().create_connection(cls, target.host, target.port, ssl=target.tls or None)
        return caller

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def port(self) -> int:
        """The port of this end of the connection, which stays known after its end; 0 before."""
        return self._port

    async def ask(self, request: bytes) -> Response:
        """Send a request and return the reply. Raises ConnectionError when the server closes the connection first."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._reply

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass
        self._port = int(transport.get_extra_info("sockname")[1])

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._reply is not None and not self._reply.done():
            broken = error if isinstance(error, OSError) else ConnectionResetError("the server closed the connection")
            self._reply.set_exception(broken)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Append a part of the body. Called by the parser."""
        self._body += data

    def on_message_complete(self) -> None:
        """Resolve the reply. Called by the parser."""
        reply, self._body = Response(self._parser.get_status_code(), self._body), b""
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)
        if not self._parser.should_keep_alive():
            self.hang_up()
