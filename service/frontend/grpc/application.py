"""The gRPC calls of all connections of a frontend: which method answers a call, and on which path.

ModelInfer takes the hot path, every other call the general path. Both answer the same request with the same response.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import grpc

from service import metrics
from service.access.caller import ANYBODY, Caller
from service.access.scopes import Scope
from service.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unauthorized, Unavailable, Unsupported
from service.frontend.grpc.calls import RECEIVE_LIMIT_FACTOR, GrpcShutdown
from service.frontend.grpc.infer import GrpcRunner, InferCall, InferHead
from service.frontend.grpc.runner import CUT_OFF, DEADLINE_EXCEEDED, GrpcCall, Work
from service.frontend.grpc.wire import (
    CallEnded,
    CallFields,
    CallStatus,
    MessageReader,
    error_status,
    http_refusal,
    only_message,
    request_id_field,
    trailers_only,
)
from service.frontend.guards.body_budget import MAX_RECEIVING_BYTES, BodyBudget
from service.frontend.guards.connection_guard import receive_seconds, slow_request
from service.frontend.guards.start_queue import WaitingStart
from service.frontend.http2.header_blocks import RequestFields
from service.frontend.http2.stream import Stream, StreamHandler
from service.frontend.oip.protobuf import SERVICE
from service.frontend.rest.scopes import ADMIN_PORT_SCOPES, grpc_scope
from service.frontend.run.access_log import record
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import NO_ORIGIN, RequestIdentity, RequestOrigin
from service.frontend.run.session_header import SESSION_HEADER, header_session
from service.settings import OFF

INFER_PATH = f"/{SERVICE}/ModelInfer"
STREAM_PATH = f"/{SERVICE}/ModelStreamInfer"
MAX_PUBLIC_STREAMS = 1000
"""Open streams of methods that need no key, such as Watch, of all clients of a frontend. They may stay open for ever."""
CONTENT_TYPE = b"application/grpc"
_SESSION_FIELD = SESSION_HEADER.encode()
_TOO_MANY = CallStatus(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    f"{MAX_PUBLIC_STREAMS} streams without a key are open: close some, or ask with single calls",
)


class _Route(NamedTuple):
    """The path of the calls with the same fields.

    hot: the head of a call without a deadline, if the hot path may answer it. refusal: the header block of the response to all of them,
    if there is one. denied: whether they are refused for their caller. delay: seconds that the refusal waits. generation: of the access
    policy that decided. origin: of all of them. session: named by the metadata.
    """

    fields: CallFields | None = None
    method: grpc.RpcMethodHandler | None = None
    scope: Scope = Scope.PUBLIC
    caller: Caller = ANYBODY
    hot: InferHead | None = None
    refusal: bytes = b""
    denied: bool = False
    delay: float = 0.0
    generation: int = 0
    origin: RequestOrigin = NO_ORIGIN
    session: str | None = None


class _CallDetails(NamedTuple):
    """The details that the gRPC library's handlers read."""

    method: str
    invocation_metadata: tuple[()] = ()


class GrpcApplication:
    """Answers the gRPC calls of one frontend."""

    def __init__(self, frontend: Frontend, handlers: Sequence[grpc.GenericRpcHandler], shutdown: GrpcShutdown) -> None:
        settings = frontend.settings
        self._frontend = frontend
        self._handlers = handlers
        self._shutdown = shutdown
        self._infer = GrpcRunner(frontend)
        self._max_message_bytes = min(settings.max_body_bytes * RECEIVE_LIMIT_FACTOR, 2**31 - 1)
        self._bodies = BodyBudget(MAX_RECEIVING_BYTES, frontend.limits.memory)
        self.starts = frontend.limits.starts
        self._incomplete: set[_UnaryRequest] = set()
        self._hot_calls: set[InferCall] = set()
        self._calls: dict[asyncio.Task[None], GrpcCall] = {}
        self._public_streams = 0

    @property
    def unanswered(self) -> bool:
        """Whether an inference call still needs its reply."""
        return bool(self._hot_calls or self._incomplete or self._shutdown.open_calls)

    @property
    def open_calls(self) -> int:
        """The number of calls without their last reply."""
        return len(self._hot_calls) + len(self._incomplete) + len(self._calls)

    @property
    def held_bytes(self) -> int:
        """Bytes of requests that are incomplete, or not read by their handlers."""
        return self._bodies.held_bytes

    def start(self, stream: Stream, request: RequestFields) -> StreamHandler | None:
        route: _Route | None = request.context
        if route is None or route.generation != self._frontend.access.policy.generation:
            route = self._find_route(request, stream.peer)._replace(origin=RequestOrigin.read(request.fields))
            request.context = route
        if route.refusal:
            if route.denied:
                request.context = None  # the next call is counted and logged too
            refuse = partial(stream.send_headers, route.refusal + self.request_id_field(route.origin), last=True)
            if route.delay:
                asyncio.get_running_loop().call_later(route.delay, refuse)
            else:
                refuse()
            return None
        assert route.fields is not None and route.method is not None
        timeout = route.fields.timeout_seconds
        deadline = math.inf if timeout == math.inf else time.monotonic() + timeout
        if route.method.request_streaming:
            return self.start_call(stream, request, route, deadline, self.new_reader())
        unary = _UnaryRequest(self, stream, request, route, deadline)
        self._incomplete.add(unary)
        return unary

    def count_fault(self) -> None:
        self._frontend.metrics.connections_closed.add(InvalidRequest.code)

    def report(self, error: Exception) -> None:
        self._frontend.internal_error(error)

    def sweep(self) -> None:
        """End the calls whose requests do not arrive in time."""
        now = time.monotonic()
        for unary in list(self._incomplete):
            until_deadline, until_complete = unary.seconds_left(now)
            if until_deadline < 0:
                unary.end(DEADLINE_EXCEEDED, DeadlineExceeded.code)
            elif until_complete < 0:
                unary.end(error_status(slow_request()))

    def cut_off(self) -> None:
        """End every call: the shutdown does not wait any longer."""
        error = Unavailable("the service is shutting down: retry on another connection", retry_after=1)
        for hot_call in list(self._hot_calls):
            hot_call.cut_off(error)
        for unary in list(self._incomplete):
            unary.end(error_status(error), metrics.CUT_OFF)
        for call in list(self._calls.values()):
            call.cancel(CUT_OFF)

    async def wait_for_calls(self) -> None:
        """Wait until the tasks of all calls are done."""
        if self._calls:
            await asyncio.wait(list(self._calls))

    def request_id_field(self, origin: RequestOrigin) -> bytes:
        """Return the part of a header block that names a call without a reply."""
        return request_id_field(origin.request_id or self._frontend.request_ids.take())

    def start_hot(
        self, stream: Stream, head: InferHead, origin: RequestOrigin, deadline: float, message: bytes, arrived: float
    ) -> bool:
        """Start a ModelInfer call on the hot path; false when the general path must answer it."""
        call, before = InferCall(stream, self._frontend, origin, self._hot_calls.discard), stream.handler
        self._hot_calls.add(call)
        stream.handler = call
        if call.start(self._infer, head if deadline == math.inf else replace(head, deadline=deadline), message, arrived):
            return True
        self._hot_calls.discard(call)
        stream.handler = before
        return False

    def forget(self, unary: _UnaryRequest) -> None:
        """Take a request from the incomplete requests."""
        self._incomplete.discard(unary)

    def abandon(self, outcome: str) -> None:
        """Count a complete request that ends before its turn. outcome: its label in the metrics."""
        self._infer.abandon(outcome)

    def charge(self, error: ServiceError) -> None:
        """Charge the budget of retries for a request that is refused before it is complete."""
        self._frontend.limits.retries.charge(error)

    def new_reader(self) -> MessageReader:
        """Return a reader of a request's body."""
        return MessageReader(self._max_message_bytes, self._bodies)

    def _find_route(self, request: RequestFields, peer: str) -> _Route:
        generation = self._frontend.access.policy.generation
        if request.method != b"POST":
            return _Route(refusal=http_refusal(405))
        content_type = request.get(b"content-type") or b""
        if not content_type.startswith(CONTENT_TYPE) or content_type[len(CONTENT_TYPE) :][:1] not in (b"", b"+", b";"):
            return _Route(refusal=http_refusal(415))
        try:
            fields = CallFields.read(request)
        except CallEnded as ended:
            return _Route(refusal=trailers_only(ended.status))
        details = _CallDetails(fields.path)
        method = next((found for handler in self._handlers if (found := handler.service(details)) is not None), None)
        if method is None:
            return _Route(refusal=trailers_only(CallStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")))
        scope, caller = grpc_scope(fields.path), ANYBODY
        try:
            if scope is not Scope.PUBLIC:
                caller = self._identify(request)
                caller.require(scope)
            if scope in ADMIN_PORT_SCOPES and self._frontend.settings.admin_port != OFF:
                raise Unsupported("models are loaded and unloaded over HTTP, on the admin port of this service: use that port")
        except ServiceError as error:
            record(self._frontend, caller, scope, fields.path, peer, error.code)
            delay = (
                self._frontend.access.refused_keys.delay(peer) if isinstance(error, Unauthorized) and _has_key(request) else 0.0
            )
            return _Route(refusal=trailers_only(error_status(error)), denied=True, delay=delay, generation=generation)
        try:
            session = _session(request) if fields.path in (INFER_PATH, STREAM_PATH) else None
        except ServiceError as error:
            return _Route(refusal=trailers_only(error_status(error)), generation=generation)
        hot = InferHead("", 0, {}, caller, session=session) if fields.path == INFER_PATH else None
        return _Route(fields, method, scope, caller, hot, generation=generation, session=session)

    def _identify(self, request: RequestFields) -> Caller:
        key, host = request.get(b"authorization"), request.authority.decode("latin-1")
        return self._frontend.access.policy.identify(host, None, None if key is None else key.decode("latin-1"))

    def start_call(
        self, stream: Stream, request: RequestFields, route: _Route, deadline: float, reader: MessageReader
    ) -> GrpcCall | None:
        """Start a call on the general path, or refuse it and return None. reader: may hold its request."""
        assert route.fields is not None and route.method is not None
        streams = route.method.request_streaming or route.method.response_streaming
        if is_public := route.scope is Scope.PUBLIC and streams:
            if self._public_streams >= MAX_PUBLIC_STREAMS:
                reader.close()
                stream.send_headers(trailers_only(_TOO_MANY) + self.request_id_field(route.origin), last=True)
                return None
            self._public_streams += 1
        work = Work(route.fields, route.method, route.scope, route.caller, route.session)
        identity = RequestIdentity(route.origin, self._frontend.request_ids)
        call = GrpcCall(stream, request, work, deadline, reader, self._max_message_bytes, identity)
        task = call.start(self._frontend, self._shutdown)
        self._calls[task] = call
        task.add_done_callback(partial(self._end_call, is_public=is_public))
        if route.method.request_streaming:
            self._frontend.access.streams.add(call)
            task.add_done_callback(lambda _: self._frontend.access.streams.discard(call))
        stream.handler = call
        return call

    def _end_call(self, task: asyncio.Task[None], *, is_public: bool) -> None:
        del self._calls[task]
        self._public_streams -= is_public


class _UnaryRequest:
    """A call of a method that takes one message, until the request is complete and its turn has come."""

    __slots__ = ("_application", "_began", "_deadline", "_reader", "_request", "_route", "_stream", "_turn")

    def __init__(
        self, application: GrpcApplication, stream: Stream, request: RequestFields, route: _Route, deadline: float
    ) -> None:
        self._application = application
        self._stream = stream
        self._request = request
        self._route = route
        self._deadline = deadline
        self._began = time.monotonic()
        self._reader: MessageReader | None = None
        """The bytes that have arrived, if they did not arrive at once, or wait for their turn."""
        self._turn: WaitingStart | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.held_bytes

    def receive(self, data: bytes, ended: bool) -> None:
        arrived = time.monotonic()
        waits = ended and self._application.starts.must_wait(arrived)
        if self._reader is None:
            if ended and not waits and self._start_hot(only_message(data), arrived):
                return
            self._reader = self._application.new_reader()
        try:
            self._reader.feed(data)
        except ServiceError as error:
            self._application.charge(error)
            self.end(error_status(error))
            return
        if waits and not self._reader.refused:
            self._turn = self._application.starts.add(arrived, self._take_turn, self._stream.sender)
        elif ended or self._reader.refused:
            in_parts = self._reader.held_bytes > len(data)
            if not (ended and in_parts and self._start_hot(self._reader.only_message(), arrived)):
                self._start_general()
        else:
            self._stream.consumed(len(data))

    def lost(self) -> None:
        self._forget(metrics.GONE)

    def sent(self) -> None:
        """Nothing is sent before the request is complete."""

    def end(self, status: CallStatus, outcome: str = metrics.GONE) -> None:
        """End the call without its request. outcome: the label in the metrics of a request that waits for its turn."""
        self._forget(outcome)
        id_field = self._application.request_id_field(self._route.origin)
        self._stream.send_headers(trailers_only(status) + id_field, last=True)

    def seconds_left(self, now: float) -> tuple[float, float]:
        """Return the seconds until the call's deadline, and until the request must be complete."""
        if self._turn is not None:
            return self._deadline - now, math.inf
        return self._deadline - now, self._began + receive_seconds(self.held_bytes) - now

    def _take_turn(self, arrived: float) -> None:
        """Start the request, which has waited for its turn."""
        assert self._reader is not None
        self._turn = None
        if not self._start_hot(self._reader.only_message(), arrived):
            self._start_general()

    def _forget(self, outcome: str) -> None:
        """Drop the bytes that have arrived. outcome: as in `end`."""
        self._application.forget(self)
        if self._turn is not None:
            self._turn.cancel()
            if self._route.hot is not None:
                self._application.abandon(outcome)
        if self._reader is not None:
            self._reader.close()

    def _start_general(self) -> None:
        assert self._reader is not None
        self._application.forget(self)
        self._application.start_call(self._stream, self._request, self._route, self._deadline, self._reader)

    def _start_hot(self, message: bytes | None, arrived: float) -> bool:
        """Start the request on the hot path; false when the general path must answer it."""
        head, origin = self._route.hot, self._route.origin
        if message is None or head is None:
            return False
        if not self._application.start_hot(self._stream, head, origin, self._deadline, message, arrived):
            return False
        self._forget(metrics.GONE)
        return True


def _session(request: RequestFields) -> str | None:
    """Return the session that the metadata of a call names, or None; raises InvalidInput."""
    return header_session([value.decode("latin-1") for name, value in request.fields if name == _SESSION_FIELD])


def _has_key(request: RequestFields) -> bool:
    return request.get(b"authorization") is not None
