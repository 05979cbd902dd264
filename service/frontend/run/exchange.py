"""Where the reply to a request goes: to a connection, or to a task that awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from service.errors import ServiceError
from service.frontend.run.origin import Header, Identity, RequestIdentity


class ClientDisconnected(Exception):
    """The client closed the connection before the reply."""


class HttpReply(Struct, frozen=True):
    """A successful reply. headers: complete lines. compress: compresses the content in a thread if it is worth it."""

    content: bytes | memoryview
    headers: bytes
    compress: Callable[[bytes | memoryview], bytes] | None = None


class Exchange(Identity, Protocol):
    """Where the reply to one request goes, with the identity of the request."""

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        """Send a successful reply. headers: complete lines, without Content-Length."""

    def respond_error(self, error: ServiceError) -> None:
        """Send an error."""


class TaskExchange(Exchange, Protocol):
    """The exchange of a request that a task reads or answers."""

    @property
    def disconnected(self) -> bool:
        """Whether the task is cancelled because the client has disconnected."""


class AwaitedExchange:
    """The exchange of a request whose reply a task awaits. Created by that task."""

    def __init__(self, identity: RequestIdentity) -> None:
        self._identity = identity
        self.origin, self.request_id = identity.origin, identity.request_id
        self.disconnected = False
        self._reply: asyncio.Future[HttpReply | ServiceError] | None = asyncio.get_running_loop().create_future()

    @property
    def trace_headers(self) -> tuple[Header, ...]:
        return self._identity.trace_headers

    @trace_headers.setter
    def trace_headers(self, headers: tuple[Header, ...]) -> None:
        self._identity.trace_headers = headers

    async def reply(self) -> HttpReply:
        """Return the reply; raises the error that the request ended with."""
        assert self._reply is not None
        reply = await self._reply
        # An error refers to the frames that it passes, and these to this object. A cycle would keep the request until a garbage collection.
        self._reply = None
        if isinstance(reply, ServiceError):
            try:
                raise reply.with_traceback(None)
            finally:
                del reply
        return reply

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        self._set(HttpReply(content, headers))

    def respond_error(self, error: ServiceError) -> None:
        self._set(error)

    def _set(self, reply: HttpReply | ServiceError) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)
