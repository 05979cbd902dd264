"""One gRPC call, run by the handler of its method in a task.

It is the `call` of the handler. Flow control holds end to end: a client that does not read stops `write`, and a handler that reads no
requests stops the client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from weakref import WeakSet

import grpc

from service.access.scopes import AUDITED
from service.errors import ServiceError
from service.frontend.grpc.routes import Route
from service.frontend.grpc.wire import (
    RESPONSE_HEADERS,
    CallEnded,
    CallStatus,
    MessageReader,
    decompress_message,
    error_status,
    frame_message,
    trailers,
    trailers_only,
)
from service.frontend.http2.header_blocks import RequestFields, encode_fields
from service.frontend.http2.stream import Stream
from service.frontend.run.access_log import record
from service.frontend.run.exchange import AwaitedExchange, ClientDisconnected
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import RequestIdentity

OK = CallStatus(grpc.StatusCode.OK)
DEADLINE_EXCEEDED = CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
CUT_OFF = CallStatus(grpc.StatusCode.UNAVAILABLE, "the service is shutting down: retry on another connection")


class GrpcCall:
    """A call, which is an OpenStream if its client sends several messages."""

    def __init__(
        self,
        stream: Stream,
        request: RequestFields,
        route: Route,
        deadline: float,
        reader: MessageReader,
        max_bytes: int,
        identity: RequestIdentity,
        stopping: asyncio.Event,
    ) -> None:
        """deadline: monotonic time in seconds, infinite for none. reader: may hold messages that arrived before. max_bytes: size limit of a
        decompressed message. stopping: set when streams should read no more messages.
        """
        self.deadline = deadline
        self.route = route
        self.caller = route.caller
        self.scope = route.scope
        self.identity = identity
        self.stopping = stopping
        self._stream = stream
        self._request = request
        self._reader = reader
        self._max_bytes = max_bytes
        self._unconsumed = 0
        self._headers_sent = False
        self._arrived, self._drained = asyncio.Event(), asyncio.Event()
        self._exchanges = WeakSet[AwaitedExchange]()
        self._runs = False
        self._cancelled = False
        self._cancel_status: CallStatus | None = None
        """The status that the client gets when the call is cancelled; None if the client has gone."""

    def start(self, frontend: Frontend) -> asyncio.Task[None]:
        """Run the handler."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(frontend))
        if math.isfinite(self.deadline):
            delay = max(0.0, self.deadline - time.monotonic())
            timer = loop.call_later(delay, self.cancel, DEADLINE_EXCEEDED)
            self._task.add_done_callback(lambda _: timer.cancel())
        return self._task

    def cancel(self, status: CallStatus | None) -> None:
        """Cancel the handler, and end the call with a status if the client still waits for one."""
        self._cancelled, self._cancel_status = True, status
        for exchange in self._exchanges:
            exchange.disconnected = status is not CUT_OFF
        if self._runs:  # the cancelled task would otherwise not even begin: neither free the request nor send the status
            self._task.cancel()

    def revoke(self, error: ServiceError) -> None:
        self.cancel(error_status(error))

    # The stream.

    def receive(self, data: bytes, ended: bool) -> None:
        try:
            self._reader.feed(data)
        except ServiceError as error:
            self.cancel(error_status(error))
            return
        self._unconsumed += len(data)
        if not self._reader.complete:
            self._consume()
        self._arrived.set()

    def lost(self) -> None:
        self.cancel(None)

    def sent(self) -> None:
        self._drained.set()

    # Called by handlers.

    def exchange(self) -> AwaitedExchange:
        """Return the exchange of a request on this call."""
        exchange = AwaitedExchange(self.identity)
        self._exchanges.add(exchange)
        return exchange

    def has_metadata(self, name: bytes, value: bytes) -> bool:
        """Return whether the client sent this metadata."""
        return (name, value) in self._request.fields

    async def write(self, data: bytes | memoryview) -> None:
        """Send a response message, and resume when the client has accepted it."""
        self._send_headers()
        self._stream.send(frame_message(data))
        while self._stream.pending:
            self._drained.clear()
            await self._drained.wait()

    # The task.

    async def _run(self, frontend: Frontend) -> None:
        self._runs = True
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            method = self.route.method
            assert method is not None
            response = await method.handle(self._requests() if method.reads_stream else await self._only_request(), self)
            if response is not None:
                self._send_headers()
                self._stream.send(frame_message(response))
            status = OK
        except CallEnded as ended:
            status = ended.status
        except (asyncio.CancelledError, ClientDisconnected):
            status = self._cancel_status or CallStatus(grpc.StatusCode.CANCELLED)
        except Exception as error:
            status = error_status(frontend.error_for(error))
        finally:
            self._reader.close()
        if self.scope in AUDITED:
            record(frontend, self.caller, self.scope, self.route.path, self._stream.sender.peer, status.code.name.lower())
        self._end(status)

    async def _only_request(self) -> bytes:
        request = await self._next_request()
        if request is None:
            raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, "the request has no message: send one"))
        if self._reader.held_bytes:
            raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, "the request has several messages: this method takes one"))
        return request

    async def _requests(self) -> AsyncIterator[bytes]:
        while (request := await self._next_request()) is not None:
            yield request

    async def _next_request(self) -> bytes | None:
        """Return the next message, None after the last message; raises CallEnded."""
        while (taken := self._reader.take()) is None:
            if self._stream.client_ended:
                if self._reader.held_bytes:
                    raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, "the request ends inside a message"))
                return None
            self._arrived.clear()
            await self._arrived.wait()
        if not self._reader.complete:
            self._consume()
        compressed, message = taken
        if not compressed:
            return message
        return await decompress_message(message, self.route.window_bits, self._max_bytes, self._reader.bodies)

    def _consume(self) -> None:
        """Let the client send as many bytes as have arrived since the last call."""
        unconsumed, self._unconsumed = self._unconsumed, 0
        self._stream.consumed(unconsumed)

    def _send_headers(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._stream.send_headers(RESPONSE_HEADERS)

    def _end(self, status: CallStatus) -> None:
        """Send the status after everything that was sent already."""
        if status is OK:
            self._send_headers()
        fields = encode_fields(self.identity.headers)
        if self._headers_sent:
            self._stream.handler = None  # the rest of the request is ignored while the client does not read
            self._stream.send(b"", trailers(status) + fields)
        else:
            self._stream.send_headers(trailers_only(status) + fields, last=True)
