"""The WebSocket /stream: a socket is a session, each message is its next chunk, and each reply follows in the order of the messages.

A chunk that is refused changes neither the session nor the socket. The service closes the socket with 1009 after a message that is too
large, with 1011 after an internal error or when the client answers no pings, and with 1012 when the service shuts down, after all
replies. websocket_protocol.py has the limits of a socket.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from msgspec import Struct, structs
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import CloseCode

from service.access.caller import Caller
from service.access.scopes import Scope
from service.errors import InferenceFailed, InvalidRequest, ServiceError, UnknownRoute
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.http1.websocket_protocol import SOCKET, WebSocketProtocol
from service.frontend.rest.chunks import (
    INPUT,
    NO_CHUNK,
    ChunkBody,
    ChunkOptions,
    DecodedChunk,
    StreamQuery,
    chunk_field,
    resolve_start,
)
from service.frontend.rest.http_exchange import SUBPROTOCOL, admit, error_body, identity_of, named_session, peer_of
from service.frontend.rest.infer import InferRunner
from service.frontend.rest.schemas import describe_query
from service.frontend.run.access_log import audited
from service.frontend.run.catalog import ServedModel
from service.frontend.run.exchange import HttpReply
from service.frontend.run.frontend import Frontend
from service.frontend.run.origin import Header, RequestOrigin
from service.frontend.run.runner import DecodedRequest, RunningRequest
from service.frontend.run.session_header import DESCRIPTION, resolve_session
from service.frontend.run.validation import PackedInputs, check_empty_chunk, pack_input
from service.ipc.blocks import block_key
from service.ipc.messages.decoder import DecodeBody
from service.ipc.messages.inference import BlockKey, Request
from service.ipc.messages.sessions import RESERVED_SESSION_PREFIX
from service.ipc.messages.tracing import Api

MAX_IN_FLIGHT = 32
"""Number of messages of one socket that are read before they are answered. Later messages, and the end of the socket, wait."""
MAX_TOGETHER, CHUNK_COST = 8192, 128
"""Most bytes of chunks that are sent together, and the bytes as which a chunk counts besides its own."""
_UnsentChunk = tuple[Request, bytes, RunningRequest, Callable[[], None] | None]
"""The arguments of `Dispatcher.send`."""


class ChunkRunner(InferRunner):
    """Runs the chunks of all sockets."""

    field_of = staticmethod(chunk_field)
    api = Api.STREAM

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._waiting: list[_PendingReply] = []
        self._waiting_bytes = 0
        self.replied: dict[_ChunkStream, None] | None = None
        """The sockets that have replies to send, while the answers of a tick are written."""

    def send_soon(self, reply: _PendingReply, size: int) -> None:
        """Send a chunk of `size` bytes that continues its session at the end of the tick, when all sockets are read.

        The code that reads a message and the code that sends it then run many times in a row, which takes less time than by turns.
        """
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        self._waiting.append(reply)
        self._waiting_bytes += CHUNK_COST + size
        if self._waiting_bytes > MAX_TOGETHER:
            self._send_waiting()

    def _send_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        unobserved, now = not (self._observer.chooses or self._observer.times_all), time.monotonic()
        blocks = dict[BlockKey, list[_UnsentChunk]]()
        for reply in waiting:
            model = reply.stream.model
            if unobserved and model is not None and model.key in self.frontend.catalog:
                self._prepare(reply, model, now, blocks)
            else:
                reply.stream.send(reply)
        for block, chunks in blocks.items():
            self._send_chunks(block, chunks)

    def _prepare(
        self, reply: _PendingReply, model: ServedModel, now: float, blocks: dict[BlockKey, list[_UnsentChunk]]
    ) -> None:
        """Add a chunk for the model that answered the last chunk of its socket to the chunks to send, as `run` sends it."""
        stream, chunk, arrived = reply.stream, reply.chunk, reply.arrived
        caller, options, end = stream.caller, stream.options, None
        self._tally.accepted += 1
        reply.call = call = RunningRequest(self, reply, model, arrived, now, chunk, caller, None)
        try:
            if options.prepared != (model, caller):
                options.prepare(model, caller)
            data, block = pack_input(chunk.input, INPUT, model), options.block
            if not data:
                check_empty_chunk(False, False, INPUT)
            request = prepared = options.continuing(len(data) // model.step_bytes, chunk.steps, arrived, now)
            call.lengths = request.lengths
            if caller.is_limited or self.frontend.limits.memory.limited:
                request, end = self.frontend.begin(caller, prepared, len(data))
                block = block if request is prepared else block_key(request)
            chunks = blocks.get(block)
            if chunks is None:
                chunks = blocks[block] = []
            chunks.append((request, data, call, end))
        except Exception as error:
            self.fail_or_search(call, self.frontend.error_for(error))

    def _send_chunks(self, block: BlockKey, chunks: list[_UnsentChunk]) -> None:
        dispatcher = self.frontend.dispatcher
        try:
            sent = dispatcher.send_chunks(block, chunks)
            for (_, _, call, _), pending in zip(chunks, sent, strict=True):
                call.pending = pending
        except ServiceError:  # of an engine or a chunk that others have nothing to do with
            for request, data, call, end in chunks:
                try:
                    call.pending = dispatcher.send(request, data, call, end)
                except ServiceError as error:
                    if end is not None:
                        end()
                    self.fail_or_search(call, error)

    def _write_answers(self) -> None:
        """Write the answers of the tick, and send each socket its replies together."""
        replied = dict[_ChunkStream, None]()
        self.replied = replied
        super()._write_answers()
        self.replied = None
        for stream in replied:
            stream.send_replies()

    def write(self, model: ServedModel, calls: list[RunningRequest]) -> list[HttpReply | ServiceError]:
        together = model.writer.write_all([(call.answer, call.data) for call in calls])
        if together is None:
            return super().write(model, calls)
        template = b'{%b,"outputs":%%b,"session":{"id":%%b,"steps":%%d}}' % model.identity.replace(b"%", b"%%")
        return [
            HttpReply(template % (outputs, call.decoded.context.session_json, call.answer.session_steps), b"")
            for outputs, call in zip(together, calls, strict=True)
        ]

    def build(
        self, decoded: DecodedRequest, model: ServedModel, arrived: float, packed: PackedInputs | None
    ) -> tuple[Request, bytes | memoryview]:
        assert isinstance(decoded, DecodedChunk)
        options: ChunkOptions = decoded.context
        return options.request(decoded, model, arrived, packed)


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add /stream. WebSocket handshakes at other paths are refused with the error of an unknown route."""
    chunks = ChunkRunner(frontend)

    described = describe_query(StreamQuery)
    described["parameters"].append(DESCRIPTION)

    @router.get("/stream", status_code=101, openapi_extra=described)
    async def describe_stream(request: HttpRequest) -> Response:
        """Open a WebSocket. Each message is the next chunk of a session, and each reply has the form of /infer."""
        raise InvalidRequest("this path is a WebSocket: connect with ws:// or wss://, or send chunks to /infer")

    @router.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        await serve_socket(frontend, chunks, socket)

    @router.websocket("/{path:path}")
    async def unknown_path(socket: WebSocket) -> None:
        raise UnknownRoute("no WebSocket is served at this path: see /docs")


async def serve_socket(frontend: Frontend, chunks: ChunkRunner, socket: WebSocket) -> None:
    """Serve one socket until it closes. Raises a ServiceError, which refuses the handshake, for an invalid query."""
    with audited(frontend, Scope.SESSION, "GET /stream", peer_of(socket)) as entry:
        await admit(frontend, socket, Scope.SESSION, entry)
    query = StreamQuery.parse(socket.query_params.multi_items())
    query.session = resolve_session(query.session, named_session(socket), "session")
    # An open session stays with its version, whether that is served or not.
    model, unknown = frontend.catalog.find_or_retired(query.model, query.version)
    if unknown is not None and query.session is None:
        raise unknown
    query.check_options(model.spec, frontend.settings)
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope.get("subprotocols", ()) else None)
    stream = _ChunkStream(frontend, chunks, socket, query, model.key.labels, entry.caller)
    frontend.access.streams.add(stream)
    try:
        await stream.run()
    finally:
        frontend.access.streams.discard(stream)
        await stream.leave()


class _ChunkStream:
    """An OpenStream: the chunks of one socket, answered in their order.

    The first chunk starts or continues the session. Every later chunk only continues it unless the message has `start`, so a session
    that was lost never restarts by accident. A chunk that starts or ends the session is answered before the next chunk leaves for the
    engine: only its reply tells whether the next chunk starts the session or continues it.
    """

    def __init__(
        self,
        frontend: Frontend,
        chunks: ChunkRunner,
        socket: WebSocket,
        query: StreamQuery,
        labels: tuple[str, str],
        caller: Caller,
    ) -> None:
        """labels: the metric labels of messages that cannot be parsed."""
        self._frontend = frontend
        self.scope = Scope.SESSION
        self.chunks = chunks
        self._starts = frontend.limits.starts
        self._socket = socket
        self._connection: WebSocketProtocol = socket.scope["extensions"][SOCKET]
        self._query = query
        self._session = query.session or RESERVED_SESSION_PREFIX + uuid.uuid4().hex
        self.options = ChunkOptions(query, self._session, frontend.settings)
        self._labels = labels
        self.caller = caller
        self.identity = identity_of(socket)
        self.model: ServedModel | None = None
        """The model that answered the latest chunk: the session belongs to it."""
        self._begun = False
        """Whether the session has begun and not ended."""
        self._submitted = False
        self.disconnected = False
        self._unanswered: deque[_PendingReply] = deque()
        self._alone: asyncio.Task[None] | None = None
        """Handles a message that is answered before the next message is taken."""
        self._all_answered: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Answer messages until the client disconnects or the service shuts down; on shutdown, answer what arrived before it."""
        self._connection.deliver_to(self)
        event = await self._socket.receive()
        self.disconnected = not (self._frontend.draining and event["code"] == CloseCode.SERVICE_RESTART)
        if not self.disconnected:
            if self._alone is not None:
                await asyncio.wait([self._alone])
            await self._wait_for_replies()
            with suppress(WebSocketDisconnect):
                await self._socket.close(CloseCode.SERVICE_RESTART)

    def revoke(self, error: ServiceError) -> None:
        self._connection.revoke(error)

    async def leave(self) -> None:
        """Cancel the unanswered chunks, and close the session if it belongs to this socket alone."""
        if self._alone is not None:
            self._alone.cancel()
            await asyncio.wait([self._alone])
        for reply in self._unanswered:
            reply.cancel(cut_off=not self.disconnected)
        self._unanswered.clear()
        if self._query.session is None and self._submitted:
            with suppress(ServiceError):
                await self._frontend.dispatcher.end_session(self.caller.session(self._session))

    # The receiver of messages.

    @property
    def ready(self) -> bool:
        return self._alone is None and len(self._unanswered) < MAX_IN_FLIGHT

    def receive(self, data: bytes, is_text: bool, arrived: float) -> bool:
        """Send a chunk to the engine, or start a task for a message that is answered alone."""
        if is_text and len(data) > MAX_LOOP_BODY_BYTES:
            self._handle_alone(self._answer_large(data, arrived))
            return False
        reply, refusing = _PendingReply(self, arrived), self._starts.refusing
        if is_text or refusing:
            try:
                if refusing:
                    raise self._starts.refuse()
                reply.chunk = self._decoded(ChunkBody.parse(data))
            except ServiceError as error:
                self._unanswered.append(reply)
                self.chunks.refuse(self._labels, error, arrived, reply, self.caller)
                reply.respond_error(error)
                return self.ready
        else:
            reply.chunk = DecodedChunk(*self.options.decoded, data, False if self._begun else None)
        if reply.chunk.start is not False or reply.chunk.end:
            self._handle_alone(self._send_alone(reply))
            return False
        self._unanswered.append(reply)
        self.chunks.send_soon(reply, len(data))
        return len(self._unanswered) < MAX_IN_FLIGHT

    def _decoded(self, chunk: ChunkBody) -> DecodedChunk:
        start = resolve_start(chunk.start, begun=self._begun)
        return DecodedChunk(*self.options.decoded, chunk.input, start, chunk.end, chunk.steps)

    # Replies.

    def send_replies(self) -> None:
        """Send the replies that are next in the order of the messages."""
        unanswered, contents, failed = self._unanswered, list[bytes | memoryview](), False
        was_full = len(unanswered) == MAX_IN_FLIGHT
        while unanswered and unanswered[0].content:
            reply = unanswered.popleft()
            if not failed:
                contents.append(reply.content)
                failed = reply.in_error
        self._connection.send_texts(contents)
        if failed:
            self._connection.fail("the service failed on a message")
        if not unanswered and self._all_answered is not None and not self._all_answered.done():
            self._all_answered.set_result(None)
        if was_full and self.ready:
            self._connection.read_on()

    async def _wait_for_replies(self) -> None:
        """Wait until every message has its reply."""
        if self._unanswered:
            self._all_answered = asyncio.get_running_loop().create_future()
            await self._all_answered

    # Messages.

    def send(self, reply: _PendingReply) -> None:
        """Send a chunk to the engine."""
        chunk, model = reply.chunk, self.model
        if chunk.start is not False or model is None or model.key not in self._frontend.catalog:
            model = None
        self._submitted = True
        try:
            reply.call = self.chunks.run(chunk, reply, reply.arrived, self.caller, model)
        except Exception as error:
            reply.respond_error(self._frontend.error_for(error))

    def _handle_alone(self, handling: Coroutine[Any, Any, None]) -> None:
        def read_on(task: asyncio.Task[None]) -> None:
            self._alone = None
            self._connection.read_on()

        self._alone = asyncio.ensure_future(handling)
        self._alone.add_done_callback(read_on)

    async def _send_alone(self, reply: _PendingReply) -> None:
        """Answer a chunk that starts or ends the session."""
        await self._wait_for_replies()
        self._unanswered.append(reply)
        self.send(reply)
        await self._wait_for_replies()
        if not reply.failed:
            self._begun = not reply.chunk.end

    async def _answer_large(self, data: bytes, arrived: float) -> None:
        """Answer a message that the decoder parses."""
        await self._wait_for_replies()
        reply = _PendingReply(self, arrived)
        self._unanswered.append(reply)
        try:
            async with AsyncExitStack() as stack:
                with self.chunks.reading(reply, arrived, self.caller, self._labels):
                    large = await stack.enter_async_context(self._frontend.decoder.decode(DecodeBody("stream"), data))
                    chunk = self._decoded(msgspec.json.decode(large.options, type=ChunkBody))
                self._submitted = True
                reply.call = self.chunks.run(structs.replace(chunk, pack=large.pack), reply, arrived, self.caller)
                await self._wait_for_replies()
        except Exception as error:
            reply.respond_error(self._frontend.error_for(error))
        else:
            if not reply.failed and (chunk.start is not False or chunk.end):
                self._begun = not chunk.end


class _PendingReply(Struct, eq=False):
    """The reply to one message: the exchange of its request."""

    stream: _ChunkStream
    arrived: float
    chunk: DecodedChunk = NO_CHUNK
    call: RunningRequest | None = None
    """The request until its end. It refers to this object: a cycle would stay in memory until the next full garbage collection."""
    content: bytes | memoryview = b""
    failed: bool = False
    in_error: bool = False
    """Whether the frontend failed. It is then unknown whether the session has the chunk."""
    trace_headers: tuple[Header, ...] = ()
    """A message has no headers."""

    @property
    def origin(self) -> RequestOrigin:
        return self.stream.identity.origin

    @property
    def request_id(self) -> bytes:
        """Return the id of the handshake, which all messages of a socket have."""
        return self.stream.identity.request_id

    @property
    def disconnected(self) -> bool:
        return self.stream.disconnected

    def respond(self, content: bytes | memoryview, headers: bytes) -> None:
        stream = self.stream
        if self.call is not None:
            stream.model, self.call = self.call.model, None
        self.content = content
        if stream.chunks.replied is None:
            stream.send_replies()
        else:
            stream.chunks.replied[stream] = None

    def respond_error(self, error: ServiceError) -> None:
        self.call, self.failed = None, True
        self.in_error = isinstance(error, InferenceFailed) and error.in_frontend
        self.content = error_body(error)
        self.stream.send_replies()

    def cancel(self, *, cut_off: bool) -> None:
        """Cancel the request."""
        call, self.call = self.call, None
        if call is not None:
            (call.cut_off if cut_off else call.disconnect)()
