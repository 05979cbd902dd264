"""The decoder returns what the frontend itself would return: the same requests to the engine, the same replies, the same errors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import struct
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from service.access.caller import LOCAL
from service.errors import InvalidInput, Overloaded, ServiceError, Unavailable
from service.frontend import start_queue
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.decoder import client
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.decoder.turns import Turns
from service.frontend.decoder.worker import Decoder
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, SupervisorClient, TrackedRequest
from service.frontend.oip import rest
from service.frontend.oip.grpc_calls import infer_message, read_request
from service.frontend.oip.json import encode_response
from service.frontend.oip.protobuf import METHODS
from service.frontend.rest import infer
from service.frontend.start_queue import LongWaits
from service.ipc.channel import Frame
from service.ipc.messages import Api, DecodeBody
from service.log import Log
from service.metrics import Metrics
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings
from tests import models
from tests.frontend.oip.harness import FakeDispatcher
from tests.frontend.test_hot_path import bodies, oip_messages
from tests.serving import eventually

PADDING = b" " * (MAX_LOOP_BODY_BYTES + 1)
"""JSON ignores white space after a document."""
BYTES_OF_UNKNOWN_FIELD = b"\xfa\x7f"
"""The tag of field 2047, which protobuf ignores."""


class Bench(NamedTuple):
    """A frontend in this process, and the event loop that it runs in."""

    frontend: Frontend
    dispatcher: FakeDispatcher
    runner: asyncio.Runner

    def result(self, answering: Callable[[TrackedRequest], Awaitable[Any]]) -> Any:
        """Return the reply or the error of a request, and the data that the engine received for it."""

        async def run() -> Any:
            try:
                return await answering(TrackedRequest(100.0, LOCAL))
            except ServiceError as error:
                return type(error), error.message, error.field, error.retry_after

        self.dispatcher.requests.clear()
        reply = self.runner.run(run())
        return reply, [(msgspec.structs.replace(request, sent=0.0), bytes(tail)) for request, tail in self.dispatcher.requests]

    @property
    def pid(self) -> int:
        process = self.frontend.decoder._process
        return 0 if process is None or not process.open else process._process.pid

    def post_infer(self, data: bytes) -> Any:
        return self.result(lambda tracked: infer._answer_data(self.frontend, tracked, data))

    def post_oip(self, data: bytes, header_length: int | None = None) -> Any:
        async def answer(tracked: TrackedRequest) -> Any:
            answered = await rest._answer_data(self.frontend, tracked, data, header_length, "words", "")
            return encode_response(*answered)

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
    root: Path = tmp_path_factory.mktemp("models")
    specs = [models.words(root), models.forecaster(root), models.speller(root)]
    served = [
        ServedModel(spec, "1", Tokenizer.read(root / spec.name / "1", spec) if spec.input.kind == "text" else None)
        for spec in specs
    ]
    catalog = Catalog(served, {})
    dispatcher = FakeDispatcher(catalog)
    frontend = Frontend(
        Settings(), catalog, cast(Dispatcher, dispatcher), Metrics(), Log("frontend"), cast(SupervisorClient, None)
    )
    with asyncio.Runner() as runner:
        yield Bench(frontend, dispatcher, runner)

        async def close() -> None:
            frontend.decoder.close()

        runner.run(close())


def mutated(texts: list[bytes], count: int) -> list[bytes]:
    """Return the texts, and copies with random changes of single bytes."""
    generator, changed = random.Random(3), []
    for _ in range(count):
        text = bytearray(generator.choice(texts))
        for _ in range(generator.randrange(1, 4)):
            if text:
                text[generator.randrange(len(text))] = generator.randrange(256)
        changed.append(bytes(text))
    return texts + changed


def random_inputs() -> list[bytes]:
    """Return bodies with random inputs of every kind, some of them wrong."""
    generator, texts = random.Random(4), list[bytes]()
    wrong: list[Any] = [None, True, "x", [], {}, 1e39, -1, 10**30, [1, [2]]]
    for _ in range(100):
        rows = [[generator.uniform(-9, 9) for _ in range(3)] for _ in range(generator.randrange(1, 6))]
        ids: list[Any] = [generator.randrange(12) for _ in range(generator.randrange(1, 6))]
        if generator.random() < 0.4:
            generator.choice([*rows, ids])[0] = generator.choice(wrong)
        for model, value in (("forecaster", rows), ("speller", ids), ("words", ids), ("words", "how far")):
            texts.append(json.dumps({"model": model, "inputs": [value] * generator.randrange(1, 4)}).encode())
    return texts


def test_large_infer_body_is_answered_as_a_small_one(bench: Bench) -> None:
    ended_by_whitespace = [text for text in mutated(bodies(), 150) if b"EOF" not in str(bench.post_infer(text)).encode()]
    results = set()
    for text in ended_by_whitespace + random_inputs():
        small = bench.post_infer(text)
        assert bench.post_infer(text + PADDING) == small, text
        results.add(str(small)[:60])
    assert len(results) > 30, "replies and errors of many kinds"
    assert bench.pid


def test_large_oip_body_is_answered_as_a_small_one(bench: Bench) -> None:
    texts = [message.partition(b"\r\n\r\n")[2] for message in oip_messages() if b"Inference-Header" not in message]
    kinds = set()
    for text in mutated(list(dict.fromkeys(texts)), 100):
        small, large = bench.post_oip(text), bench.post_oip(text + PADDING)
        kinds.add(str(small)[:60])
        # The position at which a truncated document ends is the only difference.
        assert large == small or b"truncated" in str(small).encode(), text
    assert len(kinds) > 10


def test_raw_tensors_may_follow_a_large_json(bench: Bench) -> None:
    tensor = {"name": "ids", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}
    text, tail = json.dumps({"inputs": [tensor]}).encode(), b"\1\0\0\0\2\0\0\0\3\0\0\0"
    small = bench.post_oip(text + tail, len(text))
    assert small[1], "the engine received it"
    assert bench.post_oip(text + PADDING + tail, len(text + PADDING)) == small


def test_large_grpc_message_is_answered_as_a_small_one(bench: Bench) -> None:
    message = METHODS["ModelInfer"].request_type(model_name="words", id="seven")
    ids = message.inputs.add(name="ids", datatype="INT32", shape=[3])
    ids.contents.int_contents.extend([1, 2, 3])
    message.parameters["priority"].int64_param = 2
    message.parameters["ignored"].double_param = float("inf")
    variants = []
    for change in (lambda: None, lambda: message.outputs.add(name="scores"), lambda: message.outputs.add(name="x")):
        change()
        variants.append(message.SerializeToString())
    size = bytes([0x80 | len(PADDING) & 0x7F, 0x80 | len(PADDING) >> 7 & 0x7F, len(PADDING) >> 14])
    for data in mutated(variants, 60):
        small = bench.call_grpc(data)
        large = bench.call_grpc(data + BYTES_OF_UNKNOWN_FIELD + size + PADDING)
        broken = "not a valid" in str(small)
        assert large == small or broken, data


def test_decoder_that_was_killed_fails_its_request_and_is_replaced(bench: Bench) -> None:
    text = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
    expected = bench.post_infer(text)
    assert bench.post_infer(text + PADDING) == expected
    first = bench.pid
    os.kill(first, signal.SIGSTOP)  # so that it is killed while it has the body

    async def kill_while_decoding(tracked: TrackedRequest) -> bytes:
        answering = asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, text + PADDING))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        return await answering

    (error, message, *_), _ = bench.result(kill_while_decoding)
    assert error is Unavailable
    assert "has ended: retry" in message
    assert bench.post_infer(text + PADDING) == expected
    assert bench.pid not in (0, first)


def test_inputs_are_packed_again_for_another_model(bench: Bench) -> None:
    """The first model refuses the inputs and the second takes them; then the first may be tried again."""
    text = json.dumps({"model": "words", "inputs": [[1, 2, 11]]}).encode() + PADDING
    words, speller = (bench.frontend.catalog.find(name, None) for name in ("words", "speller"))

    async def pack_three_times(tracked: TrackedRequest) -> Any:
        async with bench.frontend.decoder.decode(DecodeBody("infer"), text) as body:
            with pytest.raises(InvalidInput) as refused:
                await body.pack(words)
            packed = [await body.pack(speller) for _ in range(2)]
            return refused.value.field, [(lengths, bytes(data)) for lengths, data in packed]

    (field, packed), _ = bench.result(pack_three_times)
    assert field == "inputs[0][2]"
    assert packed == [([3], struct.pack("<3i", 1, 2, 11))] * 2


def test_idle_decoder_ends_and_starts_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.0)
    text = json.dumps({"model": "words", "inputs": ["how far"]}).encode() + PADDING
    expected = bench.post_infer(text)
    bench.runner.run(asyncio.sleep(0.05))
    assert not bench.pid
    assert bench.post_infer(text) == expected


def test_decoder_ends_with_its_frontend(bench: Bench) -> None:
    """A frontend that is killed leaves no decoder behind: the end of the channel ends it."""
    bench.post_infer(json.dumps({"model": "words", "inputs": ["how far"]}).encode() + PADDING)
    process = bench.frontend.decoder._process
    assert process is not None
    bench.runner.run(asyncio.sleep(0))

    async def close_channel() -> None:
        process._channel.close()

    bench.runner.run(close_channel())
    eventually(lambda: process._process.poll() is not None)
    assert process._process.returncode == 0


def test_bodies_wait_within_the_budget(bench: Bench) -> None:
    text = json.dumps({"model": "words", "inputs": ["how far"]}).encode() + PADDING

    async def three_at_once(tracked: TrackedRequest) -> list[Any]:
        requests = [infer._answer_data(bench.frontend, tracked, text) for _ in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    limit = bench.frontend.bodies._limit
    try:
        bench.frontend.bodies._limit = 2 * len(text)
        replies, _ = bench.result(three_at_once)
    finally:
        bench.frontend.bodies._limit = limit
    assert [type(reply) for reply in replies] == [bytes, bytes, Overloaded]
    assert bench.frontend.bodies.held_bytes == 0


@pytest.mark.parametrize("patience, kinds", [(0.0, [bytes, Overloaded]), (60.0, [bytes, bytes])])
def test_bodies_that_wait_long_are_refused_in_an_overload(
    patience: float, kinds: list[type], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_queue, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(bench.frontend.decoder, "_turns", Turns(LongWaits(long_seconds=0.02)))
    text = json.dumps({"model": "words", "inputs": ["how far"]}).encode() + PADDING

    async def behind_another(tracked: TrackedRequest) -> list[Any]:
        async with bench.frontend.decoder.decode(DecodeBody(Api.INFER), text):
            waiting = [asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, text)) for _ in range(2)]
            await asyncio.sleep(0.05)
        return await asyncio.gather(*waiting, return_exceptions=True)

    replies, _ = bench.result(behind_another)
    assert [type(reply) for reply in replies] == kinds
    assert bench.frontend.bodies.held_bytes == 0


def test_client_that_disconnects_leaves_the_decoder_free(bench: Bench) -> None:
    text = json.dumps({"model": "words", "inputs": ["how far"]}).encode() + PADDING

    async def cancel_two(tracked: TrackedRequest) -> bytes:
        cancelled = [asyncio.ensure_future(infer._answer_data(bench.frontend, tracked, text)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        return await infer._answer_data(bench.frontend, tracked, text)

    reply, _ = bench.result(cancel_two)
    assert reply.startswith(b'{"model":"words"')


def test_decoder_refuses_a_bug_without_ending(bench: Bench) -> None:
    async def unknown_api(tracked: TrackedRequest) -> None:
        async with bench.frontend.decoder.decode(DecodeBody("no such"), b""):
            pass

    (_, message, *_), _ = bench.result(unknown_api)
    assert "see its log" in message
    assert bench.pid


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
