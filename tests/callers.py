"""Clients with little overhead, over HTTP and gRPC: each sends bytes that are prepared, and returns the reply as it is."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple, cast

import grpc
import httptools

from loadtest.target import Target

OPTIONS = (
    # One connection for each caller, as over HTTP: the kernel balances connections between the frontends.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
ANSWERED = 200
"""The HTTP status that stands for gRPC's OK."""


class Response(NamedTuple):
    """A response: its HTTP status and its body."""

    status: int
    body: bytes


class Caller(asyncio.Protocol):
    """An HTTP connection to a target."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Response] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self.port = 0
        """The port of this end of the connection, which stays known after its end; 0 before."""
        self.unasked = 0
        """Replies to no request."""

    @classmethod
    async def connect(cls, target: Target) -> Caller:
        _, caller = await asyncio.get_running_loop().create_connection(cls, target.host, target.port, ssl=target.tls or None)
        return caller

    @property
    def connected(self) -> bool:
        return self._transport is not None

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
        self.port = int(transport.get_extra_info("sockname")[1])

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
        else:
            self.unasked += 1
        if not self._parser.should_keep_alive():
            self.hang_up()


class GrpcCaller:
    """A channel for one method of a server, which reconnects when its connection breaks."""

    def __init__(self, address: str, path: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._method = self._channel.unary_unary(path)

    async def ask(self, request: bytes) -> Response:
        """Return the reply to a request. For an error, the status is gRPC's number, and the body has its name as `code` and the code of
        the service as `reason`, empty for an error of the connection."""
        try:
            return Response(ANSWERED, await self._method(request))
        except grpc.aio.AioRpcError as error:
            number, _ = error.code().value
            reason = dict(error.trailing_metadata() or ()).get("seqserve-code", "")
            return Response(number, json.dumps({"code": error.code().name, "reason": reason}).encode())

    def hang_up(self) -> None:
        self._closing = asyncio.ensure_future(self._channel.close())
