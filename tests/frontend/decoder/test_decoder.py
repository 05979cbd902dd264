"""The decoder returns what the frontend itself would return: the same requests to the engine, the same replies, the same errors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import struct
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from websockets.sync.client import connect

from service.access.caller import LOCAL
from service.errors import InvalidInput, Overloaded, ServiceError, Unavailable
from service.frontend import start_queue
from service.frontend.decoder import client, turns
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.decoder.turns import Turns
from service.frontend.decoder.worker import Decoder
from service.frontend.inference import Frontend, TrackedRequest
from service.frontend.oip import grpc_calls, rest
from service.frontend.rest import infer
from service.frontend.start_queue import LongWaits
from service.ipc.channel import Frame
from service.ipc.messages import Api, DecodeBody
from service.log import Log
from service.settings import Settings
from tests import models
from tests.frontend.in_process import InProcess
from tests.frontend.oip.harness import catalog_of, fake_frontend, values
from tests.frontend.oip.messages import QUESTION, requesting, text, typed, with_parameters
from tests.frontend.oip.test_json import INVALID
from tests.frontend.rest.test_infer import WRONG
from tests.serving import eventually

PADDING = b" " * (MAX_LOOP_BODY_BYTES + 1)
"""JSON ignores white space after a document."""
UNKNOWN_FIELD = b"\xfa\x7f\x81\x80\x04" + PADDING
"""Field 2047 of a message, with a size in three bytes. protobuf ignores it."""
WORDS = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
LARGE = WORDS + PADDING
MESSAGES = [typed("ids", "INT32", [1, 3], int_contents=row) for row in ([1, 2, 3], [1, 99, 3], [1])]
MESSAGES += [requesting(text(QUESTION), "scores"), with_parameters(text(QUESTION, id="seven"), priority=2, x=float("inf"))]
NUMBERS = {"model": "forecaster", "inputs": [[[1, 2, 3]] * 3]}
IDS = {"inputs": [{"name": "ids", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]}]}
BODIES = {
    "infer": [
        WORDS,
        WORDS + b"x",
        b'{"model":"words","inputs":["\xff"]}',
        *(json.dumps(body).encode() for body, _, _ in WRONG),
    ],
    "oip": [json.dumps(document).encode() for document, tail, *_ in INVALID if isinstance(document, dict) and not tail],
    "grpc": [message.SerializeToString() for message in MESSAGES],
}
BODIES["infer"] += [json.dumps({**NUMBERS, **more}).encode() for more in ({}, {"priority": 2}, {"return": ["embedding"]})]
BODIES["oip"] += [json.dumps({**IDS, **more}).encode() for more in ({}, {"id": "x"}, {"outputs": [{"name": "scores"}]})]


class Bench(NamedTuple):
    """A frontend in this process, and the event loop that it runs in."""

    frontend: Frontend
    runner: asyncio.Runner

    def result(self, answering: Callable[[TrackedRequest], Awaitable[Any]]) -> Any:
        """Return the reply or the error of a request, and the data that the engine received for it."""
        requests: list[tuple[Any, bytes]] = self.frontend.dispatcher.requests  # type: ignore[attr-defined]

        async def run() -> Any:
            try:
                return await answering(TrackedRequest(100.0, LOCAL))
            except ServiceError as error:
                return type(error), error.message, error.field, error.retry_after

        requests.clear()
        reply = self.runner.run(run())
        return reply, [(msgspec.structs.replace(request, sent=0.0), bytes(tail)) for request, tail in requests]

    def send(self, api: str, data: bytes, header_length: int | None = None) -> Any:
        class Context:
            session = None

            def time_remaining(self) -> float | None:
                return None

        async def answer(tracked: TrackedRequest) -> Any:
            if api == "infer":
                return await infer._answer_data(self.frontend, tracked, data)
            if api == "oip":
                response, raw = await rest._answer_data(self.frontend, tracked, data, header_length, "words", "")
                return response.id, values(response), raw
            async with grpc_calls.read_request(data, self.frontend) as read:
                return await grpc_calls.infer_message(self.frontend, tracked, read, Context())

        return self.result(answer)

    @property
    def pid(self) -> int:
        process = self.frontend.decoder._process
        return 0 if process is None or not process.open else process._process.pid


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    catalog = catalog_of(tmp_path_factory.mktemp("models"), (models.words, models.forecaster, models.speller))
    frontend = fake_frontend(catalog, streams=())
    with asyncio.Runner() as runner:
        yield Bench(frontend, runner)

        async def close() -> None:
            frontend.decoder.close()

        runner.run(close())


@pytest.mark.parametrize("api", BODIES)
def test_large_body_is_answered_as_a_small_one(bench: Bench, api: str) -> None:
    for body in BODIES[api]:
        assert bench.send(api, body + (UNKNOWN_FIELD if api == "grpc" else PADDING)) == bench.send(api, body), body
    assert bench.pid
    if api == "oip":
        tensor = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
        header, tail = json.dumps({"inputs": [tensor]}).encode(), struct.pack("<3i", 1, 2, 3)
        small = bench.send(api, header + tail, len(header))
        assert small[1] and bench.send(api, header + PADDING + tail, len(header + PADDING)) == small


def test_inputs_are_packed_again_for_another_model(bench: Bench) -> None:
    """The first model refuses the inputs and the second takes them; then the first may be tried again."""
    data = json.dumps({"model": "words", "inputs": [[1, 2, 11]]}).encode() + PADDING
    words, speller = (bench.frontend.catalog.find(name, None) for name in ("words", "speller"))

    async def pack_three_times(tracked: TrackedRequest) -> Any:
        async with bench.frontend.decoder.decode(DecodeBody("infer"), data) as body:
            with pytest.raises(InvalidInput, match=r"inputs\[0\]\[2\]"):
                await body.pack(words)
            return [(lengths, bytes(data)) for lengths, data in [await body.pack(speller) for _ in range(2)]]

    assert bench.result(pack_three_times)[0] == [([3], struct.pack("<3i", 1, 2, 11))] * 2


def test_bodies_wait_within_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that disconnects leaves the decoder free, and so does a bug."""

    async def at_once(tracked: TrackedRequest) -> list[Any]:
        def answer() -> asyncio.Future[bytes]:
            return asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, LARGE))

        replies = await asyncio.gather(*[answer() for _ in range(3)], return_exceptions=True)
        cancelled = [answer() for _ in range(2)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        with pytest.raises(ServiceError, match="see its log"):
            async with bench.frontend.decoder.decode(DecodeBody("no such"), b""):
                pass
        return [*replies, await answer()]

    monkeypatch.setattr(bench.frontend.bodies, "_limit", 2 * len(LARGE))
    replies, _ = bench.result(at_once)
    assert [type(reply) for reply in replies] == [bytes, bytes, Overloaded, bytes]
    assert bench.frontend.bodies.held_bytes == 0


@pytest.mark.parametrize(("patience", "refused"), [(0.0, [False, True]), (60.0, [False, False])])
def test_bodies_that_wait_long_are_refused_in_an_overload(
    patience: float, refused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_queue, "PATIENCE_SECONDS", patience)
    now = 100.0
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: now))

    async def wait_for_turns() -> list[bool]:
        nonlocal now
        queue = Turns(LongWaits(long_seconds=0.02))
        await queue.take()
        waiting = [asyncio.ensure_future(queue.take()) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in waiting:
            now += 0.05
            queue.end()
        return [isinstance(result, Overloaded) for result in await asyncio.gather(*waiting, return_exceptions=True)]

    assert asyncio.run(wait_for_turns()) == refused


def test_decoder_that_ends_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed decoder fails its request, and an idle decoder ends. tests/long/test_decoder.py ends frontends."""
    expected = bench.send("infer", LARGE)
    first = bench.pid
    os.kill(first, signal.SIGSTOP)  # so that it is killed while it has the body

    async def kill_while_decoding(tracked: TrackedRequest) -> bytes:
        answering = asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, LARGE))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        return await answering

    (error, message, *_), _ = bench.result(kill_while_decoding)
    assert error is Unavailable and "has ended: retry" in message
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.0)
    assert bench.send("infer", LARGE) == expected
    eventually(lambda: bench.runner.run(asyncio.sleep(0)) or not bench.pid)


def test_refused_body_is_freed_without_the_garbage_collector() -> None:
    """A decoder collects no garbage while bodies come in."""
    decoder, message = Decoder(Settings(), Log("decoder")), DecodeBody(Api.INFER)
    gc.collect()
    gc.disable()
    try:
        for id in range(25):
            if id == 5:
                tracemalloc.start()
            assert decoder.handle(Frame(message, id, memoryview(b"[" * 100_000)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < 100_000


def test_large_messages_of_a_socket_stay_in_order(local: InProcess) -> None:
    """Every second message is large. The sums of the session follow the order in which the messages were sent."""
    chunks = [[[float(index), 0.5, -0.5]] * 3 for index in range(8)]

    def outputs(padding: str) -> list[Any]:
        with connect(f"{local.address.replace('http', 'ws')}/stream?model=sensors", max_size=None) as stream:
            for index, chunk in enumerate(chunks):
                stream.send(json.dumps({"input": chunk}) + padding * (index % 2))
            stream.send(struct.pack("<3f", 1, 2, 3))
            stream.send(json.dumps({"input": "text"}) + padding)
            return [json.loads(stream.recv()) for _ in range(len(chunks) + 2)]

    expected, replies = outputs(""), outputs(PADDING.decode())
    assert [reply["session"]["steps"] for reply in replies[:-1]] == [*range(3, 25, 3), 25]
    for key in ("error", "outputs"):
        assert [reply.get(key) for reply in replies] == [reply.get(key) for reply in expected]
