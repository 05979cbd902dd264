"""The WebSocket door: a socket is a session, a message its next chunk, answered by one message in the order in which they came.

A chunk that is refused leaves the session where it was, and the socket open. The service closes it with 1009 after a message that is too
large, with 1011 after a fault of its own or when nothing answers its pings, and with 1012 when it ends, all answers given.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from service.errors import ServiceError
from service.frontend.inference import CallerGone, Frontend, answer, bug, counted
from service.frontend.rest import schemas

IN_FLIGHT = 32
"""Messages of one socket that are read before they are answered. More wait in the socket, as does, behind them, its end."""
SERVICE_RESTART = 1012
INTERNAL_ERROR = 1011


async def stream(frontend: Frontend, socket: WebSocket) -> None:
    """Serve one socket until its end. Raises a ServiceError, which refuses the handshake, when it asks for what is not served."""
    query = schemas.StreamQuery.parse(socket.query_params.multi_items())
    session = schemas.OWN_SESSION + uuid.uuid4().hex if query.session is None else query.session
    model = frontend.models.find(query.model, query.version)
    body = schemas.stream_body(query, session, model.spec, frontend.settings)
    await socket.accept()
    served = _Stream(frontend, socket, body, model.key.labels)
    try:
        await served.run()
    finally:
        await served.leave(ends=query.session is None)


class _Stream:
    """One socket. `body` is what all its chunks have in common; labels: of those that cannot even be read.

    Its first chunk begins the session or goes on with it, and every other goes on with it unless it says otherwise: a session that was
    lost is never begun again by accident. A chunk that begins or ends the session is answered before another is sent to the engine, as
    only its answer says what the next one is.
    """

    def __init__(self, frontend: Frontend, socket: WebSocket, body: schemas.ChunkBody, labels: tuple[str, str]) -> None:
        self._frontend = frontend
        self._labels = labels
        self._socket = socket
        self._body = body
        self._begun = False
        self._gone = False
        self._asked = False
        self._unanswered: deque[asyncio.Task[bool]] = deque()

    async def run(self) -> None:
        """Until the caller closes, or the service ends; what came before that is then answered."""
        while (said := await self._socket.receive())["type"] == "websocket.receive":
            await self._take(time.monotonic(), said)
            while len(self._unanswered) >= IN_FLIGHT:
                await asyncio.wait([self._unanswered[0]])
                self._unanswered.popleft()
        self._gone = not (self._frontend.draining and said["code"] == SERVICE_RESTART)
        if not self._gone:
            await self._settle()
            with suppress(WebSocketDisconnect):
                await self._socket.close(SERVICE_RESTART)

    async def leave(self, *, ends: bool) -> None:
        """Nobody waits for what is left unanswered; whether the session ends with the socket."""
        for task in self._unanswered:
            task.cancel()
        if self._unanswered:
            await asyncio.wait(self._unanswered)
        if ends and self._asked:
            with suppress(ServiceError):
                await self._frontend.engines.end_session(self._body.session or "")

    async def _take(self, arrived: float, said: Any) -> None:
        """Have a message answered, at once or when those before it are."""
        try:
            message = schemas.Message.read(said)
        except ServiceError as fault:
            self._answer(arrived, fault)
            return
        body = self._body.chunk(message, goes_on=self._begun)
        if body.start is False and not body.end:
            self._answer(arrived, body)
            return
        await self._settle()
        task = self._answer(arrived, body)
        await self._settle()
        if not task.cancelled() and task.result():
            self._begun = not body.end

    def _answer(self, arrived: float, body: schemas.ChunkBody | ServiceError) -> asyncio.Task[bool]:
        """Tasks begin in the order in which they are made, and so chunks leave for the engine in the order of their messages."""
        before = self._unanswered[-1] if self._unanswered else None
        task = asyncio.ensure_future(self._reply(arrived, body, before))
        self._unanswered.append(task)
        return task

    async def _settle(self) -> None:
        """Wait until all that came is answered: the last answer is the last one to be sent."""
        if self._unanswered:
            await asyncio.wait([self._unanswered[-1]])
            self._unanswered.clear()

    async def _reply(self, arrived: float, body: schemas.ChunkBody | ServiceError, before: asyncio.Task[bool] | None) -> bool:
        """Answer one message when the one before it is answered; true when with no error."""
        fault: Exception | None = None
        try:
            said = await self._said(arrived, body)
        except CallerGone:
            return False
        except ServiceError as refused:
            fault, said = refused, _error(refused)
        except Exception as raised:
            fault, said = raised, _error(bug(self._frontend, raised))
        if before is not None:
            await asyncio.wait([before])
        with suppress(WebSocketDisconnect, WebSocketDisconnected):
            await self._socket.send_text(said.decode())
            if fault is not None and not isinstance(fault, ServiceError):
                await self._socket.close(INTERNAL_ERROR)
        return fault is None

    async def _said(self, arrived: float, body: schemas.ChunkBody | ServiceError) -> bytes:
        with counted(self._frontend.metrics, arrived) as call:
            call.labels = self._labels
            if isinstance(body, ServiceError):
                raise body
            self._asked = True
            try:
                return await answer(self._frontend, call, body)
            except asyncio.CancelledError:
                if self._gone:
                    raise CallerGone from None
                raise


def _error(fault: ServiceError) -> bytes:
    return msgspec.json.encode(schemas.error_body(fault))
