"""The replies to a client of /stream when the frontend itself fails. The test plays the connection and the engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from starlette.datastructures import Headers, QueryParams
from starlette.websockets import WebSocket
from websockets.frames import CloseCode

from service.errors import SessionConflict
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.hot_calls import RequestTally
from service.frontend.http_exchange import IDENTITY
from service.frontend.origin import NO_ORIGIN, RequestIdentity, RequestIds
from service.frontend.rest.websocket import HotChunks, serve_socket
from service.frontend.websocket_protocol import SOCKET, MessageReceiver
from service.ipc.channel import encode
from service.ipc.messages import Answer, Refusal, Request
from service.metrics import Metrics
from tests import models
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run
from tests.frontend.ports import frontend_of

CHUNK = b'{"input": [1, 2]}'


class Connection:
    """Records the actions of the application on a socket."""

    def __init__(self) -> None:
        self.replies: list[dict[str, Any]] = []
        self.code: CloseCode | None = None
        self.ended = asyncio.Event()
        self.receiver: MessageReceiver | None = None

    def deliver_to(self, receiver: MessageReceiver) -> None:
        self.receiver = receiver

    def read_on(self) -> None:
        """The test itself passes the messages to the receiver."""

    def send_text(self, content: bytes) -> None:
        self.replies.append(json.loads(content))

    def fail(self, reason: str) -> None:
        assert reason, "a close frame with 1011 and no reason echoes that of the client"
        self.code = CloseCode.INTERNAL_ERROR
        self.ended.set()

    def close_code(self) -> CloseCode | None:
        return self.code

    def socket(self, query: str) -> WebSocket:
        """Return the arguments that Starlette passes to the application."""

        async def receive() -> dict[str, Any]:
            await self.ended.wait()
            return {"type": "websocket.disconnect", "code": 1006}

        scope = {"extensions": {SOCKET: self}, IDENTITY: RequestIdentity(NO_ORIGIN, RequestIds())}
        played = SimpleNamespace(
            query_params=QueryParams(query), scope=scope, client=None, headers=Headers({"host": "localhost"})
        )
        played.accept, played.receive = AsyncMock(), receive
        return cast(WebSocket, played)

    async def reply(self, message: bytes) -> dict[str, Any]:
        """Pass a message to the application, and return the reply."""
        assert self.receiver is not None
        self.receiver.receive(message, is_text=True, arrived=time.monotonic())
        while not self.replies:
            await asyncio.sleep(0.001)
        return self.replies.pop()


async def run_engine(engine: EngineProcess) -> None:
    """Refuse the first request, answer the second, and refuse the end of the session."""
    for number in itertools.count():
        [frame] = await engine.frames(1)
        answers = number == 1 and isinstance(frame.message, Request)
        engine.send(encode(Answer((1, 2)) if answers else Refusal.of(SessionConflict("busy")), frame.id))


def fail(*arguments: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("method", ["build", "write"])
def test_internal_error_closes_the_socket_with_1011(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The session may or may not have the chunk. An error of the engine leaves the socket open."""
    spec = models.words(tmp_path)

    async def within(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine, connection = asyncio.ensure_future(run_engine(await meet(dispatcher))), Connection()
        frontend = frontend_of(dispatcher, metrics, spec)
        chunks = HotChunks(frontend, RequestTally(metrics))
        serving = asyncio.ensure_future(serve_socket(frontend, chunks, connection.socket("model=words")))
        await asyncio.sleep(0)
        assert (await connection.reply(CHUNK))["code"] == "session_conflict"
        assert connection.code is None
        monkeypatch.setattr(chunks, method, fail)
        reply = await connection.reply(CHUNK)
        assert reply["code"] == "inference_failed"
        assert connection.code == CloseCode.INTERNAL_ERROR
        assert "ZeroDivisionError" not in reply["error"]
        await serving
        engine.cancel()

    run(within)
