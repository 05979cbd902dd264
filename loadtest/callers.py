"""HTTP callers that cost little: on a shared machine, what a client library takes is missing from the server under test. And what any
caller is to a stretch of load, whatever he speaks."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

JSON = "Content-Type: application/json"


class Reply(NamedTuple):
    """status: HTTP's; 200 is an answer."""

    status: int
    body: bytes


class Connection(Protocol):
    """One connection, kept alive, with one request on it at a time."""

    @property
    def connected(self) -> bool: ...

    async def ask(self, request: bytes) -> Reply:
        """Raises OSError when there is no answer at all."""

    def hang_up(self) -> None: ...


class Reachable(Protocol):
    """A server, and what is asked of it."""

    async def connect(self) -> Connection: ...


class Target(NamedTuple):
    """Where a server listens, and the path that is asked."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str, path: str) -> Target:
        """Raises ValueError for what is no http:// address."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is no address of the form http://host:port")
        return cls(parts.hostname, parts.port or 80, path)

    def request(self, body: bytes, *headers: str) -> bytes:
        """One POST, as it goes over the wire: of a JSON body, unless headers say otherwise."""
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
    """A connection to a target."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    @classmethod
    async def connect(cls, target: Target) -> Caller:
        _, caller = await asyncio.get_running_loop().create_connection(cls, target.host, target.port)
        return caller

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def ask(self, request: bytes) -> Reply:
        """Raises ConnectionError when the server closes the connection instead."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            broken = error if isinstance(error, OSError) else ConnectionResetError("the server closed the connection")
            self._answer.set_exception(broken)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """The parser's word: a part of the answer's body."""
        self._body += data

    def on_message_complete(self) -> None:
        """The parser's word: the answer is whole."""
        reply, self._body = Reply(self._parser.get_status_code(), self._body), b""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)
        if not self._parser.should_keep_alive():
            self.hang_up()
