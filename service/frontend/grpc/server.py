"""The gRPC server of a frontend, in the frontend's event loop, with health and reflection. Nothing here knows a model.

Connections come from `http2`, status codes and reflection from the gRPC library. Its own server would take most of the time of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service.frontend.grpc.application import GrpcApplication
from service.frontend.grpc.calls import GrpcCall
from service.frontend.grpc.methods import oip_methods
from service.frontend.grpc.routes import Method
from service.frontend.grpc.wire import CallEnded, CallStatus
from service.frontend.guards.connection_guard import longest_age
from service.frontend.http1.listener import Listener, SharedPort
from service.frontend.http2.connection import Http2Connection
from service.frontend.http2.limits import Limits
from service.frontend.oip.protobuf import POOL, SERVICE, parse_message
from service.frontend.run.frontend import Frontend

HEALTH = "grpc.health.v1.Health"
ACCEPT_SECONDS = 0.1
"""Every call that a client sent before the shutdown has arrived after this time."""
POLL_SECONDS = 0.02
"""How often the shutdown checks whether calls are open."""
SWEEP_SECONDS = 1.0
"""How often the shutdown applies the limits of time."""
CLOSE_SECONDS = 1.0
"""How long connections may take to close."""


class GrpcServer:
    """A gRPC server on a port that all frontends share."""

    def __init__(self, frontend: Frontend, port: SharedPort, make_room: Callable[[int], bool]) -> None:
        """make_room: as a Listener takes it."""
        self.connections: set[Http2Connection] = set()
        self._frontend = frontend
        self._port = port
        self._make_room = make_room
        self._was_ready, self._status_changed = frontend.ready, asyncio.Event()
        self._left = False
        """Whether the connections that were open at SIGTERM were asked to end."""

    def open(self) -> None:
        """Start accepting calls."""
        for descriptor in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(descriptor.serialized_pb)
        methods = oip_methods(self._frontend)
        methods[f"/{HEALTH}/Check"] = Method(self._handle_check)
        methods[f"/{HEALTH}/Watch"] = Method(self._handle_watch, writes_stream=True)
        methods[f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"] = Method(_handle_reflection, True, True)
        self._application = GrpcApplication(self._frontend, methods)
        limits = Limits(max_age_seconds=longest_age(self._frontend.settings))
        self._listener = Listener(
            self._port,
            lambda: Http2Connection(self._application, limits, self.connections, self._frontend.limits.turns),
            self._make_room,
            lambda: len(self.connections),
            lambda: self._frontend.access.tls.grpc,
        )
        self._listener.open()

    def publish(self) -> None:
        """Let the other frontends know how many connections this frontend has, and the watching clients whether it is ready now."""
        self._listener.publish()
        self._publish_status()

    def _publish_status(self) -> None:
        if self._frontend.ready != self._was_ready:
            self._was_ready = self._frontend.ready
            self._status_changed.set()
            self._status_changed = asyncio.Event()

    def leave(self) -> None:
        """Tell the clients on open connections to go elsewhere; calls on new connections are still accepted. Later calls do nothing."""
        if not self._left:
            self._left = True
            for connection in list(self.connections):
                connection.drain()

    def sweep(self, now: float) -> None:
        """Apply the limits of time of calls and connections. Called once a second."""
        self._application.sweep()
        for connection in list(self.connections):
            try:
                connection.sweep(now)
            except Exception as error:
                self._frontend.internal_error(error)
                connection.abort()

    async def close(self) -> None:
        """Stop accepting calls, and give open inference calls `drain_seconds` to finish."""
        self._application.stopping.set()
        self._publish_status()
        self._listener.close()
        for connection in list(self.connections):
            connection.drain()
        await asyncio.sleep(ACCEPT_SECONDS)
        await self._wait_while(self._has_open_calls, self._frontend.settings.drain_seconds)
        self._application.cut_off()
        await self._application.wait_for_calls()
        for connection in list(self.connections):
            connection.close()
        await self._wait_while(lambda: bool(self.connections), CLOSE_SECONDS)
        for connection in list(self.connections):
            connection.abort()

    def _has_open_calls(self) -> bool:
        """Return whether an inference call needs its reply, or a client has not read one."""
        return self._application.unanswered or any(connection.unread_bytes for connection in self.connections)

    async def _wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is false, for up to `seconds`, and apply the limits of time meanwhile."""
        loop = asyncio.get_running_loop()
        until = swept = loop.time()
        until += seconds
        while condition() and loop.time() < until:
            await asyncio.sleep(POLL_SECONDS)
            if loop.time() - swept > SWEEP_SECONDS:
                swept = loop.time()
                self.sweep(swept)

    async def _handle_check(self, data: bytes, call: GrpcCall) -> bytes:
        service = _health_service(data)
        if service not in ("", SERVICE):
            message = f"unknown service: send {SERVICE}, or an empty service for the whole server"
            raise CallEnded(CallStatus(grpc.StatusCode.NOT_FOUND, message))
        return self._status(service)

    async def _handle_watch(self, data: bytes, call: GrpcCall) -> None:
        service = _health_service(data)
        while True:
            changed = self._status_changed
            await call.write(self._status(service))
            await changed.wait()

    def _status(self, service: str) -> bytes:
        status = "SERVING" if self._frontend.ready else "NOT_SERVING"
        response = health_pb2.HealthCheckResponse(status=status if service in ("", SERVICE) else "SERVICE_UNKNOWN")
        data: bytes = response.SerializeToString()
        return data


def _health_service(data: bytes) -> str:
    """Return the service whose health a client asks for."""
    service: str = parse_message(health_pb2.HealthCheckRequest, data).service
    return service


async def _handle_reflection(requests: AsyncIterator[bytes], call: GrpcCall) -> None:
    servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH, reflection.SERVICE_NAME), POOL)
    parsed = (parse_message(reflection_pb2.ServerReflectionRequest, data) async for data in requests)
    async with aclosing(servicer.ServerReflectionInfo(parsed, call)) as responses:
        async for response in responses:
            await call.write(response.SerializeToString())
