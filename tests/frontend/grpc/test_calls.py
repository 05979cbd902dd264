"""gRPC calls as raw frames: both paths of ModelInfer, invalid calls, deadlines, flow control of a handler, and the shutdown."""

from __future__ import annotations

import asyncio
import gzip
import math
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import hpack
import pytest

from service.errors import Overloaded
from service.frontend.grpc import application as grpc_application
from service.frontend.grpc.application import GrpcApplication
from service.frontend.grpc.calls import GrpcCall
from service.frontend.grpc.methods import oip_methods
from service.frontend.grpc.routes import Method
from service.frontend.grpc.wire import CallStatus, trailers_only
from service.frontend.guards import connection_guard
from service.frontend.guards.compression import INLINE_BYTES
from service.frontend.guards.start_queue import Start, WaitingStart
from service.frontend.http2.frames import ErrorCode, Setting
from service.frontend.oip.metadata import model_statistics
from service.frontend.oip.protobuf import METHODS
from service.frontend.run.catalog import Catalog
from service.metrics import Snapshot
from tests.frontend import golden
from tests.frontend.http2.peer import (
    END_HEADERS,
    END_STREAM,
    KINDS,
    ClockLoop,
    Frames,
    Peer,
    block,
    frame,
    reset,
    settings,
    window,
)
from tests.frontend.oip.harness import FakeDispatcher, fake_frontend
from tests.frontend.oip.messages import LIMIT, QUESTION, ids, requesting, text, with_parameters

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = KINDS
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
ECHO, COUNT, SINK, WAIT = (b"/test.Test/%b" % name for name in (b"Echo", b"Count", b"Sink", b"Wait"))
SERVICE = b"/inference.GRPCInferenceService/"
INFER = SERVICE + b"ModelInfer"


class Handlers:
    """Methods that show the data that reaches a handler."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.written = self.cancelled = 0
        self.call: Any = None

    async def echo(self, request: bytes, call: GrpcCall) -> bytes:
        self.call = call
        return request

    async def count(self, request: bytes, call: GrpcCall) -> None:
        for self.written in range(1, int(request) + 1):
            await call.write(bytes(10_000))

    async def sink(self, requests: AsyncIterator[bytes], call: GrpcCall) -> None:
        """Read one request, then wait for permission to read the others."""
        self.permission = asyncio.Event()
        async for request in requests:
            self.requests.append(request)
            await self.permission.wait()
        await call.write(b"%d" % len(self.requests))

    async def wait(self, request: bytes, call: GrpcCall) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        return b""

    def methods(self) -> dict[str, Method]:
        methods = {
            ECHO: Method(self.echo),
            COUNT: Method(self.count, writes_stream=True),
            SINK: Method(self.sink, reads_stream=True),
            WAIT: Method(self.wait),
        }
        return {path.decode(): method for path, method in methods.items()}


class Client:
    """A client of a GrpcApplication with the methods above and the methods of this service."""

    def __init__(self, loop: ClockLoop, catalog: Catalog) -> None:
        self.frontend = fake_frontend(catalog, max_inputs=8, max_body_bytes=LIMIT)
        self.dispatcher: FakeDispatcher = self.frontend.dispatcher  # type: ignore[assignment]
        self.handlers = Handlers()
        self.application = GrpcApplication(self.frontend, {**self.handlers.methods(), **oip_methods(self.frontend)})
        self.peer = Peer(loop, self.application)
        self.peer.send(window(0, 1 << 30))
        self._next = 1

    @property
    def open_calls(self) -> int:
        return len(self.application.unary_calls) + len(self.application.calls)

    def call(self, path: bytes, body: bytes, *fields: tuple[bytes, bytes], ended: bool = True) -> Frames:
        """Send a call in one burst, on the next stream."""
        stream, self._next = self._next, self._next + 2
        return self.peer.send(head(path, *fields, stream=stream), frame(DATA, END_STREAM if ended else 0, stream, body))

    def reply(self, data: bytes, *fields: tuple[bytes, bytes], flag: int = 0) -> tuple[dict[bytes, bytes], bytes]:
        """Return trailers and body of a ModelInfer call, without the id of the request. flag: 1 if the data is compressed."""
        parts = [message(data, flag)[at : at + 16_384] for at in range(0, len(data) + 5, 16_384)]
        frames, stream = self.call(INFER, parts[0], *fields, ended=len(parts) == 1), self._next - 2
        frames += self.peer.send(*[frame(DATA, END_STREAM * (part is parts[-1]), stream, part) for part in parts[1:]])
        while self.open_calls:
            frames += self.peer.send()
        trailers = self.peer.header_fields(frames)[-1]
        assert len(trailers.pop(b"x-request-id")) == 32
        return trailers, frames.body(stream)

    def status(self, frames: Frames) -> tuple[str, str]:
        """Return code and details in the last header block."""
        last = self.peer.header_fields(frames)[-1]
        assert frames[-1].kind == RST_STREAM or frames[-1].flags & END_STREAM
        return CODES[int(last[b"grpc-status"])], unquote_to_bytes(last.get(b"grpc-message", b"")).decode()

    @property
    def outcomes(self) -> dict[tuple[str, ...], Any]:
        self.frontend.metrics.snapshot()  # adds the counts of the hot path
        return {labels: list(values) for labels, values in self.frontend.metrics.requests.values.items()}


def head(path: bytes, *fields: tuple[bytes, bytes], stream: int = 1) -> bytes:
    names = [name for name, _ in fields]
    usual = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    more = [*(pair for pair in usual if pair[0] not in names), *fields]
    return frame(HEADERS, END_HEADERS, stream, block(*more, path=path))


def message(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


@pytest.fixture
def client(loop: ClockLoop, catalog: Catalog) -> Iterator[Client]:
    client = Client(loop, catalog)
    yield client
    client.peer.run(client.peer.transport.close)  # ends the calls


# ModelInfer on the hot path and on the general path.


def test_replies_to_calls_are_those_that_were_recorded(client: Client) -> None:
    """Each message is sent twice, as the second may take the template of the first, and compressed."""

    def text_of(trailers: dict[bytes, bytes], body: bytes) -> bytes:
        return b"".join(b"%b: %b\n" % field for field in sorted(trailers.items())) + b"\n" + body

    for _ in range(2):
        golden.check(golden.CALLS, lambda data: text_of(*client.reply(data)))
    golden.check(golden.CALLS, lambda data: text_of(*client.reply(gzip.compress(data), GZIP, flag=1)))


def test_response_tells_the_steps_of_its_session(client: Client) -> None:
    client.dispatcher.steps = 7
    reply = client.reply(with_parameters(ids(bytes(12)), sequence_id="mine").SerializeToString())[1]
    assert METHODS["ModelInfer"].response_type.FromString(reply[5:]).parameters["sequence_steps"].int64_param == 7


def test_values_that_are_not_finite_are_refused_on_both_paths(client: Client) -> None:
    """The engine returns NaN for one of three sequences. The request for `scores` alone has a template."""
    scores = [[0.5, 0.25, 0.25], [0.5, float("nan"), 0.25], [0.5, 0.25, 0.25]]
    three, alone = text(QUESTION, QUESTION, QUESTION), requesting(ids(bytes(12), "words"), "scores")
    for data in (alone, alone):
        assert client.reply(data.SerializeToString())[0][b"grpc-status"] == b"0"
    client.dispatcher.answers = {"words": {"scores": scores}}
    trailers, _ = client.reply(three.SerializeToString())
    assert (trailers[b"grpc-status"], trailers[b"seqserve-field"]) == (b"3", b"text[1]")
    client.dispatcher.answers = {"words": {"scores": scores[1:]}}
    assert client.reply(alone.SerializeToString())[0][b"seqserve-field"] == b"ids[0]"


def test_shorter_deadline_of_call_and_request_applies(client: Client) -> None:
    """Also to a request with a template."""
    data = with_parameters(ids(bytes(12), "words"), timeout=60_000_000).SerializeToString()
    for fields in ((), (), ((b"grpc-timeout", b"30S"),), ()):
        client.reply(data, *fields)
    seconds = [request.deadline - request.sent for request, _ in client.dispatcher.requests]
    assert [45 < each <= 60 for each in seconds] == [True, True, False, True]


def test_inference_that_ends_early_is_cancelled_in_the_engine(client: Client) -> None:
    """By a reset of the client, and by the end of the service."""
    client.dispatcher.held = True
    question = message(text(QUESTION).SerializeToString())
    assert not client.call(INFER, question) and not client.call(INFER, question)
    client.peer.send(reset(1))
    assert len(client.dispatcher.cancelled) == 1 and client.application.unanswered
    assert client.status(client.peer.run(client.application.cut_off))[0] == "UNAVAILABLE"
    assert len(client.dispatcher.cancelled) == 2 and not client.application.unanswered
    assert client.outcomes == {("words", "1", "client_gone"): [1], ("words", "1", "unavailable"): [1]}


def test_internal_error_reveals_no_details(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    """A frontend without a catalog fails at the first access."""
    client.frontend.catalog = None  # type: ignore[assignment]
    question, text_of_all = (
        message(text(QUESTION, id="7").SerializeToString()),
        "the service failed on this request: see its log",
    )
    for name in (b"ModelInfer", b"ModelMetadata"):
        assert client.status(client.call(SERVICE + name, question)) == ("INTERNAL", text_of_all)
    reply = METHODS["ModelStreamInfer"].response_type.FromString(
        client.call(SERVICE + b"ModelStreamInfer", question).body(5)[5:]
    )
    assert (reply.infer_response.id, reply.error_message) == ("7", text_of_all)
    assert capfd.readouterr().err.count('"event": "bug", "error": "AttributeError') == 3
    assert client.outcomes[("unknown", "unknown", "inference_failed")] == [2]


# The wire format.


def test_reply_has_headers_message_and_trailers(client: Client) -> None:
    frames = client.call(ECHO, message(b"abc"))
    headers, trailers = client.peer.header_fields(frames)
    accepted = {b"content-type": b"application/grpc", b"grpc-accept-encoding": b"identity, deflate, gzip"}
    assert headers == {b":status": b"200", **accepted}
    assert len(trailers.pop(b"x-request-id")) == 32
    assert frames.body(1) == message(b"abc") and trailers == {b"grpc-status": b"0"}
    deflated = zlib.compress(b"abc" * 1000)
    for encoding, data, stream in ((b"gzip", PACKED, 3), (b"deflate", deflated, 5)):
        frames = client.call(ECHO, message(data, flag=1), (b"grpc-encoding", encoding))
        assert frames.body(stream) == message(b"abc" * 1000), "compression is undone"


PACKED = gzip.compress(b"abc" * 1000)
GZIP = (b"grpc-encoding", b"gzip")
BAD_CALLS: list[tuple[bytes, list[tuple[bytes, bytes]], str, str]] = [
    (b"", [], "INTERNAL", "no message"),
    (b"\0\0", [], "INTERNAL", "ends inside a message"),
    (message(b"abc")[:-1], [], "INTERNAL", "ends inside a message"),
    (message(b"abc") + b"\0", [], "INTERNAL", "several messages"),
    (message(b"abc", flag=2), [], "INTERNAL", "flag 2"),
    (message(b"abc", flag=1), [], "INTERNAL", "names no compression"),
    *(
        (message(data, flag=1), [GZIP], "INTERNAL", "not compressed as grpc-")
        for data in (b"", b"abc", PACKED[:-1], PACKED + b"x")
    ),
    (message(zlib.compress(b"abc")[:-1], flag=1), [(b"grpc-encoding", b"deflate")], "INTERNAL", "not compressed as grpc-"),
    (struct.pack(">BI", 0, 2**32 - 1), [], "RESOURCE_EXHAUSTED", "larger than max (4294967295 vs. 131072)"),
    (message(gzip.compress(bytes(300_000)), flag=1), [GZIP], "RESOURCE_EXHAUSTED", "131073 vs. 131072"),
    (message(b""), [(b"grpc-encoding", b"br")], "UNIMPLEMENTED", "gzip or deflate"),
    *((message(b""), [(b"grpc-timeout", value)], "INTERNAL", "grpc-timeout") for value in (b"soon", b"123456789S", b"-1S")),
]


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize(("body", "fields", "code", "details"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_invalid_call_gets_a_status(
    client: Client, path: bytes, body: bytes, fields: list[tuple[bytes, bytes]], code: str, details: str
) -> None:
    frames = client.call(path, body, *fields)
    while client.open_calls:  # a large message is decompressed in a thread
        frames += client.peer.send()
    frames += client.peer.send()
    actual, text = client.status(frames)
    assert actual == code and details in text
    assert client.application.bodies.held_bytes == 0 and client.open_calls == 0


def test_message_beyond_the_limit_is_refused_at_its_prefix(client: Client) -> None:
    frames = client.call(ECHO, struct.pack(">BI", 0, 2 * LIMIT + 1), ended=False)
    assert client.status(frames)[0] == "RESOURCE_EXHAUSTED"
    assert frames.resets(1) == [ErrorCode.NO_ERROR], "the client need not send the rest"
    assert not client.call(ECHO, struct.pack(">BI", 0, 2 * LIMIT), ended=False)


def test_unknown_method_is_unimplemented(client: Client) -> None:
    for path in (b"/test.Test/Nothing", b"/", b"*", b"/x" * 4000, b"/\xff"):
        assert client.status(client.call(path, message(b"")))[0] == "UNIMPLEMENTED"


def test_other_requests_of_http_are_refused(client: Client) -> None:
    kinds = {b"application/grpc+proto": b"200", b"application/grpc;x=y": b"200", b"application/grpc-web": b"415", b"": b"415"}
    for kind, status in kinds.items():
        frames = client.call(ECHO, message(b"abc"), (b"content-type", kind))
        assert client.peer.header_fields(frames)[0][b":status"] == status
    get = block((b"content-type", b"application/grpc"), path=ECHO).replace(b"\x04POST", b"\x03GET")
    [refusal] = client.peer.header_fields(client.peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 99, get)))
    assert refusal.pop(b"x-request-id") and refusal == {b":status": b"405"}


def test_handler_sees_metadata_and_deadline(client: Client) -> None:
    client.call(ECHO, message(b""), (b"grpc-timeout", b"5S"), (b"x-a", b"1"), (b"x-a", b"2"))
    call = client.handlers.call
    assert [call.has_metadata(b"x-a", value) for value in (b"1", b"2", b"3")] == [True, True, False]
    for unit, seconds in ((b"5S", 5), (b"2H", 7200), (b"3M", 180), (b"9000m", 9), (b"9000000u", 9)):
        client.call(ECHO, message(b""), (b"grpc-timeout", unit))
        assert seconds - 5 < client.handlers.call.deadline - time.monotonic() <= seconds
    client.call(ECHO, message(b""))
    assert client.handlers.call.deadline == math.inf


def test_details_survive_the_wire() -> None:
    for details in ("plain", "100 %", "naïve\n~", "日本", "x" * 30_000):
        fields = dict(hpack.Decoder(1 << 20).decode(trailers_only(CallStatus(grpc.StatusCode.ABORTED, details)), raw=True))
        assert unquote_to_bytes(fields[b"grpc-message"]).decode() == details and fields[b"grpc-message"].isascii()


# Time and the ends of calls.


def test_deadline_ends_a_handler(client: Client) -> None:
    assert not client.call(WAIT, message(b""), (b"grpc-timeout", b"5S"))
    client.peer.loop.now += 6
    assert client.status(client.peer.send()) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")
    assert client.handlers.cancelled == 1


def test_incomplete_request_ends_at_its_deadline_or_when_it_is_slow(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not client.call(ECHO, b"\0", (b"grpc-timeout", b"1n"), ended=False)
    assert client.status(client.peer.run(client.application.sweep))[0] == "DEADLINE_EXCEEDED"
    for path in (ECHO, INFER):
        assert not client.call(path, b"\0\0", (b"grpc-timeout", b"9S"), ended=False)
        assert not client.peer.run(client.application.sweep)
        with monkeypatch.context() as patch:
            patch.setattr(connection_guard, "RECEIVE_SECONDS", -1)
            code, details = client.status(client.peer.run(client.application.sweep))
        assert code == "DEADLINE_EXCEEDED" and "took longer to arrive than" in details
    assert client.application.bodies.held_bytes == 0


@pytest.mark.parametrize("end", ["reset", "lost", "cut off"])
def test_end_of_stream_connection_or_service_ends_every_call(client: Client, end: str) -> None:
    """Handlers that run, that wait for a message, and requests that are incomplete. Only a cut-off has a status."""
    client.call(WAIT, message(b""))
    client.call(SINK, message(b"a"), ended=False)
    client.call(ECHO, b"\0\0", ended=False)
    client.call(INFER, b"\0", ended=False)
    if end == "cut off":
        frames = client.peer.run(client.application.cut_off)
        assert {part.stream for part in frames if part.kind == HEADERS and part.flags & END_STREAM} == {1, 3, 5, 7}
        assert {fields[b"grpc-status"] for fields in client.peer.header_fields(frames)} == {b"14"}
    elif end == "lost":
        client.peer.run(client.peer.transport.close)
    else:
        assert not client.peer.send(*[reset(stream) for stream in (1, 3, 5, 7)])
    assert client.handlers.cancelled == 1 and client.open_calls == 0 and client.application.bodies.held_bytes == 0


# Flow control.


def test_slow_reader_stops_the_handler(client: Client) -> None:
    """The handler writes a thousand messages of 10 kB; the client reads the first 65 kB of them."""
    frames = client.call(COUNT, message(b"1000"))
    assert len(frames.body(1)) == 65_535 and client.handlers.written == 7
    assert client.peer.connection.unread_bytes < 10_005
    client.peer.send(window(1, 100_000))
    assert client.handlers.written == 17
    frames = client.peer.send(window(1, 20_000_000))
    assert client.handlers.written == 1000 and client.status(frames)[0] == "OK"


def test_rest_of_an_answered_request_is_ignored(client: Client) -> None:
    """The client sends on, but reads no reply, so that the stream stays open after its call."""
    client.peer.send(settings((Setting.INITIAL_WINDOW_SIZE, 0)))
    data = message(text(QUESTION).SerializeToString())
    client.call(SERVICE + b"ModelStreamInfer", data, (b"grpc-timeout", b"5S"), ended=False)
    while not client.peer.connection.unread_bytes:
        client.peer.send()
    client.peer.loop.now += 6
    client.peer.send()
    assert not client.open_calls and client.peer.connection.unread_bytes
    assert not client.peer.send(frame(DATA, 0, 1, data)) and client.application.bodies.held_bytes == 0
    assert client.status(client.peer.send(window(1, 10_000)))[0] == "DEADLINE_EXCEEDED"


def test_handler_that_reads_slowly_stops_the_client(client: Client) -> None:
    data = frame(DATA, 0, 1, message(bytes(10_000)))
    sent = client.peer.send(head(SINK), data * 26)
    assert len(client.handlers.requests) == 1 and client.application.bodies.held_bytes == 25 * 10_005
    assert not [part for part in sent if part.stream == 1 and part.kind == WINDOW_UPDATE], "the client must wait"
    assert client.peer.send(data).resets(1) == [ErrorCode.FLOW_CONTROL_ERROR]


def test_reading_handler_lets_the_client_continue(client: Client) -> None:
    client.peer.send(head(SINK))
    for number in range(100):
        client.peer.send(frame(DATA, 0, 1, message(bytes(10_000))))
        client.handlers.permission.set()
        assert client.application.bodies.held_bytes <= 10_005, number
    assert client.peer.send(frame(DATA, END_STREAM, 1)).body(1) == message(b"100")


def test_incomplete_requests_are_limited_together(loop: ClockLoop, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_application, "MAX_RECEIVING_BYTES", 50_000)
    client = Client(loop, catalog)
    *first, last = [client.call(path, message(bytes(LIMIT))[:16_000], ended=False) for path in (ECHO, SINK, INFER, SINK)]
    assert not any(first)
    fields = client.peer.header_fields(last)[-1]
    assert CODES[int(fields[b"grpc-status"])] == "UNAVAILABLE" and b"the limit is 50000" in fields[b"grpc-message"]
    assert fields[b"seqserve-code"] == Overloaded.code.encode()
    assert client.call(ECHO, message(b"small")).body(9) == message(b"small"), "whole requests are answered"
    bomb = client.call(ECHO, message(gzip.compress(Random(0).randbytes(INLINE_BYTES) + bytes(LIMIT)), flag=1), GZIP)
    while client.open_calls > 3:
        bomb += client.peer.send()
    bomb += client.peer.send()
    assert client.status(bomb)[0] == "UNAVAILABLE", "decompressed bytes count"
    assert client.call(ECHO, message(PACKED, flag=1), GZIP).body(13) == message(b"abc" * 1000)


def test_calls_of_every_method_take_turns_by_connection(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[tuple[Start, object]] = []

    def add(arrived: float, start: Start, connection: object) -> WaitingStart:
        waiting.append((start, connection))
        return WaitingStart(arrived, start, connection)

    monkeypatch.setattr(client.frontend.limits.starts, "must_wait", lambda _: True)
    monkeypatch.setattr(client.frontend.limits.starts, "add", add)
    for path in (ECHO, INFER):
        assert not client.call(path, message(b"abc"))
    starts, connections = zip(*waiting, strict=True)
    assert connections[0] is connections[1]
    assert client.peer.run(starts[0], 0.0).body(1) == message(b"abc")


def test_callers_share_the_statistics_of_a_scrape(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded once for each form."""
    snapshots: list[Snapshot] = [{}, {}]
    written = []

    async def scrape() -> Snapshot:
        return snapshots[0]

    def write(fields: dict[str, Any]) -> bytes:
        written.append(fields)
        return b"%d" % len(written)

    monkeypatch.setattr(client.frontend, "supervisor", SimpleNamespace(scrape=scrape))
    ask = partial(model_statistics, client.frontend, write)
    assert [asyncio.run(ask(*name)) for name in ((), ("words",), (), ("words",))] == [b"1", b"2", b"1", b"2"]
    assert [each["name"] for each in written[1]["model_stats"]] == ["words"]
    del snapshots[0]
    assert asyncio.run(ask()) == b"3"
