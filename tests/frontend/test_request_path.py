"""How many modules of the frontend a request to POST /infer passes: a newcomer who follows one request opens these files."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import uvicorn
from numpy.typing import NDArray
from uvicorn.server import ServerState

import service.frontend
from service.frontend.app import build_app
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http_protocol import HttpProtocol
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.server import build_hot_path
from service.ipc.channel import encode
from service.ipc.messages import Answer
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests import models
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, run

FOLDER = f"{Path(service.frontend.__file__).parent}/"
MAX_MODULES = 12
HOST = (b"host", b"localhost")


@contextmanager
def recorded_modules() -> Iterator[set[str]]:
    """Record the modules of service/frontend that execute code within this context."""
    modules: set[str] = set()

    def record(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(FOLDER):
            modules.add(frame.f_code.co_filename.removeprefix(FOLDER))

    sys.setprofile(record)
    try:
        yield modules
    finally:
        sys.setprofile(None)


def test_infer_passes_few_modules(tmp_path: Path) -> None:
    """The application runs in this process, without uvicorn, and the test plays the engine."""
    spec = models.words(tmp_path)
    scores = np.array([[0.25, 0.5, 0.25]], np.float32)
    request = json.dumps({"model": "words", "inputs": [[1, 2, 3]]}).encode()
    scope = {"type": "http", "method": "POST", "path": "/infer", "raw_path": b"/infer", "headers": [HOST], "query_string": b""}

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        catalog = Catalog([ServedModel(spec, "1", None)], {})
        frontend = Frontend(Settings(), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
        app = build_app(frontend)
        replied = asyncio.Event()
        events = [{"type": "http.request", "body": request, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if events:
                return events.pop()
            await replied.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        with recorded_modules() as modules:
            handling = asyncio.ensure_future(app(cast(Any, scope), receive, send))
            [frame] = await engine.frames(1)
            engine.send(encode(Answer(scores=scores.shape, steps=[3]), frame.id, (scores.tobytes(),)))
            await handling
        replied.set()
        assert sent[0]["status"] == 200
        assert json.loads(sent[1]["body"])["outputs"][0]["score"] == 0.5
        assert len(modules) <= MAX_MODULES, " ".join(sorted(modules))

        await asyncio.sleep(0.01)  # for the tasks that the general path has cancelled
        protocol = connection(frontend)
        with recorded_modules() as hot_modules:
            reply = await hot_reply(protocol, engine, request, scores)
        assert reply.endswith(sent[1]["body"]), "both paths write the same reply"
        assert "http_protocol.py" in hot_modules
        assert len(hot_modules) <= MAX_MODULES, " ".join(sorted(hot_modules))

    run(test)


def test_connection_that_was_reset_leaves_no_timer() -> None:
    """A reply was written in full, and the client resets the connection before it has read the reply."""

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        frontend = Frontend(Settings(), Catalog([], {}), dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
        protocol = connection(frontend)
        cast(Mock, protocol.transport).is_closing.return_value = False
        protocol.on_response_complete()
        timer = protocol.timeout_keep_alive_task
        assert timer is not None
        protocol.connection_lost(ConnectionResetError())
        assert timer.cancelled()

    run(test)


def connection(frontend: Frontend) -> HttpProtocol:
    """Return the protocol of a connection whose transport is a mock."""
    config = uvicorn.Config(build_app(frontend), http=HttpProtocol, log_config=None)
    config.load()
    protocol = HttpProtocol(config, ServerState(), {}, hot_path=build_hot_path(frontend))
    protocol.connection_made(Mock(**{"get_extra_info.return_value": None}))
    return protocol


async def hot_reply(protocol: HttpProtocol, engine: EngineProcess, body: bytes, scores: NDArray[np.float32]) -> bytes:
    """Return the bytes that the hot path writes to the connection of a request."""
    protocol.data_received(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    [frame] = await engine.frames(1)
    engine.send(encode(Answer(scores=scores.shape, steps=[3]), frame.id, (scores.tobytes(),)))
    write = cast(Mock, protocol.transport).write
    while not write.called:
        await asyncio.sleep(0.001)
    written: bytes = write.call_args.args[0]
    return written
