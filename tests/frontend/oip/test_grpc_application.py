"""ModelInfer gets the same reply from this service's gRPC server as from the gRPC library's server with the same handlers."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import grpc
import numpy as np
import pytest

from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.http2.connection import Http2Connection
from service.frontend.http2.floods import Floods
from service.frontend.inference import Frontend
from service.frontend.oip import protobuf
from service.frontend.oip.binary_forms import BinaryForm
from service.frontend.oip.grpc_application import GrpcApplication
from service.frontend.oip.grpc_calls import RECEIVE_LIMIT_FACTOR, GrpcShutdown
from service.frontend.oip.grpc_infer import HotGrpcInfer
from service.frontend.oip.grpc_messages import ClassifyWriter, read_request, split_head, write_response
from service.frontend.oip.grpc_methods import rpc_handlers
from service.frontend.oip.grpc_server import _limits
from service.frontend.oip.infer import build_response
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.protobuf import METHODS
from service.frontend.oip.types import InferRequest
from service.ipc.messages import Answer, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec import ClassifyHead
from service.settings import Settings
from tests.frontend.oip.harness import FakeDispatcher, InferHarness
from tests.frontend.oip.library import LibraryHandlers

LIMIT = 1 << 16
INFER = "/inference.GRPCInferenceService/ModelInfer"
REQUEST = METHODS["ModelInfer"].request_type
QUESTION = b"how far is it"


class Pending(NamedTuple):
    """A request that the dispatcher below answers soon."""

    done: bool = False


class CallbackDispatcher(FakeDispatcher):
    """Also answers requests of the hot path."""

    def send(self, request: Request, tail: bytes, receiver: Any) -> Pending:
        answering = asyncio.ensure_future(self.submit(request, tail))
        answering.add_done_callback(lambda done: receiver.answered(*done.result()))
        return Pending()

    def cancel(self, pending: Pending) -> None:
        """Do nothing: no request waits."""


class Reply(NamedTuple):
    """The parts of a reply that a client sees."""

    code: grpc.StatusCode
    details: str
    trailing: tuple[tuple[str, str | bytes], ...]
    data: bytes


@pytest.fixture
def frontend(harness: InferHarness) -> Frontend:
    """The frontend of the harness with its own metrics and a limit that tests can exceed."""
    dispatcher = CallbackDispatcher(harness.frontend.catalog, streams=["forecaster", "speller"])
    settings = Settings(max_inputs=8, max_body_bytes=LIMIT)
    return Frontend(
        settings, harness.frontend.catalog, cast(Dispatcher, dispatcher), Metrics(), Log("frontend"), cast(Any, None)
    )


def tensors(*inputs: tuple[str, str, list[int], bytes], model: str = "words", **fields: Any) -> Any:
    """Return a request with raw contents."""
    message = REQUEST(model_name=model, **fields)
    for name, datatype, shape, data in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    return message


def text(*texts: bytes, **fields: Any) -> Any:
    return tensors(("text", "BYTES", [len(texts)], b"".join([len(one).to_bytes(4, "little") + one for one in texts])), **fields)


def with_parameter(message: Any, name: str, kind: str, value: Any) -> Any:
    setattr(message.parameters[name], kind, value)
    return message


def requesting(message: Any, *names: str, **parameters: int) -> Any:
    for name in names:
        output = message.outputs.add(name=name)
        for parameter, value in parameters.items():
            output.parameters[parameter].int64_param = value
    return message


def typed(name: str, datatype: str, shape: list[int], model: str = "words", **contents: Any) -> Any:
    message = REQUEST(model_name=model)
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return message


def corpus() -> list[bytes]:
    """Return valid, refused and broken messages."""
    rows = np.ones((1, 2, 3), "f4").tobytes()
    ids = ("ids", "INT32", [1, 3], bytes(12))
    shared = text(QUESTION)
    shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
    empty = text(QUESTION)
    empty.parameters["priority"].SetInParent()
    both = typed("text", "BYTES", [1], bytes_contents=[QUESTION])
    both.raw_input_contents.append(QUESTION)
    messages = [
        text(QUESTION),
        text(QUESTION, id="seven"),
        text(QUESTION, id="日本", model_version="1"),
        text(QUESTION, id="x" * 300),
        text(QUESTION, QUESTION, b""),
        text(*[b"a"] * 9),
        text(QUESTION, model_version="9"),
        text(QUESTION, model="nobody"),
        text(QUESTION, model="alias"),
        text(QUESTION, model=""),
        text(b"\xff\xfe"),
        text(b"x" * 20_000),
        tensors(("text", "BYTES", [1, 1], b"\x03\0\0\0far")),
        tensors(("text", "BYTES", [2, 2], b"\x03\0\0\0far" * 4)),
        tensors(("text", "BYTES", [1], b"\x09\0\0\0far")),
        tensors(("text", "BYTES", [1], b"")),
        tensors(("text", "BYTES", [], b"\x03\0\0\0far")),
        tensors(("text", "BYTES", [-1], b"\x03\0\0\0far")),
        tensors(("text", "BYTES", [2**62], b"\x03\0\0\0far")),
        tensors(("text", "INT9", [1], b"far")),
        tensors(("text", "FP32", [1], bytes(4))),
        tensors(("text", "BYTES", [1], b"\x03\0\0\0far"), ids),
        tensors(("text", "BYTES", [1], b"\x03\0\0\0far"), ("text", "BYTES", [1], b"\x03\0\0\0far")),
        tensors(("other", "BYTES", [1], b"\x03\0\0\0far")),
        tensors(("x" * 300, "BYTES", [1], b"\x03\0\0\0far")),
        tensors(ids),
        tensors(("ids", "INT64", [1, 2], bytes(16))),
        tensors(("ids", "INT32", [1, 3], b"\xff" * 12)),
        tensors(("ids", "INT32", [3, 3], bytes(36)), ("lengths", "INT32", [3], b"\2\0\0\0\1\0\0\0\3\0\0\0")),
        tensors(("ids", "INT32", [1, 6], bytes(24)), ("offsets", "INT32", [4], b"\0\0\0\0\2\0\0\0\3\0\0\0\6\0\0\0")),
        tensors(("ids", "INT32", [1, 2], bytes(8)), model="tagger"),
        tensors(("ids", "INT32", [1, 3], bytes(12)), model="reader"),
        tensors(("ids", "INT32", [1, 3], bytes(12)), model="speller"),
        tensors(("ids", "INT32", [1, 3], bytes(12)), model="embedder"),
        tensors(("inputs", "FP32", [1, 2, 3], rows), model="forecaster"),
        tensors(("inputs", "FP16", [1, 2, 3], bytes(12)), model="forecaster"),
        tensors(("inputs", "BF16", [1, 2, 3], bytes(12)), model="forecaster"),
        tensors(("inputs", "FP32", [2, 3], rows), model="forecaster"),
        tensors(("inputs", "FP32", [1, 2, 3], b"\xff" * 24), model="forecaster"),
        *(requesting(text(QUESTION), *names) for names in (["label"], ["scores", "label"], ["embedding"], ["sequence"], ["x"])),
        requesting(text(QUESTION), "label", "label"),
        requesting(text(QUESTION, QUESTION), "scores", classification=2),
        requesting(text(QUESTION), "label", classification=2),
        requesting(text(QUESTION), *["label"] * 40),
        with_parameter(text(QUESTION), "priority", "int64_param", 1),
        with_parameter(text(QUESTION), "priority", "int64_param", -1),
        with_parameter(text(QUESTION), "timeout", "int64_param", 5_000_000),
        with_parameter(text(QUESTION), "timeout", "int64_param", 10**12),
        with_parameter(text(QUESTION), "timeout", "string_param", "soon"),
        with_parameter(text(QUESTION), "sequence_start", "bool_param", True),
        with_parameter(text(QUESTION), "sequence_id", "double_param", 1.5),
        with_parameter(text(QUESTION), "sequence_id", "int64_param", 0),
        with_parameter(tensors(("ids", "INT32", [1, 3], bytes(12)), model="speller"), "sequence_id", "string_param", "mine"),
        with_parameter(text(QUESTION), "unknown", "string_param", "x"),
        typed("text", "BYTES", [1], bytes_contents=[QUESTION]),
        typed("text", "BYTES", [2], bytes_contents=[QUESTION]),
        typed("ids", "INT32", [1, 3], int_contents=[1, 2, 3]),
        typed("ids", "INT32", [1, 3], int64_contents=[1, 2, 3]),
        typed("inputs", "FP32", [1, 1, 3], "forecaster", fp32_contents=[1, 2, 3]),
        typed("inputs", "FP16", [1, 1, 3], "forecaster", fp32_contents=[1, 2, 3]),
        REQUEST(model_name="words"),
        REQUEST(),
        shared,
        empty,
        both,
    ]
    valid = text(QUESTION).SerializeToString()
    broken = [
        b"\xff\xff",
        valid[:-1],
        valid + b"\0",
        valid + b"\x0a",
        valid + b"\x98\x06\x07",  # an unknown field
        valid + b"\x0b\x0c",  # a group
        b"\x0a\x02\xff\xfe" + valid,  # a name that is not UTF-8, then another name
        valid + b"\x0a\x07speller",
        valid + b"\x0a\x09speller",
        valid + b"\x3a\x00",
        b"\x0a\x85\x80\x00words" + valid[7:],  # a size in more bytes than it needs
        b"\x2a\x08\x0a\x04text\x18\x01" + valid,  # a shape that is not packed
        text(b"x" * LIMIT).SerializeToString(),
        text(b"x" * (RECEIVE_LIMIT_FACTOR * LIMIT)).SerializeToString(),
        b"\x32\x00" * 5000,
    ]
    return [*(message.SerializeToString() for message in messages), *broken]


def mutations(random: random.Random) -> Iterator[bytes]:
    """Yield messages with a few wrong bytes."""
    messages = [message for message in corpus() if len(message) < 400]
    for _ in range(600):
        data = bytearray(random.choice(messages))
        for _ in range(random.randint(1, 3)):
            if data:
                at = random.randrange(len(data))
                data[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
        yield bytes(data)


@asynccontextmanager
async def both_servers(frontend: Frontend) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Yield a channel to this service's server, and a channel to the gRPC library's."""
    handlers, connections = (rpc_handlers(frontend, GrpcShutdown()),), set[Http2Connection]()
    application = GrpcApplication(frontend, handlers, GrpcShutdown())
    own = await asyncio.get_running_loop().create_server(
        lambda: Http2Connection(application, _limits(frontend.settings), connections, Floods()), "127.0.0.1"
    )
    limit = LIMIT * RECEIVE_LIMIT_FACTOR
    library = grpc.aio.server(options=[("grpc.max_receive_message_length", limit), ("grpc.so_reuseport", 0)])
    library.add_generic_rpc_handlers([LibraryHandlers(handler) for handler in handlers])
    ports = [own.sockets[0].getsockname()[1], library.add_insecure_port("127.0.0.1:0")]
    await library.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()
        await library.stop(None)
        own.close()
        async with asyncio.timeout(60):
            while connections:
                await asyncio.sleep(0.01)


async def call(channel: grpc.aio.Channel, message: bytes, **options: Any) -> Reply:
    calling = channel.unary_unary(INFER)(message, timeout=60, **options)
    try:
        data = await calling
    except grpc.aio.AioRpcError as error:
        return Reply(error.code(), error.details(), without_id(error.trailing_metadata()), b"")
    return Reply(await calling.code(), await calling.details(), without_id(await calling.trailing_metadata()), data)


def without_id(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a reply without the request's id, which only this service's own server returns."""
    return tuple(pair for pair in metadata if pair[0] != "x-request-id")


def without_size(reply: Reply) -> Reply:
    """Return the reply without the size of a message that is too large: this service does not decompress the rest of it."""
    return reply._replace(details=re.sub(r"larger than max \(\d+ vs", "larger than max (SIZE vs", reply.details))


def check_equal(frontend: Frontend, messages: list[bytes], **options: Any) -> list[Reply]:
    """Check that both servers reply alike, and return the replies."""

    async def run() -> list[Reply]:
        replies = []
        async with both_servers(frontend) as (own, library):
            for message in messages:
                actual, expected = await call(own, message, **options), await call(library, message, **options)
                assert without_size(actual) == without_size(expected), message[:200]
                replies.append(actual)
        return replies

    return asyncio.run(run())


def test_replies_equal_those_of_the_grpc_library(frontend: Frontend) -> None:
    replies = check_equal(frontend, corpus())
    codes = {reply.code.name for reply in replies}
    assert codes >= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
    assert sum(reply.code is grpc.StatusCode.OK for reply in replies) > 20


def test_repeated_requests_get_equal_replies(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with the same head takes its remembered form, for any id and any values."""
    packed = []
    pack = BinaryForm.pack

    def count(self: BinaryForm, values: Any) -> Any:
        packed.append(values)
        return pack(self, values)

    monkeypatch.setattr(BinaryForm, "pack", count)
    largest = 2**31 - 1
    values = [np.array(ids, "<i4").tobytes() for ids in ([1, 2, 3], [3, 2, 1], [1, -1, 3], [1, 2, largest], [1, 2])]
    ids = [
        requesting(tensors(("ids", "INT32", [1, 3], data), id=id), "scores") for data in values for id in ("", "a", "b" * 200)
    ]
    replies = check_equal(frontend, [message.SerializeToString() for message in ids])
    assert [reply.code.name for reply in replies] == ["OK"] * 6 + ["INVALID_ARGUMENT"] * 9
    assert len(packed) == 11
    check_equal(frontend, [message for message in corpus() for _ in range(3)])
    assert len(packed) > 30


def test_remembered_form_has_the_deadline_of_each_call(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []
    send = CallbackDispatcher.send

    def count(self: CallbackDispatcher, request: Request, tail: bytes, receiver: Any) -> Pending:
        allowed.append(request.deadline - request.sent)
        return send(self, request, tail, receiver)

    monkeypatch.setattr(CallbackDispatcher, "send", count)

    message = with_parameter(text(QUESTION), "timeout", "int64_param", 60_000_000).SerializeToString()

    async def run() -> None:
        async with both_servers(frontend) as (own, _):
            for timeout in (None, None, 30.0):
                await own.unary_unary(INFER)(message, timeout=timeout)

    asyncio.run(run())
    assert [45 < seconds <= 60 for seconds in allowed] == [True, True, False]


def test_mutated_requests_get_equal_replies(frontend: Frontend) -> None:
    check_equal(frontend, list(mutations(random.Random(7))))


def test_values_that_are_not_finite_get_equal_replies(frontend: Frontend) -> None:
    """The engine returns NaN for one of three sequences."""
    dispatcher = cast(CallbackDispatcher, frontend.dispatcher)
    dispatcher.answers = {name: dict(arrays) for name, arrays in dispatcher.answers.items()}
    dispatcher.answers["words"]["scores"] = [[0.5, 0.25, 0.25], [0.5, float("nan"), 0.25], [0.5, 0.25, 0.25]]
    [reply, *_] = check_equal(frontend, [text(QUESTION, QUESTION).SerializeToString(), text(QUESTION).SerializeToString()])
    assert reply.code is grpc.StatusCode.INVALID_ARGUMENT


def test_chunks_of_sessions_get_equal_replies(frontend: Frontend) -> None:
    cast(CallbackDispatcher, frontend.dispatcher).steps = 7
    plain = tensors(("ids", "INT32", [1, 3], bytes(12)), model="speller")
    flags = [
        ("sequence_start", "bool_param", True),
        ("sequence_end", "bool_param", True),
        ("sequence_start", "bool_param", False),
    ]
    named = [with_parameter(plain, "sequence_id", field, id) for field, id in (("string_param", "mine"), ("int64_param", 7))]
    messages = [*named, *(with_parameter(message, *flag) for message in named for flag in flags)]
    two = with_parameter(tensors(("ids", "INT32", [2, 3], bytes(24)), model="speller"), "sequence_id", "string_param", "mine")
    replies = check_equal(frontend, [message.SerializeToString() for message in [*messages, *messages, two]])
    assert [reply.code.name for reply in replies] == ["OK"] * 16 + ["INVALID_ARGUMENT"]
    response = METHODS["ModelInfer"].response_type.FromString(replies[0].data)
    assert response.parameters["sequence_steps"].int64_param == 7


def test_usual_requests_take_the_hot_path(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    start = HotGrpcInfer.start

    def count(self: HotGrpcInfer, *arguments: Any) -> Any:
        call = start(self, *arguments)
        taken.append(call is not None)
        return call

    monkeypatch.setattr(HotGrpcInfer, "start", count)
    session = with_parameter(tensors(("ids", "INT32", [1, 3], bytes(12)), model="speller"), "sequence_id", "string_param", "a")
    messages = [text(QUESTION), with_parameter(text(QUESTION), "timeout", "int64_param", 5_000_000), session]
    check_equal(frontend, [message.SerializeToString() for message in messages])
    assert taken == [True, True, True]


def test_answers_written_together_equal_those_written_alone(harness: InferHarness) -> None:
    """Answers of one tick have different numbers of sequences."""
    model = harness.frontend.catalog.find("words", None)
    assert isinstance(model.spec.head, ClassifyHead)
    scores = np.random.default_rng(7).random((6, 3), np.float32)
    parts = [("a", scores[:2]), ("", scores[2:3]), ("c", scores[3:])]
    answers = [(id, Answer(scores=part.shape, steps=[1] * len(part)), part.tobytes()) for id, part in parts]
    together = ClassifyWriter(model, model.spec.head).write_all(answers)
    tensors = InputTensors([])
    for written, (id, answer, data) in zip(together or [], answers, strict=True):
        response = build_response(InferRequest("words", "", id, {}, [], []), tensors, model, answer, data)
        assert written == write_response(response) == protobuf.infer_response(response).SerializeToString()


def test_head_of_a_message_has_neither_id_nor_values() -> None:
    plain, named = text(QUESTION).SerializeToString(), text(QUESTION, id="seven").SerializeToString()
    without, parts = split_head(plain), split_head(named)
    assert without is not None and parts is not None
    assert (without.key, without.id) == (parts.key, "")
    assert (parts.id, bytes(parts.values)) == ("seven", len(QUESTION).to_bytes(4, "little") + QUESTION)
    assert without.key + bytes(without.values) == plain
    longer = split_head(text(QUESTION + b"?").SerializeToString())
    assert longer is not None and longer.key != without.key  # a form has a size


def test_messages_without_a_head() -> None:
    usual = text(QUESTION, id="seven").SerializeToString()
    two_ids = REQUEST(id="six").SerializeToString() + usual
    others = [usual[:-1], usual + usual[:2], usual + REQUEST(id="eight").SerializeToString(), two_ids, b"", b"\x08\x01" + usual]
    others += [usual.replace(b"seven", b"sev\xffn"), text(QUESTION, model="m" * 2000).SerializeToString(), b"\xba\x00" + usual]
    assert [split_head(message) for message in others] == [None] * len(others)


def test_messages_read_by_hand_are_the_usual_ones() -> None:
    assert read_request(text(QUESTION, id="1", model_version="2").SerializeToString()) is not None
    assert read_request(requesting(text(QUESTION), "label").SerializeToString()) is not None
    assert read_request(with_parameter(text(QUESTION), "priority", "int64_param", 1).SerializeToString()) is None
    assert read_request(typed("text", "BYTES", [1], bytes_contents=[QUESTION]).SerializeToString()) is None
