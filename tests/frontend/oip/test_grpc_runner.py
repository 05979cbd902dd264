"""gRPC calls as raw frames: invalid calls, deadlines, flow control between a client and a handler, and the shutdown."""

from __future__ import annotations

import asyncio
import gzip
import struct
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import grpc
import hpack
import pytest

from service.errors import Overloaded
from service.frontend import connection_guard
from service.frontend.http2.frames import ErrorCode
from service.frontend.inference import Frontend
from service.frontend.oip import grpc_application
from service.frontend.oip.grpc_application import GrpcApplication
from service.frontend.oip.grpc_calls import GrpcShutdown
from service.frontend.oip.grpc_methods import rpc_handlers
from service.frontend.oip.grpc_wire import Status, trailers_only
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests.frontend.http2.peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    ClockLoop,
    Frame,
    Peer,
    block,
    body_of,
    frame,
    reset,
    reset_codes,
    window,
)
from tests.frontend.oip.harness import InferHarness
from tests.frontend.oip.test_grpc_application import CallbackDispatcher, text

CODES = {code.value[0]: code for code in grpc.StatusCode}
LIMIT = 1 << 20
ECHO, COUNT, SINK, WAIT, INFER = (
    b"/test.Test/Echo",
    b"/test.Test/Count",
    b"/test.Test/Sink",
    b"/test.Test/Wait",
    (b"/inference.GRPCInferenceService/ModelInfer"),
)


class Handlers:
    """Methods that show the data that reaches a handler."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.written = 0
        self.cancelled = 0
        self.context: Any = None

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.context = context
        return request

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for self.written in range(1, int(request) + 1):
            yield bytes(10_000)

    async def sink(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Read one request, then wait for permission to read the others."""
        self.permission = asyncio.Event()
        async for request in requests:
            self.requests.append(request)
            await self.permission.wait()
        await context.write(b"%d" % len(self.requests))

    async def wait(self, request: bytes, context: Any) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        return b""

    def generic(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "test.Test",
            {
                "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
                "Count": grpc.unary_stream_rpc_method_handler(self.count),
                "Sink": grpc.stream_stream_rpc_method_handler(self.sink),
                "Wait": grpc.unary_unary_rpc_method_handler(self.wait),
            },
        )


class Client:
    """A client of a GrpcApplication with the methods above and the methods of this service."""

    def __init__(self, loop: ClockLoop, harness: InferHarness, **settings: Any) -> None:
        dispatcher = CallbackDispatcher(harness.frontend.catalog)
        frontend_settings = Settings(max_body_bytes=LIMIT, **settings)
        self.frontend = Frontend(
            frontend_settings, harness.frontend.catalog, cast(Any, dispatcher), Metrics(), Log("frontend"), cast(Any, None)
        )
        self.shutdown = GrpcShutdown()
        self.handlers = Handlers()
        generic = (self.handlers.generic(), rpc_handlers(self.frontend, self.shutdown))
        self.application = GrpcApplication(self.frontend, generic, self.shutdown)
        self.peer = Peer(loop, self.application)
        self.peer.send(window(0, 1 << 30))

    def call(self, path: bytes, body: bytes, *fields: tuple[bytes, bytes], stream: int = 1, ended: bool = True) -> list[Frame]:
        """Send a call in one burst."""
        return self.peer.send(head(path, *fields, stream=stream), frame(DATA, END_STREAM if ended else 0, stream, body))

    def status(self, frames: list[Frame]) -> tuple[grpc.StatusCode, str]:
        """Return the status in the last header block."""
        last = self.peer.header_fields(frames)[-1]
        assert frames[-1].kind == RST_STREAM or frames[-1].flags & END_STREAM
        return CODES[int(last[b"grpc-status"])], unquote_to_bytes(last.get(b"grpc-message", b"")).decode()


def head(path: bytes, *fields: tuple[bytes, bytes], stream: int = 1) -> bytes:
    names = [name for name, _ in fields]
    usual = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    more = [*(pair for pair in usual if pair[0] not in names), *fields]
    return frame(HEADERS, END_HEADERS, stream, block(*more, path=path))


def message(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


@pytest.fixture
def loop() -> Any:
    loop = ClockLoop()
    yield loop
    loop.close()


@pytest.fixture
def client(loop: ClockLoop, harness: InferHarness) -> Client:
    return Client(loop, harness)


def test_reply_has_headers_message_and_trailers(client: Client) -> None:
    frames = client.call(ECHO, message(b"abc"))
    headers, trailers = client.peer.header_fields(frames)
    assert headers == {
        b":status": b"200",
        b"content-type": b"application/grpc",
        b"grpc-accept-encoding": b"identity, deflate, gzip",
    }
    assert len(trailers.pop(b"x-request-id")) == 32
    assert body_of(frames, 1) == message(b"abc") and trailers == {b"grpc-status": b"0"}


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize(
    ("body", "code", "details"),
    [
        (b"", "INTERNAL", "no message"),
        (b"\0\0", "INTERNAL", "ends inside a message"),
        (message(b"abc")[:-1], "INTERNAL", "ends inside a message"),
        (message(b"abc") + message(b"d"), "INTERNAL", "several messages"),
        (message(b"abc") + b"\0", "INTERNAL", "several messages"),
        (message(b"abc", flag=2), "INTERNAL", "flag 2"),
        (message(b"abc", flag=1), "INTERNAL", "names no compression"),
        (struct.pack(">BI", 0, 2**32 - 1), "RESOURCE_EXHAUSTED", "larger than max (4294967295 vs. 2097152)"),
    ],
)
def test_body_that_is_no_message_gets_a_status(client: Client, path: bytes, body: bytes, code: str, details: str) -> None:
    actual, text = client.status(client.call(path, body))
    assert actual.name == code and details in text
    assert client.application.held_bytes == 0 and client.application.open_calls == 0


def test_message_beyond_the_limit_is_refused_at_its_prefix(client: Client) -> None:
    frames = client.call(ECHO, struct.pack(">BI", 0, 1 << 31), ended=False)
    assert client.status(frames)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reset_codes(frames, 1) == [ErrorCode.NO_ERROR], "the client need not send the rest"


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compression_is_undone_or_refused(client: Client, encoding: bytes, compress: Any) -> None:
    whole = compress(b"abc" * 1000)
    assert body_of(client.call(ECHO, message(whole, flag=1), (b"grpc-encoding", encoding)), 1) == message(b"abc" * 1000)
    for number, data in enumerate((b"", b"abc", whole[:-1], whole + b"x"), 1):
        fields = (b"grpc-encoding", encoding)
        code, details = client.status(client.call(ECHO, message(data, flag=1), fields, stream=2 * number + 1))
        assert code is grpc.StatusCode.INTERNAL and "not compressed as grpc-encoding says" in details


def test_decompression_stops_at_the_limit(client: Client) -> None:
    """3 MB in 3 KiB: at most 2 MiB and a byte are decompressed."""
    data = gzip.compress(bytes(3_000_000))
    assert len(data) < 4096
    code, details = client.status(client.call(ECHO, message(data, flag=1), (b"grpc-encoding", b"gzip")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "2097153 vs. 2097152" in details


@pytest.mark.parametrize(
    ("fields", "code", "details"),
    [
        ([(b"grpc-encoding", b"br")], "UNIMPLEMENTED", "gzip or deflate"),
        ([(b"grpc-timeout", b"soon")], "INTERNAL", "grpc-timeout"),
        ([(b"grpc-timeout", b"123456789S")], "INTERNAL", "grpc-timeout"),
        ([(b"grpc-timeout", b"-1S")], "INTERNAL", "grpc-timeout"),
    ],
)
def test_fields_that_no_call_may_have_get_a_status(client: Client, fields: Any, code: str, details: str) -> None:
    for path in (ECHO, INFER):
        actual, text = client.status(client.call(path, message(b""), *fields, stream=1 if path == ECHO else 3))
        assert actual.name == code and details in text


def test_unknown_method_is_unimplemented(client: Client) -> None:
    for number, path in enumerate((b"/test.Test/Nothing", b"/", b"*", b"/x" * 4000, b"/\xff")):
        code, _ = client.status(client.call(path, message(b""), stream=2 * number + 1))
        assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (b"application/grpc", b"200"),
        (b"application/grpc+proto", b"200"),
        (b"application/grpc;x=y", b"200"),
        (b"application/grpc-web", b"415"),
        (b"application/json", b"415"),
        (b"", b"415"),
    ],
)
def test_content_type_is_checked(client: Client, content_type: bytes, status: bytes) -> None:
    frames = client.call(ECHO, message(b"abc"), (b"content-type", content_type))
    assert client.peer.header_fields(frames)[0][b":status"] == status


def test_other_http_methods_are_refused(client: Client) -> None:
    get = block((b"content-type", b"application/grpc"), path=ECHO).replace(b"\x04POST", b"\x03GET")
    [refusal] = client.peer.header_fields(client.peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, get)))
    assert refusal.pop(b"x-request-id") and refusal == {b":status": b"405"}


def test_handler_sees_metadata_and_deadline(client: Client) -> None:
    fields = [
        (b"grpc-timeout", b"5S"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
        (b"x-data-bin", b"AP8"),
        (b"user-agent", b"me"),
    ]
    client.call(ECHO, message(b""), *fields)
    context = client.handlers.context
    assert context.invocation_metadata() == (("x-custom", "1"), ("x-custom", "2"), ("x-data-bin", b"\0\xff"))
    assert 0 < context.time_remaining() <= 5
    client.call(ECHO, message(b""), stream=3)
    assert client.handlers.context.time_remaining() is None


@pytest.mark.parametrize("details", ["plain", "100 %", "naïve\n", "日本", "x" * 30_000])
def test_details_survive_the_wire(client: Client, details: str) -> None:
    fields = dict(_decoded(trailers_only(Status(grpc.StatusCode.ABORTED, details))))
    assert unquote_to_bytes(fields[b"grpc-message"]).decode() == details and fields[b"grpc-message"].isascii()


def _decoded(data: bytes) -> Any:
    return hpack.Decoder(1 << 20).decode(data, raw=True)


# Time.


def test_deadline_ends_a_handler(client: Client) -> None:
    assert not client.call(WAIT, message(b""), (b"grpc-timeout", b"5S"))
    client.peer.loop.now += 6
    assert client.status(client.peer.send()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert client.handlers.cancelled == 1


def test_deadline_ends_a_call_whose_request_is_incomplete(client: Client) -> None:
    assert not client.call(ECHO, b"\0", (b"grpc-timeout", b"1n"), ended=False)
    client.peer.loop.call_soon(client.application.sweep)
    assert client.status(client.peer.send())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert client.application.held_bytes == 0


def test_slow_request_is_ended(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "RECEIVE_SECONDS", 0.001)
    for stream, path in ((1, ECHO), (3, INFER)):
        assert not client.call(path, b"\0\0", stream=stream, ended=False)
        time.sleep(0.01)
        client.peer.loop.call_soon(client.application.sweep)
        code, details = client.status(client.peer.send())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "took longer to arrive than 0.001 s" in details


def test_reset_cancels_the_handler(client: Client) -> None:
    client.call(WAIT, message(b""))
    assert not client.peer.send(reset(1)) and client.handlers.cancelled == 1
    assert client.application.open_calls == 0


def test_call_that_is_refused_before_it_runs_gets_a_status(
    loop: ClockLoop, harness: InferHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_application, "MAX_RECEIVING_BYTES", 1000)
    client = Client(loop, harness)
    code, details = client.status(client.call(SINK, bytes(1001), ended=False))
    assert code is grpc.StatusCode.UNAVAILABLE and "the limit is 1000" in details
    assert client.application.open_calls == 0 and client.application.held_bytes == 0


def test_lost_connection_cancels_every_call(client: Client) -> None:
    client.call(WAIT, message(b""))
    client.call(SINK, message(b"a"), stream=3, ended=False)
    client.call(ECHO, b"\0\0", stream=5, ended=False)
    client.peer.transport.close()
    client.peer.send()
    assert client.handlers.cancelled == 1 and client.application.open_calls == 0 and client.application.held_bytes == 0


# Flow control.


def test_slow_reader_stops_the_handler(client: Client) -> None:
    """The handler writes a thousand messages of 10 kB; the client reads the first 65 kB of them."""
    frames = client.call(COUNT, message(b"1000"))
    assert len(body_of(frames, 1)) == 65_535 and client.handlers.written == 7
    assert client.peer.connection.unread_bytes < 10_005
    client.peer.send(window(1, 100_000))
    assert client.handlers.written == 17
    frames = client.peer.send(window(1, 20_000_000))
    assert client.handlers.written == 1000 and client.status(frames)[0] is grpc.StatusCode.OK


def test_handler_that_reads_slowly_stops_the_client(client: Client) -> None:
    sent = client.peer.send(head(SINK))
    data = frame(DATA, 0, 1, message(bytes(10_000)))
    sent += client.peer.send(data * 26)
    assert len(client.handlers.requests) == 1 and client.application.held_bytes == 25 * 10_005
    granted = sum(update.word for update in sent if update.stream == 1 and update.kind == 8)
    assert granted == 0, "the client must wait"
    assert reset_codes(client.peer.send(data), 1) == [ErrorCode.FLOW_CONTROL_ERROR]


def test_reading_handler_lets_the_client_continue(client: Client) -> None:
    client.peer.send(head(SINK))
    for number in range(100):
        client.peer.send(frame(DATA, 0, 1, message(bytes(10_000))))
        client.handlers.permission.set()
        assert client.application.held_bytes <= 10_005, number
    frames = client.peer.send(frame(DATA, END_STREAM, 1))
    assert body_of(frames, 1) == message(b"100")


def test_incomplete_requests_are_limited_together(
    loop: ClockLoop, harness: InferHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_application, "MAX_RECEIVING_BYTES", 50_000)
    client = Client(loop, harness)
    parts = [message(bytes(LIMIT))[:16_000]] * 4
    sent = [client.call(ECHO, part, stream=2 * number + 1, ended=False) for number, part in enumerate(parts)]
    assert not any(sent[:3])
    fields = client.peer.header_fields(sent[3])[-1]
    assert CODES[int(fields[b"grpc-status"])] is grpc.StatusCode.UNAVAILABLE
    assert fields[b"seqserve-code"] == Overloaded.code.encode()
    assert body_of(client.call(ECHO, message(b"small"), stream=9), 9) == message(b"small"), "whole requests are answered"


# Shutdown.


def test_cut_off_ends_every_call_with_a_status(client: Client) -> None:
    client.call(WAIT, message(b""))
    client.call(SINK, message(b"a"), stream=3, ended=False)
    client.call(INFER, b"\0", stream=5, ended=False)
    client.shutdown.over = True
    client.peer.loop.call_soon(client.application.cut_off)
    frames = client.peer.send()
    ended = {part.stream for part in frames if part.kind == HEADERS and part.flags & END_STREAM}
    assert ended == {1, 3, 5} and client.application.open_calls == 0
    assert {fields[b"grpc-status"] for fields in client.peer.header_fields(frames)} == {b"14"}


def test_infer_call_on_the_hot_path_is_cut_off(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[object] = []
    monkeypatch.setattr(CallbackDispatcher, "send", lambda *_: "pending")
    monkeypatch.setattr(CallbackDispatcher, "cancel", lambda _, pending: cancelled.append(pending))
    assert not client.call(INFER, message(text(b"how far").SerializeToString()))
    assert client.application.unanswered
    client.peer.loop.call_soon(client.application.cut_off)
    assert client.status(client.peer.send())[0] is grpc.StatusCode.UNAVAILABLE
    assert cancelled == ["pending"] and not client.application.unanswered
    assert dict(client.frontend.metrics.requests.values)[("words", "1", "unavailable")] == [1]


def test_cancelled_infer_call_is_cancelled_in_the_engine(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[object] = []
    monkeypatch.setattr(CallbackDispatcher, "send", lambda *_: "pending")
    monkeypatch.setattr(CallbackDispatcher, "cancel", lambda _, pending: cancelled.append(pending))
    client.call(INFER, message(text(b"how far").SerializeToString()))
    client.peer.send(reset(1))
    assert cancelled == ["pending"] and not client.application.unanswered
    assert dict(client.frontend.metrics.requests.values)[("words", "1", "client_gone")] == [1]
