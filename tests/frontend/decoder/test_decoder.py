"""The decoder returns what the frontend itself would return: the same requests to the engine, the same replies, the same errors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from websockets.sync.client import connect

from service.access.caller import LOCAL
from service.errors import InvalidInput, Overloaded, ServiceError, Unavailable
from service.frontend.decoder import client, turns
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.decoder.turns import Turns
from service.frontend.decoder.worker import Decoder
from service.frontend.guards import start_queue
from service.frontend.guards.start_queue import LongWaits
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.rest.infer import InferRunner
from service.frontend.run.exchange import AwaitedExchange
from service.frontend.run.origin import NO_ORIGIN, RequestIdentity
from service.ipc.channel import Frame, decode
from service.ipc.messages.decoder import BodyDecoded, DecodeBody
from service.ipc.messages.message import Refusal
from service.ipc.messages.tracing import Api
from service.log import Log
from service.settings import Settings
from tests.frontend.in_process import InProcess, in_process
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
STATES = {"model": "speller", "inputs": [[1, 2]], "states": [{"layers.1.0.forward.hidden": [0.5] * 5}]}
MORE: list[dict[str, Any]] = [{}, {"states": [{"x": []}]}, {"session": "a"}]
BODIES["infer"] += [json.dumps({**STATES, **more}).encode() for more in MORE]
BODIES["oip"] += [json.dumps({**IDS, **more}).encode() for more in ({}, {"id": "x"}, {"outputs": [{"name": "scores"}]})]


@pytest.fixture(scope="module")
def service(heads_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with in_process(heads_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


def send(service: InProcess, api: str, body: bytes, **headers: str) -> Any:
    """Return the reply to a request, or its error."""
    if api != "grpc":
        path = {"infer": "/infer", "oip": "/v2/models/words/infer"}[api]
        answer = service.client.post(path, content=body, headers=headers)
        return answer.status_code, answer.content
    with grpc.insecure_channel(service.grpc) as channel:
        try:
            return channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(body, timeout=60)
        except grpc.RpcError as error:
            return error.code(), error.details()


def answer_large(service: InProcess) -> asyncio.Future[bytes | memoryview]:
    """Start a request with a large body in the thread of the frontend."""
    runner = InferRunner(service.frontend)

    async def answer() -> bytes | memoryview:
        async with AsyncExitStack() as stack:
            decoded = await runner.decode_slowly(LARGE, None, stack)
            exchange = AwaitedExchange(RequestIdentity(NO_ORIGIN, service.frontend.request_ids))
            return (await runner.answer(decoded, exchange, time.monotonic(), LOCAL)).content

    return asyncio.ensure_future(answer())


def decoder_of(service: InProcess) -> int:
    """Return the process id of the decoder, 0 without one."""
    process = service.frontend.decoder._process
    return 0 if process is None or not process.open else process._process.pid


@pytest.mark.parametrize("api", BODIES)
def test_large_body_is_answered_as_a_small_one(service: InProcess, api: str) -> None:
    for body in BODIES[api]:
        assert send(service, api, body + (UNKNOWN_FIELD if api == "grpc" else PADDING)) == send(service, api, body), body
    assert decoder_of(service)
    if api == "oip":
        tensor = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
        header, tail = json.dumps({"inputs": [tensor]}).encode(), struct.pack("<3i", 1, 2, 3)
        small, large = (
            send(service, api, head + tail, **{HEADER_LENGTH: str(len(head))}) for head in (header, header + PADDING)
        )
        assert small[0] == 200 and small == large


def test_inputs_are_packed_again_for_another_model(service: InProcess) -> None:
    """The first model refuses the inputs and the second takes them; then the first may be tried again."""
    data = json.dumps({"model": "words", "inputs": [[1, 2, 11]]}).encode() + PADDING
    words, speller = (service.frontend.catalog.find(name, None) for name in ("words", "speller"))

    async def pack_three_times() -> Any:
        async with service.frontend.decoder.decode(DecodeBody("infer"), data) as body:
            with pytest.raises(InvalidInput, match=r"inputs\[0\]\[2\]"):
                await body.pack(words)
            return [(packed.lengths, bytes(packed.data)) for packed in [await body.pack(speller) for _ in range(2)]]

    assert service.run(pack_three_times()) == [([3], struct.pack("<3i", 1, 2, 11))] * 2


def test_frontend_gets_no_large_options() -> None:
    """The frontend decodes the options on its event loop: states stay with the inputs, and nothing else may be large."""
    decoder, values = Decoder(Settings(), Log("decoder")), [0.5] * MAX_LOOP_BODY_BYTES
    bodies = {
        "infer": [{**STATES, "states": [{"x": values}]}, {"model": "m" * MAX_LOOP_BODY_BYTES, "inputs": [""]}],
        "oip_json": [
            {**IDS, "inputs": [{**IDS["inputs"][0], "parameters": {"x": values}}]},
            {**IDS, "parameters": {"x": values}},
        ],
    }
    for api, [taken, refused] in bodies.items():
        for body, expected in ((taken, BodyDecoded), (refused, Refusal)):
            reply = decoder.handle(Frame(DecodeBody(api, None, "words", ""), 1, json.dumps(body).encode()))
            assert reply is not None and len(reply) < 1000 and type(decode(reply).message) is expected


def test_bodies_wait_within_the_budget(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that disconnects leaves the decoder free, and so does a bug."""

    async def at_once() -> list[Any]:
        replies = await asyncio.gather(*[answer_large(service) for _ in range(3)], return_exceptions=True)
        cancelled = [answer_large(service) for _ in range(2)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        with pytest.raises(ServiceError, match="see its log"):
            async with service.frontend.decoder.decode(DecodeBody("no such"), b""):
                pass
        return [*replies, await answer_large(service)]

    monkeypatch.setattr(service.frontend.limits.bodies, "_limit", 2 * len(LARGE))
    assert [type(reply) for reply in service.run(at_once())] == [bytes, bytes, Overloaded, bytes]
    assert service.frontend.limits.bodies.held_bytes == 0


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


def test_large_body_is_alone_and_keeps_its_place() -> None:
    async def run() -> list[tuple[bool, bool]]:
        queue, done = Turns(LongWaits(long_seconds=1.0), places=2), []
        await asyncio.gather(queue.take(), queue.take())
        large, small = asyncio.ensure_future(queue.take(2)), asyncio.ensure_future(queue.take())
        for _ in range(2):
            queue.end()
            await asyncio.sleep(0)
            done.append((large.done(), small.done()))
        queue.end(2)
        await small
        return done

    assert asyncio.run(run()) == [(False, False), (True, False)]


def test_decoder_that_ends_is_replaced(service: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed decoder fails its request, and an idle decoder ends."""
    expected = send(service, "infer", LARGE)
    first = decoder_of(service)
    os.kill(first, signal.SIGSTOP)  # so that it is killed while it has the body

    async def kill_while_decoding() -> bytes | memoryview:
        answering = answer_large(service)
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        return await answering

    with pytest.raises(Unavailable, match="has ended: retry"):
        service.run(kill_while_decoding())
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.0)
    assert send(service, "infer", LARGE) == expected
    eventually(lambda: not decoder_of(service))


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
