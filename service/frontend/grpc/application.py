"""The gRPC calls of all connections of a frontend: which object answers a call, and on which path.

ModelInfer takes the hot path, every other call the general path.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import grpc
from msgspec import Struct

from service import metrics
from service.access.scopes import Scope
from service.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from service.frontend.grpc.calls import CUT_OFF, DEADLINE_EXCEEDED, GrpcCall
from service.frontend.grpc.infer import GrpcRunner
from service.frontend.grpc.routes import INFER_PATH, STREAM_PATH, Method, Route, Router
from service.frontend.grpc.wire import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallStatus,
    MessageReader,
    error_status,
    frame_message,
    only_message,
    request_id_field,
    trailers_only,
)
from service.frontend.guards.body_budget import MAX_RECEIVING_BYTES, BodyBudget
from service.frontend.guards.connection_guard import receive_seconds, slow_request
from service.frontend.guards.start_queue import WaitingStart
from service.frontend.http2.header_blocks import RequestFields, encode_fields
from service.frontend.http2.stream import Stream, StreamHandler
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import Header, RequestIdentity, RequestOrigin
from service.frontend.run.runner import RunningRequest

RECEIVE_LIMIT_FACTOR = 2
"""Messages of up to this many times the size limit are read: gRPC's own error for larger messages names no setting."""
MAX_PUBLIC_STREAMS = 1000
"""Open streams of methods that need no key, such as Watch, of all clients of a frontend. They may stay open for ever."""
_TOO_MANY = CallStatus(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    f"{MAX_PUBLIC_STREAMS} streams without a key are open: close some, or ask with single calls",
)


class GrpcApplication:
    """Answers the gRPC calls of one frontend."""

    def __init__(self, frontend: Frontend, methods: Mapping[str, Method]) -> None:
        """methods: by path."""
        settings = frontend.settings
        self.frontend = frontend
        self.infer = GrpcRunner(frontend)
        self.stopping = asyncio.Event()
        """Set when the shutdown begins: streams read no more messages."""
        self.unary_calls: set[UnaryCall] = set()
        self._router = Router(frontend, methods)
        self._max_message_bytes = min(settings.max_body_bytes * RECEIVE_LIMIT_FACTOR, 2**31 - 1)
        self.bodies = BodyBudget(MAX_RECEIVING_BYTES, frontend.limits.memory)
        """Counts requests that are incomplete, or not read by their handlers."""
        self.calls: dict[asyncio.Task[None], GrpcCall] = {}
        """The calls on the general path without their last reply."""
        self._public_streams = 0

    @property
    def unanswered(self) -> bool:
        """Whether an inference call still needs its reply."""
        return bool(self.unary_calls) or any(call.route.path in (INFER_PATH, STREAM_PATH) for call in self.calls.values())

    def start(self, stream: Stream, request: RequestFields) -> StreamHandler | None:
        route: Route | None = request.context
        if route is None or route.generation != self.frontend.access.policy.generation:
            route = request.context = self._router.find(request, stream.sender.peer)
        request_id = route.origin.request_id or self.frontend.request_ids.take()
        if route.refusal:
            if route.denied:
                request.context = None  # the next call is counted and logged too
            refuse = partial(stream.send_headers, route.refusal + request_id_field(request_id), last=True)
            if route.delay:
                asyncio.get_running_loop().call_later(route.delay, refuse)
            else:
                refuse()
            return None
        assert route.method is not None
        timeout, now = route.timeout_seconds, time.monotonic()
        deadline = math.inf if timeout == math.inf else now + timeout
        if route.method.reads_stream:
            return self.start_call(stream, request, route, deadline, self.new_reader())
        unary = UnaryCall(self, stream, request, route, deadline, now, route.origin, request_id)
        self.unary_calls.add(unary)
        return unary

    def count_fault(self) -> None:
        self.frontend.metrics.connections_closed.add(InvalidRequest.code)

    def report(self, error: Exception) -> None:
        self.frontend.internal_error(error)

    def sweep(self) -> None:
        """End the calls whose requests do not arrive in time."""
        now = time.monotonic()
        for unary in list(self.unary_calls):
            unary.sweep(now)

    def cut_off(self) -> None:
        """End every call: the shutdown does not wait any longer."""
        error = Unavailable("the service is shutting down: retry on another connection", retry_after=1)
        for unary in list(self.unary_calls):
            unary.cut_off(error)
        for call in list(self.calls.values()):
            call.cancel(CUT_OFF)

    async def wait_for_calls(self) -> None:
        """Wait until the tasks of all calls are done."""
        if self.calls:
            await asyncio.wait(list(self.calls))

    def new_reader(self) -> MessageReader:
        """Return a reader of a request's body."""
        return MessageReader(self._max_message_bytes, self.bodies)

    def start_call(
        self, stream: Stream, request: RequestFields, route: Route, deadline: float, reader: MessageReader
    ) -> GrpcCall | None:
        """Start a call on the general path, or refuse it and return None. reader: may hold its request."""
        assert route.method is not None
        identity = RequestIdentity(route.origin, self.frontend.request_ids)
        streams = route.method.reads_stream or route.method.writes_stream
        if is_public := route.scope is Scope.PUBLIC and streams:
            if self._public_streams >= MAX_PUBLIC_STREAMS:
                reader.close()
                stream.send_headers(trailers_only(_TOO_MANY) + request_id_field(identity.request_id), last=True)
                return None
            self._public_streams += 1
        call = GrpcCall(stream, request, route, deadline, reader, self._max_message_bytes, identity, self.stopping)
        task = call.start(self.frontend)
        self.calls[task] = call
        task.add_done_callback(partial(self._end_call, is_public=is_public))
        if route.method.reads_stream:
            self.frontend.access.streams.add(call)
            task.add_done_callback(lambda _: self.frontend.access.streams.discard(call))
        stream.handler = call
        return call

    def _end_call(self, task: asyncio.Task[None], *, is_public: bool) -> None:
        del self.calls[task]
        self._public_streams -= is_public


class UnaryCall(Struct, eq=False):
    """A call with one request message, which is collected here and may wait for its turn.

    A request of ModelInfer then runs in callbacks, with this call as its exchange. Other calls, and requests that are compressed or that
    the decoder reads, become a GrpcCall. deadline, began: monotonic times in seconds. reader: has the bytes that have arrived, if they did
    not arrive at once, or wait for their turn.
    """

    application: GrpcApplication
    stream: Stream
    fields: RequestFields
    route: Route
    deadline: float
    began: float
    origin: RequestOrigin
    request_id: bytes
    trace_headers: tuple[Header, ...] = ()
    reader: MessageReader | None = None
    turn: WaitingStart | None = None
    running: RunningRequest | None = None

    # The stream.

    def receive(self, data: bytes, ended: bool) -> None:
        arrived, starts = time.monotonic(), self.application.frontend.limits.starts
        waits = ended and starts.must_wait(arrived)
        if self.reader is None:
            if ended and not waits and self._start_infer(only_message(data), arrived):
                return
            self.reader = self.application.new_reader()
        try:
            self.reader.feed(data)
        except ServiceError as error:
            self.application.frontend.limits.retries.charge(error)
            self._end(error_status(error))
            return
        if waits and not self.reader.refused:
            self.turn = starts.add(arrived, self._take_turn, self.stream.sender)
        elif ended or self.reader.refused:
            in_parts = self.reader.held_bytes > len(data)
            if not (ended and in_parts and self._start_infer(self.reader.only_message(), arrived)):
                self._start_general()
        else:
            self.stream.consumed(len(data))

    def lost(self) -> None:
        if self.running is not None:
            self.running.disconnect()
        self._leave(metrics.GONE)

    def sent(self) -> None:
        """A response is sent as a whole."""

    # The exchange.

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        self._leave()
        self.stream.respond(RESPONSE_HEADERS, frame_message(content), OK_TRAILERS + self._identity_fields())

    def respond_error(self, error: ServiceError) -> None:
        self._end(error_status(error))

    # The application.

    def sweep(self, now: float) -> None:
        """End the call if its request does not arrive in time."""
        if self.running is not None:
            return
        held_bytes = 0 if self.reader is None else self.reader.held_bytes
        if self.deadline < now:
            self._end(DEADLINE_EXCEEDED, DeadlineExceeded.code)
        elif self.turn is None and self.began + receive_seconds(held_bytes) < now:
            self._end(error_status(slow_request()))

    def cut_off(self, error: Unavailable) -> None:
        """End the call before its answer."""
        if self.running is not None:
            self.running.end(error)
        else:
            self._end(error_status(error), metrics.CUT_OFF)

    def _start_infer(self, message: bytes | None, arrived: float) -> bool:
        """Start the request of ModelInfer on the hot path; false when the general path must answer the call."""
        head, application = self.route.infer, self.application
        if message is None or head is None:
            return False
        if self.deadline != math.inf:
            head = replace(head, deadline=self.deadline)
        try:
            self.running = application.infer.start(head, message, self, arrived)
        except Exception as error:
            self.respond_error(application.frontend.error_for(error))
        else:
            if self.running is None:
                return False
            self._close_reader()
        return True

    def _start_general(self) -> None:
        assert self.reader is not None
        self.application.unary_calls.discard(self)
        self.application.start_call(self.stream, self.fields, self.route, self.deadline, self.reader)

    def _take_turn(self, arrived: float) -> None:
        """Start the request, which has waited for its turn."""
        assert self.reader is not None
        self.turn = None
        if not self._start_infer(self.reader.only_message(), arrived):
            self._start_general()

    def _end(self, status: CallStatus, outcome: str = metrics.GONE) -> None:
        """End the call without a response. outcome: the label in the metrics of a request that waits for its turn."""
        self._leave(outcome)
        self.stream.send_headers(trailers_only(status) + self._identity_fields(), last=True)

    def _leave(self, outcome: str = metrics.GONE) -> None:
        """Forget the request, which needs no response any more. outcome: as in `_end`."""
        self.running = None
        self.application.unary_calls.discard(self)
        if self.turn is not None:
            self.turn.cancel()
            if self.route.infer is not None:
                self.application.infer.abandon(outcome)
        self._close_reader()

    def _close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def _identity_fields(self) -> bytes:
        """Return the part of a header block that names the request."""
        fields = request_id_field(self.request_id)
        return fields + encode_fields(self.trace_headers) if self.trace_headers else fields
