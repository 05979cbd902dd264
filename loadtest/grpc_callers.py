"""gRPC callers: requests are serialised before the clock starts, and answers stay bytes."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

import grpc

from loadtest.callers import Response

OPTIONS = (
    # One connection for each caller, as over HTTP: the kernel balances connections between the frontends.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
ANSWERED = 200
"""The HTTP status that stands for gRPC's OK."""


class Method(NamedTuple):
    """A gRPC method of a server."""

    address: str
    path: str

    async def connect(self) -> GrpcCaller:
        return GrpcCaller(self)


class GrpcCaller:
    """A channel, which reconnects when its connection breaks."""

    connected = True

    def __init__(self, method: Method) -> None:
        self._channel = grpc.aio.insecure_channel(method.address, OPTIONS)
        self._method = self._channel.unary_unary(method.path)

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
