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
from service.frontend.oip import rest
from service.frontend.oip.grpc_calls import infer_message, read_request
from service.frontend.oip.json import encode_response
from service.frontend.rest import infer
from service.frontend.start_queue import LongWaits
from service.ipc.channel import Frame
from service.ipc.messages import Api, DecodeBody
from service.log import Log
from service.settings import Settings
from tests import models
from tests.frontend.in_process import InProcess
from tests.frontend.oip.harness import catalog_of, fake_frontend
from tests.frontend.oip.messages import QUESTION, ids, requesting, text, typed, with_parameters
from tests.serving import eventually

PADDING = b" " * (MAX_LOOP_BODY_BYTES + 1)
"""JSON ignores white space after a document."""
UNKNOWN_FIELD = b"\xfa\x7f\x81\x80\x04" + PADDING
"""Field 2047 of a message, with a size in three bytes. protobuf ignores it."""
WORDS = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
FLAT_IDS: dict[str, Any] = {"name": "ids", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]}
VALUES: list[tuple[str, Any]] = [
    *(("words", "how far"), ("words", ""), ("words", [1, 2]), ("words", 5), ("words", None), ("words", ["x"])),
    *(("speller", [1, 11]), ("speller", [1, 12]), ("speller", [-1]), ("speller", [10**30]), ("speller", [1.5])),
    *(("forecaster", [[1, 2, 3]] * 3), ("forecaster", [[1, 2]]), ("forecaster", [[1, 2, 1e39]]), ("nobody", "x")),
]
INFER_BODIES = [
    *(json.dumps({"model": model, "inputs": [value] * count}).encode() for model, value in VALUES for count in (1, 2)),
    *(
        json.dumps({"model": "words", "inputs": ["how far"], **options}).encode()
        for options in (
            {"priority": 2},
            {"priority": 99},
            {"return": ["embedding"]},
            {"version": "7"},
            {"session": "s"},
            {"start": 1},
        )
    ),
    *(b"{}", b"[]", b'{"model":"words"}', b'{"model":"words","inputs":["\xff"]}', WORDS + b"x"),
]
OIP_BODIES = [
    *(
        json.dumps({"inputs": [{**FLAT_IDS, **change}]}).encode()
        for change in ({}, {"shape": [4]}, {"data": [99] * 3}, {"name": "x"})
    ),
    *(
        json.dumps({"inputs": [FLAT_IDS], **more}).encode()
        for more in ({"id": "x"}, {"outputs": [{"name": "scores"}]}, {"parameters": {"timeout": -1}}, {"outputs": 5})
    ),
]
MESSAGES = [
    *(typed("ids", "INT32", [1, 3], int_contents=row) for row in ([1, 2, 3], [1, 99, 3], [1])),
    *(ids(bytes(12), "words", id="seven"), requesting(text(QUESTION), "scores"), requesting(text(QUESTION), "x")),
    *(with_parameters(text(QUESTION), **each) for each in ({"priority": 2, "x": float("inf")}, {"priority": -1})),
]


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

    @property
    def pid(self) -> int:
        process = self.frontend.decoder._process
        return 0 if process is None or not process.open else process._process.pid

    def post_infer(self, data: bytes) -> Any:
        return self.result(lambda tracked: infer._answer_data(self.frontend, tracked, data))

    def post_oip(self, data: bytes, header_length: int | None = None) -> Any:
        async def answer(tracked: TrackedRequest) -> Any:
            return encode_response(*await rest._answer_data(self.frontend, tracked, data, header_length, "words", ""))

        return self.result(answer)

    def call_grpc(self, data: bytes) -> Any:
        class Context:
            session = None

            def time_remaining(self) -> float | None:
                return None

        async def answer(tracked: TrackedRequest) -> bytes:
            async with read_request(data, self.frontend) as read:
                reply: bytes = (await infer_message(self.frontend, tracked, read, Context())).SerializeToString()
                return reply

        return self.result(answer)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    catalog = catalog_of(tmp_path_factory.mktemp("models"), (models.words, models.forecaster, models.speller))
    frontend = fake_frontend(catalog, streams=())
    with asyncio.Runner() as runner:
        yield Bench(frontend, runner)

        async def close() -> None:
            frontend.decoder.close()

        runner.run(close())


def test_large_body_is_answered_as_a_small_one(bench: Bench) -> None:
    for send, bodies, padding in (
        (bench.post_infer, INFER_BODIES, PADDING),
        (bench.post_oip, OIP_BODIES, PADDING),
        (bench.call_grpc, [message.SerializeToString() for message in MESSAGES], UNKNOWN_FIELD),
    ):
        replies = set()
        for body in bodies:
            small = send(body)
            assert send(body + padding) == small, body
            replies.add(str(small)[:60])
        assert len(replies) > len(bodies) // 3, "replies and errors of many kinds"
    tensor = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
    header, tail = json.dumps({"inputs": [tensor]}).encode(), struct.pack("<3i", 1, 2, 3)
    small = bench.post_oip(header + tail, len(header))
    assert small[1] and bench.post_oip(header + PADDING + tail, len(header + PADDING)) == small
    assert bench.pid


def test_inputs_are_packed_again_for_another_model(bench: Bench) -> None:
    """The first model refuses the inputs and the second takes them; then the first may be tried again."""
    body_of_ids = json.dumps({"model": "words", "inputs": [[1, 2, 11]]}).encode() + PADDING
    words, speller = (bench.frontend.catalog.find(name, None) for name in ("words", "speller"))

    async def pack_three_times(tracked: TrackedRequest) -> Any:
        async with bench.frontend.decoder.decode(DecodeBody("infer"), body_of_ids) as body:
            with pytest.raises(InvalidInput) as refused:
                await body.pack(words)
            packed = [await body.pack(speller) for _ in range(2)]
            return refused.value.field, [(lengths, bytes(data)) for lengths, data in packed]

    (field, packed), _ = bench.result(pack_three_times)
    assert field == "inputs[0][2]"
    assert packed == [([3], struct.pack("<3i", 1, 2, 11))] * 2


def test_bodies_wait_within_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that disconnects leaves the decoder free."""

    async def at_once(tracked: TrackedRequest) -> list[Any]:
        requests = [infer._answer_data(bench.frontend, tracked, WORDS + PADDING) for _ in range(3)]
        replies = await asyncio.gather(*requests, return_exceptions=True)
        cancelled = [asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, WORDS + PADDING)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        return [*replies, await infer._answer_data(bench.frontend, tracked, WORDS + PADDING)]

    monkeypatch.setattr(bench.frontend.bodies, "_limit", 2 * len(WORDS + PADDING))
    replies, _ = bench.result(at_once)
    assert [type(reply) for reply in replies] == [bytes, bytes, Overloaded, bytes]
    assert bench.frontend.bodies.held_bytes == 0


@pytest.mark.parametrize(("patience", "refused"), [(0.0, [False, True]), (60.0, [False, False])])
def test_bodies_that_wait_long_are_refused_in_an_overload(
    patience: float, refused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_queue, "PATIENCE_SECONDS", patience)
    now = 100.0
    monkeypatch.setattr(turns.time, "monotonic", lambda: now)

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


def test_decoder_refuses_a_bug_without_ending(bench: Bench) -> None:
    async def unknown_api(tracked: TrackedRequest) -> None:
        async with bench.frontend.decoder.decode(DecodeBody("no such"), b""):
            pass

    (_, message, *_), _ = bench.result(unknown_api)
    assert "see its log" in message
    assert bench.pid


def test_decoder_that_ends_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed fails its request. One that is idle ends, and so does one whose frontend is gone."""
    expected = bench.post_infer(WORDS + PADDING)
    first = bench.pid
    os.kill(first, signal.SIGSTOP)  # so that it is killed while it has the body

    async def kill_while_decoding(tracked: TrackedRequest) -> bytes:
        answering = asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, WORDS + PADDING))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        return await answering

    (error, message, *_), _ = bench.result(kill_while_decoding)
    assert error is Unavailable and "has ended: retry" in message
    with monkeypatch.context() as patch:
        patch.setattr(client, "IDLE_SECONDS", 0.0)
        assert bench.post_infer(WORDS + PADDING) == expected
        eventually(lambda: bench.runner.run(asyncio.sleep(0)) or not bench.pid)  # type: ignore[func-returns-value]
    assert bench.post_infer(WORDS + PADDING) == expected
    assert bench.pid not in (0, first)
    process = bench.frontend.decoder._process
    assert process is not None

    async def close_channel() -> None:
        process._channel.close()

    bench.runner.run(close_channel())
    eventually(lambda: process._process.poll() is not None)
    assert process._process.returncode == 0


def test_refused_body_is_freed_without_the_garbage_collector() -> None:
    """A decoder collects no garbage while bodies come in."""
    decoder = Decoder(Settings(), Log("decoder"))
    message = DecodeBody(Api.INFER)

    def refuse(count: int) -> None:
        for id in range(count):
            assert decoder.handle(Frame(message, id, memoryview(b"[" * 100_000)))

    gc.collect()
    gc.disable()
    try:
        refuse(5)
        tracemalloc.start()
        refuse(20)
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
