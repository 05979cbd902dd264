"""ModelStreamInfer: many requests on one call. Each gets one response message, in the order of the requests.

A request that fails gets an error response, and the call continues. If the client asked for gRPC errors, the first error ends
the call. When the service shuts down, or the connection is too old, the requests that were read are answered, and then the call ends
with UNAVAILABLE.

A call whose metadata names a session carries only this session, because a proxy has chosen the replica of the call by it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from msgspec import Struct

from service.errors import InvalidRequest, ServiceError, Unavailable
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.calls import GrpcCall
from service.frontend.grpc.infer import StreamRunner
from service.frontend.grpc.messages import split_request
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.tensors import BYTES
from service.frontend.run.origin import Header, RequestOrigin
from service.frontend.run.runner import UNKNOWN_MODEL_LABELS, DecodedRequest, RunningRequest
from service.metrics import CUT_OFF, GONE

MAX_UNANSWERED = 32
"""Requests of one call that are read before the first of them is answered."""
LAST_READ_SECONDS = 0.2
"""How long a call is still read after the shutdown begins: messages in transit arrive within this time."""
GRPC_ERRORS = (b"triton_grpc_error", b"true")
"""Metadata of a call that ends with the status of its first error, as the client requested."""
RESPONSE = METHODS["ModelStreamInfer"].response_type


class InferStream:
    """One ModelStreamInfer call. Requests of different sessions, and requests without a session, run concurrently.

    They run in callbacks, except for the decoding of large ones.
    """

    def __init__(self, runner: StreamRunner, call: GrpcCall) -> None:
        self.runner = runner
        self.call = call
        self.sessions: dict[str, _SessionQueue] = {}
        """The sessions with unanswered chunks, by their ids."""
        self._capacity = asyncio.Semaphore(MAX_UNANSWERED)
        self._unanswered: deque[_StreamReply] = deque()
        self._wakened = asyncio.Event()
        """Set when `_write` has to look at the replies."""
        self._ended = False
        """Whether no further request is read."""

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Read requests and write replies until the client has sent all, cancels the call, or the service shuts down."""
        reading = asyncio.ensure_future(self._read(requests))
        stopping = asyncio.ensure_future(self._stop_reading(reading))
        try:
            await self._write()
            await asyncio.wait([reading])
            if reading.cancelled():
                reason = "the service is shutting down: continue on a new call"
                raise Unavailable(reason, retry_after=1)
            reading.result()
        finally:
            tasks = [reading, stopping]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # The errors of these tasks refer to this frame and this object. Both would stay in memory until a garbage collection.
            del reading, stopping, tasks, task
            while self._unanswered:
                self._unanswered.popleft().cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        """Start each request. The chunks of a session reach the engine in their order."""
        try:
            await self._capacity.acquire()
            async for data in requests:
                reply = _StreamReply(self, data, time.monotonic())
                self._unanswered.append(reply)
                if len(data) > MAX_LOOP_BODY_BYTES and _is_decoded_slowly(data):
                    await self._answer_large(reply)  # later chunks of its session would overtake it meanwhile
                else:
                    self._start(reply)
                await self._capacity.acquire()
        finally:
            self._ended = True
            self._wakened.set()

    async def _stop_reading(self, reading: asyncio.Task[None]) -> None:
        await self.call.stopping.wait()
        await asyncio.sleep(LAST_READ_SECONDS)
        reading.cancel()

    async def _write(self) -> None:
        """Wait for the end of the replies, and meanwhile for a client that reads slowly."""
        while self._unanswered or not self._ended:
            await self._wakened.wait()
            await self.call.drained()
            self._wakened.clear()
            self.send_replies()
            if self._unanswered and self._ends_call(self._unanswered[0]):
                error = self._unanswered[0].error
                assert error is not None
                raise error

    def send_replies(self) -> None:
        """Send the replies that are next in the order of the requests, until the client must read."""
        unanswered = self._unanswered
        while unanswered and unanswered[0].message:
            if self.call.unsent or self._ends_call(unanswered[0]):
                self._wakened.set()
                return
            self.call.send(unanswered.popleft().message)
            self._capacity.release()
        if self._ended and not unanswered:
            self._wakened.set()

    def _ends_call(self, reply: _StreamReply) -> bool:
        return reply.error is not None and self.call.has_metadata(*GRPC_ERRORS)

    def _start(self, reply: _StreamReply) -> None:
        """Decode a request, and run it in its turn."""
        runner, call = self.runner, self.call
        try:
            decoded = runner.read(reply.data, call.route.session, call.deadline)
        except ServiceError as error:
            runner.refuse(UNKNOWN_MODEL_LABELS, error, reply.arrived, reply, call.caller)
            reply.respond_error(error)
        except Exception as error:
            reply.respond_error(runner.frontend.internal_error(error))
        else:
            assert decoded is not None, "the decoder reads large messages only"
            self._run_in_order(reply, decoded)

    async def _answer_large(self, reply: _StreamReply) -> None:
        """Answer a request that the decoder may read, which holds its inputs until the reply."""
        runner, call = self.runner, self.call
        try:
            async with AsyncExitStack() as stack:
                with runner.reading(reply, reply.arrived, call.caller):
                    decoded = await runner.decode_slowly(reply.data, call.route.session, call.deadline, stack)
                reply.ended = asyncio.get_running_loop().create_future()
                self._run_in_order(reply, decoded)
                try:
                    await reply.ended
                except asyncio.CancelledError:
                    reply.cancel()
                    raise
        except ServiceError as error:
            reply.respond_error(error)
        except Exception as error:
            reply.respond_error(runner.frontend.internal_error(error))

    def _run_in_order(self, reply: _StreamReply, decoded: DecodedRequest) -> None:
        """Run a request after the earlier chunks of its session."""
        session = decoded.session
        if session is None:
            reply.run(decoded)
            return
        queue = self.sessions.get(session)
        if queue is None:
            queue = self.sessions[session] = _SessionQueue()
        reply.session = session
        queue.add(reply, decoded)


class _SessionQueue:
    """The chunks of one session, in the order of arrival.

    A chunk that starts or ends the session is answered before the next chunk is sent: the engine would reject a chunk that comes
    too early.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[_StreamReply, DecodedRequest]] = deque()
        self._running = 0
        self._alone = False
        """Whether no other chunk may run at the same time as the chunk that was started last."""

    def add(self, reply: _StreamReply, decoded: DecodedRequest) -> None:
        self._waiting.append((reply, decoded))
        self._run()

    def end(self) -> bool:
        """Go on after the end of a chunk. Return whether no other is left."""
        self._running -= 1
        self._run()
        return not self._running

    def _run(self) -> None:
        while self._waiting and not (self._alone and self._running):
            reply, decoded = self._waiting[0]
            parameters = decoded.context.request.parameters
            alone = bool(parameters.get("sequence_start") or parameters.get("sequence_end"))
            if alone and self._running:
                return
            self._waiting.popleft()
            self._running, self._alone = self._running + 1, alone
            reply.run(decoded)


class _StreamReply(Struct, eq=False):
    """The response message of a request, and its exchange until then."""

    stream: InferStream
    data: bytes
    """The request."""
    arrived: float
    session: str | None = None
    """The session in whose queue it is."""
    call: RunningRequest | None = None
    """The request while it runs. It refers to this object: a cycle would stay in memory until the next full garbage collection."""
    ended: asyncio.Future[None] | None = None
    message: bytes | memoryview = b""
    error: ServiceError | None = None

    @property
    def origin(self) -> RequestOrigin:
        return self.stream.call.identity.origin

    @property
    def request_id(self) -> bytes:
        return self.stream.call.identity.request_id

    @property
    def trace_headers(self) -> tuple[Header, ...]:
        return self.stream.call.identity.trace_headers

    @trace_headers.setter
    def trace_headers(self, headers: tuple[Header, ...]) -> None:
        self.stream.call.identity.trace_headers = headers

    @property
    def disconnected(self) -> bool:
        return self.stream.call.client_left

    def run(self, decoded: DecodedRequest) -> None:
        """Send the request to an engine."""
        runner = self.stream.runner
        try:
            self.call = runner.run(decoded, self, self.arrived, self.stream.call.caller)
        except ServiceError as error:
            self.respond_error(error)
        except Exception as error:
            self.respond_error(runner.frontend.internal_error(error))

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        self._end(content)

    def respond_error(self, error: ServiceError) -> None:
        self.error = error
        self._end(_error_message(self.data, error))

    def cancel(self) -> None:
        """Cancel the request, which may wait for its turn."""
        outcome, call, session = GONE if self.disconnected else CUT_OFF, self.call, self.session
        self.call = self.session = None
        if call is not None:
            call.runner.cancel(call, outcome)
        elif session is not None:
            self.stream.runner.abandon(outcome)

    def _end(self, message: bytes | memoryview) -> None:
        stream, session = self.stream, self.session
        self.message, self.call, self.session = message, None, None
        if session is not None and stream.sessions[session].end():
            stream.sessions.pop(session, None)
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)
        stream.send_replies()


def _is_decoded_slowly(data: bytes) -> bool:
    """Return whether the decoder reads a message, or its texts may be large."""
    try:
        head = split_request(data).head
    except InvalidRequest:
        return False
    return len(head) > MAX_LOOP_BODY_BYTES or BYTES.encode() in head


def _error_message(data: bytes, error: ServiceError) -> bytes:
    """Return the reply to a message with an error. It has the id of the message, if that can be read."""
    try:
        id = split_request(data).id
    except InvalidRequest:
        id = ""
    message: bytes = RESPONSE(error_message=error.message, infer_response={"id": id}).SerializeToString()
    return message
