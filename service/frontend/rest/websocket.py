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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, StrictBool
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from service.errors import InvalidRequest, ServiceError, UnknownRoute
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.http_exchange import error_body
from service.frontend.inference import ClientDisconnected, Frontend, track_request
from service.frontend.rest.infer import InferBody, Packer, answer, check_returns
from service.frontend.rest.schemas import ERRORS, JsonBody, QueryParameters, SessionId, describe_query
from service.frontend.validation import RESERVED_SESSION_PREFIX, resolve_deadline_ms
from service.ipc.messages import DecodeBody
from service.modeling.spec import ModelSpec
from service.settings import Settings

MAX_IN_FLIGHT = 32
"""Number of messages of one socket that are read before they are answered. Later messages, and the end of the socket, wait."""
SERVICE_RESTART = 1012
INTERNAL_ERROR = 1011


class StreamQuery(QueryParameters):
    """Query parameters of /stream: the options that all chunks of a socket share."""

    endpoint = "/stream"

    model: str
    """Name or alias of a served model."""
    version: str | None = None
    """Version of the model; the newest by default."""
    session: SessionId | None = None
    """Id of a session that stays open when the socket closes. By default a new session opens and closes with the socket."""
    returns: list[Literal["embedding", "sequence"]] = Field([], alias="return")
    """Adds vectors to each reply: the pooled vector (embedding) or the vector of every step (sequence). Repeat the parameter for both,
    or separate the names with commas."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Milliseconds from a chunk's arrival after which its reply is useless to the client."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """A request with a higher priority runs sooner."""

    @classmethod
    def collect(cls, items: Iterable[tuple[str, str]]) -> dict[str, Any]:
        pairs = list(items)
        returns = [part for name, value in pairs if name == "return" for part in value.split(",")]
        return dict(pairs) | ({"return": returns} if returns else {})


class StreamMessage(JsonBody):
    """One text message on /stream."""

    endpoint = "a message on /stream"
    noun = "the message"
    example = '{"input": ...}'

    input: Any
    """The next chunk: a string, a list of token ids, or a list of steps with a list of floats each, depending on the model."""
    start: StrictBool | None = None
    """true restarts the session with this chunk; false only continues an open session."""
    end: StrictBool = False
    """true closes the session after this chunk; the next chunk starts it again."""

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> StreamMessage:
        """Return the message of a websocket.receive event. A binary message consists of the chunk alone."""
        data = event.get("bytes")
        return cls.parse(event["text"]) if data is None else cls.model_construct(input=bytes(data))


class ChunkBody(InferBody):
    """The body of POST /infer for one message on /stream, with the options of its socket."""

    def field_of(self, index: int) -> str:
        return "input"

    def with_message(self, message: StreamMessage, *, session_begun: bool) -> ChunkBody:
        """Return the body for a message. Once the session has begun, a message without `start` only continues it."""
        start = False if message.start is None and session_begun else message.start
        return self.model_copy(update={"inputs": [message.input], "start": start, "end": message.end})


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add /stream. WebSocket handshakes at other paths are refused with the error of an unknown route."""

    @router.get("/stream", responses=ERRORS, openapi_extra=describe_query(StreamQuery))
    async def describe_stream(request: Request) -> Response:
        """A WebSocket: each message is the next chunk of a session, and each reply has the form of /infer."""
        raise InvalidRequest("this path is a WebSocket: connect with ws:// or wss://, or send chunks to /infer")

    @router.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        await serve_socket(frontend, socket)

    @router.websocket("/{path:path}")
    async def unknown_path(socket: WebSocket) -> None:
        raise UnknownRoute("no WebSocket is served at this path: see /docs")


async def serve_socket(frontend: Frontend, socket: WebSocket) -> None:
    """Serve one socket until it closes. Raises a ServiceError, which refuses the handshake, for an invalid query."""
    query = StreamQuery.parse(socket.query_params.multi_items())
    session = RESERVED_SESSION_PREFIX + uuid.uuid4().hex if query.session is None else query.session
    model = frontend.catalog.find(query.model, query.version)
    body = body_of_stream(query, session, model.spec, frontend.settings)
    await socket.accept()
    chunks = _ChunkStream(frontend, socket, body, model.key.labels)
    try:
        await chunks.run()
    finally:
        await chunks.leave(close_session=query.session is None)


def body_of_stream(query: StreamQuery, session: str, spec: ModelSpec, settings: Settings) -> ChunkBody:
    """Return the body that all chunks of a socket share; raises a ServiceError for options that every chunk would be refused for."""
    body = ChunkBody.model_construct(
        model=query.model,
        inputs=[],
        version=query.version,
        returns=query.returns,
        session=session,
        deadline_ms=query.deadline_ms,
        priority=query.priority,
    )
    check_returns(body.returns, spec)
    resolve_deadline_ms(body.deadline_ms, settings)
    return body


class _ChunkStream:
    """The chunks of one socket, answered in their order. `labels` are the metric labels of messages that cannot be parsed.

    The first chunk starts or continues the session. Every later chunk only continues it unless the message has `start`, so a session
    that was lost never restarts by accident. A chunk that starts or ends the session is answered before the next chunk leaves for the
    engine: only its reply tells whether the next chunk starts the session or continues it.
    """

    def __init__(self, frontend: Frontend, socket: WebSocket, body: ChunkBody, labels: tuple[str, str]) -> None:
        self._frontend = frontend
        self._labels = labels
        self._socket = socket
        self._body = body
        self._session_begun = False
        self._disconnected = False
        self._submitted = False
        self._unanswered: deque[asyncio.Task[bool]] = deque()

    async def run(self) -> None:
        """Answer messages until the client disconnects or the service shuts down; on shutdown, answer what arrived before it."""
        while (event := await self._socket.receive())["type"] == "websocket.receive":
            await self._handle_message(time.monotonic(), event)
            while len(self._unanswered) >= MAX_IN_FLIGHT:
                await asyncio.wait([self._unanswered[0]])
                self._unanswered.popleft()
        self._disconnected = not (self._frontend.draining and event["code"] == SERVICE_RESTART)
        if not self._disconnected:
            await self._wait_for_replies()
            with suppress(WebSocketDisconnect):
                await self._socket.close(SERVICE_RESTART)

    async def leave(self, *, close_session: bool) -> None:
        """Cancel the unanswered chunks, and close the session if it belongs to this socket alone."""
        for task in self._unanswered:
            task.cancel()
        if self._unanswered:
            await asyncio.wait(self._unanswered)
        if close_session and self._submitted:
            with suppress(ServiceError):
                await self._frontend.dispatcher.end_session(self._body.session or "")

    async def _handle_message(self, arrived: float, event: Any) -> None:
        """Start the reply to a message, after the replies to earlier messages if the chunk starts or ends the session."""
        text = event.get("text")
        try:
            if text is None or len(text) <= MAX_LOOP_BODY_BYTES:
                await self._handle_parsed(arrived, StreamMessage.read(event))
                return
            async with self._frontend.decoder.decode(DecodeBody("stream"), text.encode()) as decoded:
                await self._handle_parsed(arrived, StreamMessage.restore(decoded.options, input=None), decoded.pack)
                # The next chunk would overtake this chunk while the decoder packs its inputs.
                await self._wait_for_replies()
        except ServiceError as error:
            self._start_reply(arrived, error)

    async def _handle_parsed(self, arrived: float, message: StreamMessage, pack: Packer | None = None) -> None:
        body = self._body.with_message(message, session_begun=self._session_begun)
        if body.start is False and not body.end:
            self._start_reply(arrived, body, pack)
            return
        await self._wait_for_replies()
        task = self._start_reply(arrived, body, pack)
        await self._wait_for_replies()
        if not task.cancelled() and task.result():
            self._session_begun = not body.end

    def _start_reply(self, arrived: float, body: ChunkBody | ServiceError, pack: Packer | None = None) -> asyncio.Task[bool]:
        """Start a task for one reply. Tasks run in the order of their creation, so chunks leave in the order of their messages."""
        previous = self._unanswered[-1] if self._unanswered else None
        task = asyncio.ensure_future(self._reply(arrived, body, pack, previous))
        self._unanswered.append(task)
        return task

    async def _wait_for_replies(self) -> None:
        """Wait until every message has its reply: replies are sent in order, so the last reply ends the wait."""
        if self._unanswered:
            await asyncio.wait([self._unanswered[-1]])
            self._unanswered.clear()

    async def _reply(
        self, arrived: float, body: ChunkBody | ServiceError, pack: Packer | None, previous: asyncio.Task[bool] | None
    ) -> bool:
        """Reply to one message after the previous reply. Return true unless the reply is an error."""
        internal, succeeded = False, True
        try:
            text = await self._answer(arrived, body, pack)
        except ClientDisconnected:
            return False
        except ServiceError as error:
            succeeded, text = False, error_body(error)
        except Exception as error:
            internal, succeeded, text = True, False, error_body(self._frontend.internal_error(error))
        if previous is not None:
            await asyncio.wait([previous])
        with suppress(WebSocketDisconnect, WebSocketDisconnected):
            await self._socket.send_text(text.decode())
            if internal:
                await self._socket.close(INTERNAL_ERROR)
        return succeeded

    async def _answer(self, arrived: float, body: ChunkBody | ServiceError, pack: Packer | None) -> bytes:
        with track_request(self._frontend.metrics, arrived) as tracked:
            tracked.labels = self._labels
            if isinstance(body, ServiceError):
                raise body
            self._submitted = True
            try:
                return await answer(self._frontend, tracked, body, pack)
            except asyncio.CancelledError:
                if self._disconnected:
                    raise ClientDisconnected from None
                raise
