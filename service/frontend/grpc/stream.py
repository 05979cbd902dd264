"""ModelStreamInfer: many requests on one call. Each gets one response message, in the order of the requests.

A request that fails gets an error response, and the call continues. If the client asked for gRPC errors, the first error ends
the call. When the service shuts down, or the connection is too old, the requests that were read are answered, and then the call ends
with UNAVAILABLE.

A call whose metadata names a session carries only this session, because a proxy has chosen the replica of the call by it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from service.errors import InvalidRequest, ServiceError, Unavailable
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.calls import GrpcCall
from service.frontend.grpc.infer import StreamRunner
from service.frontend.grpc.messages import split_request
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.tensors import BYTES
from service.frontend.oip.types import InferRequest
from service.frontend.run.exchange import HttpReply
from service.metrics import CUT_OFF, GONE

MAX_UNANSWERED = 32
"""Requests of one call that are read before the first of them is answered."""
LAST_READ_SECONDS = 0.2
"""How long a call is still read after the shutdown begins: messages in transit arrive within this time."""
GRPC_ERRORS = (b"triton_grpc_error", b"true")
"""Metadata of a call that ends with the status of its first error, as the client requested."""
RESPONSE = METHODS["ModelStreamInfer"].response_type
StartChunk = Callable[[], Coroutine[Any, Any, HttpReply]]


class _StreamReply(NamedTuple):
    """The response message of a request, and the error in it if the request failed."""

    message: bytes | memoryview
    error: ServiceError | None = None


class InferStream:
    """One ModelStreamInfer call. Requests of different sessions, and requests without a session, run concurrently."""

    def __init__(self, runner: StreamRunner, call: GrpcCall) -> None:
        self._runner = runner
        self._call = call
        self._sessions = WeakValueDictionary[str, _SessionQueue]()
        """The sessions with chunks, by their ids."""
        self._capacity = asyncio.Semaphore(MAX_UNANSWERED)
        self._replies: asyncio.Queue[asyncio.Task[_StreamReply] | None] = asyncio.Queue()
        """Replies in the order of the requests; None is the end."""
        self._running: set[asyncio.Task[_StreamReply]] = set()

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
            tasks = [reading, stopping, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # The errors of these tasks refer to this frame and this object. Both would stay in memory until a garbage collection.
            del reading, stopping, tasks, task
            while not self._replies.empty():
                self._replies.get_nowait()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        """Start a task for each request. Tasks start in this order, so the chunks of a session reach the engine in order."""
        try:
            await self._capacity.acquire()
            async for data in requests:
                task = asyncio.ensure_future(self._reply(data, time.monotonic()))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                self._replies.put_nowait(task)
                if len(data) > MAX_LOOP_BODY_BYTES and _is_decoded_slowly(data):
                    await asyncio.wait([task])  # later chunks of its session would overtake it meanwhile
                await self._capacity.acquire()
        finally:
            self._replies.put_nowait(None)

    async def _stop_reading(self, reading: asyncio.Task[None]) -> None:
        await self._call.stopping.wait()
        await asyncio.sleep(LAST_READ_SECONDS)
        reading.cancel()

    async def _write(self) -> None:
        while (task := await self._replies.get()) is not None:
            reply = await task
            if reply.error is not None and self._call.has_metadata(*GRPC_ERRORS):
                raise reply.error
            await self._call.write(reply.message)
            self._capacity.release()

    async def _reply(self, data: bytes, arrived: float) -> _StreamReply:
        runner, call, exchange = self._runner, self._call, self._call.exchange()
        try:
            async with AsyncExitStack() as stack:
                with runner.reading(exchange, arrived, call.caller):
                    decoded = await runner.decode_slowly(data, call.route.session, call.deadline, stack)
                started = False

                async def start() -> HttpReply:
                    nonlocal started
                    started = True
                    return await runner.answer(decoded, exchange, arrived, call.caller)

                try:
                    reply = await self._in_session_order(decoded.context.request, start)
                except asyncio.CancelledError:
                    if not started:
                        runner.abandon(GONE if exchange.disconnected else CUT_OFF)
                    raise
        except Exception as error:
            return _error_reply(data, runner.frontend.error_for(error))
        return _StreamReply(reply.content)

    async def _in_session_order(self, request: InferRequest, start: StartChunk) -> HttpReply:
        """Start a request after the earlier chunks of its session, and return the reply."""
        parameters = request.parameters
        id = str(parameters.get("sequence_id") or self._call.route.session or "")
        if not id:
            return await start()
        alone = bool(parameters.get("sequence_start") or parameters.get("sequence_end"))
        return await self._sessions.setdefault(id, _SessionQueue()).run(start, alone=alone)


class _SessionQueue:
    """The chunks of one session, in the order of arrival.

    A chunk that starts or ends the session is answered before the next chunk is sent: the engine would reject a chunk that comes
    too early.
    """

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        """The tasks of chunks that run at the same time."""

    async def run(self, start: StartChunk, *, alone: bool) -> HttpReply:
        """Run a chunk in the current task. alone: the chunk starts or ends the session, so no other chunk may run at the same time."""
        async with self._order:
            if alone:
                if self._running:
                    await asyncio.wait(self._running)
                return await start()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await start()  # the next chunk gets its turn when this chunk is sent
        finally:
            self._running.discard(task)


def _is_decoded_slowly(data: bytes) -> bool:
    """Return whether the decoder reads a message, or its texts may be large."""
    try:
        head = split_request(data).head
    except InvalidRequest:
        return False
    return len(head) > MAX_LOOP_BODY_BYTES or BYTES.encode() in head


def _error_reply(data: bytes, error: ServiceError) -> _StreamReply:
    """Return the reply to a message with an error. It has the id of the message, if that can be read."""
    try:
        id = split_request(data).id
    except InvalidRequest:
        id = ""
    return _StreamReply(RESPONSE(error_message=error.message, infer_response={"id": id}).SerializeToString(), error)
