"""gRPC callers: messages go as they were serialised before the clock starts, and answers come as bytes that nobody reads."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

import grpc

from loadtest.callers import Reply

OPTIONS = (
    # Each caller has a connection of his own, as over HTTP: several fronts share the callers by their connections.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
ANSWERED = 200
"""What HTTP has for gRPC's OK."""


class Method(NamedTuple):
    """Where a server listens, and the method that is asked."""

    address: str
    path: str

    async def connect(self) -> GrpcCaller:
        return GrpcCaller(self)


class GrpcCaller:
    """A channel, which connects again by itself when its connection breaks."""

    connected = True

    def __init__(self, method: Method) -> None:
        self._channel = grpc.aio.insecure_channel(method.address, OPTIONS)
        self._method = self._channel.unary_unary(method.path)

    async def ask(self, request: bytes) -> Reply:
        """An error has its number as status, and its name where HTTP has a code."""
        try:
            return Reply(ANSWERED, await self._method(request))
        except grpc.aio.AioRpcError as fault:
            number, _ = fault.code().value
            return Reply(number, json.dumps({"code": fault.code().name}).encode())

    def hang_up(self) -> None:
        self._closing = asyncio.ensure_future(self._channel.close())
