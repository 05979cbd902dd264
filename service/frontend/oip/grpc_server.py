"""The gRPC door: a server in the front's own loop, with health and reflection beside the protocol. Nothing here knows a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service.errors import StartError
from service.frontend.inference import Frontend
from service.frontend.oip import grpc as oip_grpc
from service.frontend.oip.grpc_calls import DISCARDED_MESSAGES, Context, Ending
from service.frontend.oip.protobuf import POOL, SERVICE

HEALTH = "grpc.health.v1.Health"
WATCHED_SECONDS = 0.25
"""How often a caller's Watch looks whether something has changed."""
MOST_STREAMS = 1024
"""Calls of one connection at a time; more wait at the client."""
PING_SECONDS, PONG_SECONDS = 60, 20
"""A connection is asked so often whether somebody is still there, and closed when nobody answers for so long."""
PINGED_SECONDS, PING_STRIKES = 10, 2
"""How often a client may ask the same, and how many times more often, before its connection is closed."""
BEGIN_SECONDS = 0.1
"""A call that was taken has begun after this time."""


class GrpcServer:
    """gRPC on one address, which other processes may share. All addresses of IPv4 are those of IPv6 as well: gRPC makes no difference."""

    def __init__(self, frontend: Frontend, address: str) -> None:
        self._frontend = frontend
        self._address = address
        self._ending = Ending()

    async def open(self) -> None:
        """Take calls from now on; raises StartError."""
        self._server = grpc.aio.server(options=_options(self._frontend.settings.max_body_bytes))
        self._server.add_generic_rpc_handlers((oip_grpc.handlers(self._frontend, self._ending), self._health()))
        for one in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(one.serialized_pb)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server, POOL)
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as fault:
            raise StartError(f"cannot listen on {self._address} for gRPC: choose another port with --grpc-port") from fault
        await self._server.start()

    async def close(self) -> None:
        """Take no more calls, and give those for an answer `drain_seconds` to end."""
        self._ending.begun.set()
        seconds = self._frontend.settings.drain_seconds
        # It would wait for all calls, and some have no end: who watches the health, for one. It is cut short below.
        stopping = asyncio.ensure_future(self._server.stop(2 * seconds))
        await asyncio.wait([stopping], timeout=BEGIN_SECONDS)
        if self._ending.open:
            await asyncio.wait(self._ending.open, timeout=seconds)
        self._ending.over = True
        await self._server.stop(None)
        await stopping

    def _health(self) -> grpc.GenericRpcHandler:
        coding = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **coding),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **coding),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    async def _check(self, asked: Any, context: Context) -> Any:
        if asked.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service: known is {SERVICE}, or none for all")
        return self._status(asked.service)

    async def _watch(self, asked: Any, context: Context) -> AsyncIterator[Any]:
        said = None
        while True:
            if (status := self._status(asked.service)) != said:
                yield status
            said = status
            await asyncio.sleep(WATCHED_SECONDS)

    def _status(self, service: str) -> Any:
        status = "SERVING" if self._frontend.ready else "NOT_SERVING"
        return health_pb2.HealthCheckResponse(status=status if service in ("", SERVICE) else "SERVICE_UNKNOWN")


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        # An int32: what is larger would not be taken as a limit.
        ("grpc.max_receive_message_length", min(max_message_bytes * DISCARDED_MESSAGES, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PONG_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PINGED_SECONDS * 1000),
        ("grpc.http2.max_ping_strikes", PING_STRIKES),
    ]
