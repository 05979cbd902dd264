"""No body occupies the event loop for long, whatever its content. Each test measures the longest callback of a whole request."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from fastapi import FastAPI

from service.errors import ServiceError, TooLarge
from service.frontend.dispatch.connection import Receiver
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.grpc.infer import GrpcRunner
from service.frontend.rest.app import build_app
from service.frontend.run.catalog import Catalog, ServedModel
from service.frontend.run.frontend import Frontend, SupervisorClient
from service.ipc.messages.inference import Answer, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec import ModelSpec
from service.settings import Settings
from tests import models

MAX_CALLBACK_SECONDS = 0.010
"""No request may occupy the event loop for longer. This is processor time: another process may always delay a callback."""
ATTEMPTS = 3
T = TypeVar("T")
MIB = 1 << 20
FEATURES = 64
INFER = "/v2/models/sensors/infer"


def with_short_callbacks(run: Callable[[asyncio.Runner], T], runner: asyncio.Runner) -> T:
    """Return a result that comes without a long callback of the event loop.

    A long callback is measured again: with cold caches, as after another process had the core, it takes more processor time.
    """
    run_handle = asyncio.Handle._run
    gc.collect()
    gc.freeze()  # as in the service: otherwise a collection visits all objects of all tests
    try:
        for _ in range(ATTEMPTS):
            longest: tuple[float, str] = (0.0, "")

            def measure(handle: asyncio.Handle) -> None:
                nonlocal longest
                start = time.thread_time()
                run_handle(handle)
                longest = max(longest, (time.thread_time() - start, repr(handle)))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(asyncio.Handle, "_run", measure)
                result = run(runner)
            if longest[0] < MAX_CALLBACK_SECONDS:
                return result
    finally:
        gc.unfreeze()
    raise AssertionError(f"a callback took {longest[0]:.3f} s of processor time: {longest[1]}")


class Engine:
    """Answers each request with zeros, in the place of a dispatcher."""

    ready = True

    def __init__(self) -> None:
        self.received: list[int] = []

    def send(self, request: Request, tail: bytes | memoryview, receiver: Receiver) -> None:
        self.received.append(len(tail))
        scores, steps = (len(request.lengths), 3), sum(request.lengths)
        sequence = (steps, 8) if request.returns.sequence else ()
        answer = Answer(scores=scores, steps=request.lengths, sequence=sequence)
        data = bytes(4 * (scores[0] * 3 + steps * 8 * bool(sequence)))
        asyncio.get_running_loop().call_soon(receiver.answered, answer, data)


class Service:
    """A frontend in this process."""

    def __init__(self, specs: list[ModelSpec], runner: asyncio.Runner) -> None:
        self.engine, self.runner = Engine(), runner
        catalog = Catalog([ServedModel(spec, "1", None) for spec in specs], {})
        self.frontend = Frontend(
            Settings(), catalog, cast(Dispatcher, self.engine), Metrics(), Log("frontend"), cast(SupervisorClient, None)
        )
        self.app: FastAPI = build_app(self.frontend)

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a request. Return the status and the body of the reply, after a check of the callbacks."""
        return with_short_callbacks(lambda _: self.send(path, body, **headers), self.runner)

    def send(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a request in pieces as uvicorn would. Return the status and the body of the reply."""
        sent_headers = {"host": "localhost", **headers}
        names = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent_headers.items()]
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": names,
        }
        pieces = [body[start : start + (MIB >> 2)] for start in range(0, len(body), MIB >> 2)] or [b""]
        events = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        events[-1]["more_body"] = False
        sent: list[Any] = []

        async def run() -> None:
            replied, waiting = asyncio.Event(), iter(events)

            async def receive() -> Any:
                await asyncio.sleep(0)
                event = next(waiting, None)
                if event is None:
                    await replied.wait()
                return event or {"type": "http.disconnect"}

            async def send(event: Any) -> None:
                sent.append(event)

            await self.app(scope, receive, send)
            replied.set()

        self.runner.run(run())
        return sent[0]["status"], json.loads(sent[1]["body"])

    def call_grpc(self, message: bytes) -> ServiceError | None:
        """Read a ModelInferRequest. Return its error, after a check of the callbacks."""

        runner = GrpcRunner(self.frontend)

        async def run() -> ServiceError | None:
            await asyncio.sleep(0)
            try:
                async with AsyncExitStack() as stack:
                    await runner.decode_slowly(message, None, math.inf, stack)
                    return None
            except ServiceError as error:
                return error

        return with_short_callbacks(lambda runner: runner.run(run()), self.runner)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root: Path = tmp_path_factory.mktemp("models")
    specs = [models.sensors(root, features=FEATURES), models.sensors(root, "narrow", features=1), models.words(root)]
    with asyncio.Runner() as runner:
        made = Service(specs, runner)
        made.send("/infer", b"[" + b" " * MIB)  # starts the decoder, and completes the application
        yield made

        async def close() -> None:
            made.frontend.decoder.close()

        runner.run(close())


@pytest.mark.parametrize("element", [b"[]", b'""'])
def test_millions_of_small_values_in_infer(service: Service, element: bytes) -> None:
    text = b",".join([element] * MIB)
    status, reply = service.post("/infer", b'{"model":"sensors","inputs":[%b]}' % text)
    assert (status, reply["code"]) == (413, "too_large")


def test_large_raw_tensor_over_rest(service: Service) -> None:
    values = np.ones((1, 15 * MIB // (4 * FEATURES), FEATURES), np.float32)
    parameters = {"binary_data_size": values.nbytes}
    tensor = {"name": "inputs", "datatype": "FP32", "shape": values.shape, "parameters": parameters}
    header = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference_header_content_length": str(len(header))}
    status, reply = service.post(INFER, header + values.tobytes(), **headers)
    assert status == 200, reply
    assert service.engine.received[-1] == values.nbytes
    values[0, -1, -1] = np.nan
    status, reply = service.post(INFER, header + values.tobytes(), **headers)
    assert (status, reply["field"]) == (400, f"inputs[0][{values.shape[1] - 1}][{FEATURES - 1}]")


def test_gzip_of_a_million_parts(service: Service) -> None:
    inputs = b",".join([b'{"name":"","datatype":"","shape":[]}'] * (MIB // 3))
    body = gzip.compress(b'{"inputs":[%b],"outputs":[]}' % inputs, 9)
    assert len(body) < 64 << 10
    status, reply = service.post(INFER, body, content_encoding="gzip")
    assert (status, reply["field"]) == (413, "inputs")


FIELD_TAGS = {"parameters": b"\x22", "inputs": b"\x2a", "outputs": b"\x32", "raw_input_contents": b"\x3a"}


@pytest.mark.parametrize("part", FIELD_TAGS)
def test_message_of_a_million_empty_parts(service: Service, part: str) -> None:
    error = service.call_grpc((FIELD_TAGS[part] + b"\0") * MIB)
    assert isinstance(error, TooLarge)
    assert error.field == part
