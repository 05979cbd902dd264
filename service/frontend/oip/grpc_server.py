"""The gRPC server of a frontend, in the frontend's event loop, with health and reflection. Nothing here knows a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service.errors import StartError
from service.frontend.inference import Frontend
from service.frontend.oip.grpc_calls import RECEIVE_LIMIT_FACTOR, GrpcContext, GrpcShutdown
from service.frontend.oip.grpc_methods import rpc_handlers
from service.frontend.oip.protobuf import POOL, SERVICE

HEALTH = "grpc.health.v1.Health"
HEALTH_POLL_SECONDS = 0.25
"""How often a client's Watch checks for a change of the status."""
MAX_STREAMS = 1024
"""Concurrent calls of one connection; further calls wait in the client."""
PING_SECONDS, PING_TIMEOUT_SECONDS = 60, 20
"""How often the server pings a connection, and how long it waits for a reply before it closes the connection."""
MIN_CLIENT_PING_SECONDS, MAX_PING_STRIKES = 10, 2
"""How often a client may ping, and how many pings may come too early before the server closes the connection."""
ACCEPT_SECONDS = 0.1
"""Every call that gRPC accepted before the shutdown has started after this time."""


class GrpcServer:
    """A gRPC server on one address, which other processes may share. gRPC listens on IPv6 for all IPv4 addresses too."""

    def __init__(self, frontend: Frontend, address: str) -> None:
        self._frontend = frontend
        self._address = address
        self._shutdown = GrpcShutdown()

    async def open(self) -> None:
        """Start accepting calls; raises StartError."""
        self._server = grpc.aio.server(options=_options(self._frontend.settings.max_body_bytes))
        self._server.add_generic_rpc_handlers((rpc_handlers(self._frontend, self._shutdown), self._health_handlers()))
        for descriptor in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(descriptor.serialized_pb)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server, POOL)
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {self._address} for gRPC: choose another port with --grpc-port") from error
        await self._server.start()

    async def close(self) -> None:
        """Stop accepting calls, and give open inference calls `drain_seconds` to finish."""
        self._shutdown.begun.set()
        seconds = self._frontend.settings.drain_seconds
        # The grace period of gRPC waits for every call, even for endless calls such as a health Watch. The second stop ends it.
        stopping = asyncio.ensure_future(self._server.stop(2 * seconds))
        await asyncio.wait([stopping], timeout=ACCEPT_SECONDS)
        if self._shutdown.open_calls:
            await asyncio.wait(self._shutdown.open_calls, timeout=seconds)
        self._shutdown.over = True
        await self._server.stop(None)
        await stopping

    def _health_handlers(self) -> grpc.GenericRpcHandler:
        coding = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._handle_check, **coding),
            "Watch": grpc.unary_stream_rpc_method_handler(self._handle_watch, **coding),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    async def _handle_check(self, request: Any, context: GrpcContext) -> Any:
        if request.service not in ("", SERVICE):
            message = f"unknown service: send {SERVICE}, or an empty service for the whole server"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return self._status(request.service)

    async def _handle_watch(self, request: Any, context: GrpcContext) -> AsyncIterator[Any]:
        last = None
        while True:
            if (status := self._status(request.service)) != last:
                yield status
            last = status
            await asyncio.sleep(HEALTH_POLL_SECONDS)

    def _status(self, service: str) -> Any:
        status = "SERVING" if self._frontend.ready else "NOT_SERVING"
        return health_pb2.HealthCheckResponse(status=status if service in ("", SERVICE) else "SERVICE_UNKNOWN")


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        # An int32: gRPC ignores larger values.
        ("grpc.max_receive_message_length", min(max_message_bytes * RECEIVE_LIMIT_FACTOR, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_CLIENT_PING_SECONDS * 1000),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    ]
