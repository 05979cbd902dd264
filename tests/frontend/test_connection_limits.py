"""The replies of a frontend to clients that send too much, too slowly or ambiguously, and the longest age of a connection."""

from __future__ import annotations

import itertools
import json
import queue
import random
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from service.frontend.guards import connection_guard
from service.frontend.http1.websocket_protocol import MAX_MESSAGE_BYTES
from service.frontend.oip.protobuf import METHODS
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.messages import ids
from tests.frontend.test_hot_path import GENERAL_HEADER, count_replies, request
from tests.raw_websocket import (
    BINARY,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    close_code,
    connection,
    frame,
    handshake,
    open_socket,
    receive_frame,
)
from tests.serving import LIMIT_SECONDS, check_unharmed, eventually

BODY = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
INFER = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"
MESSAGE = json.dumps({"input": [[0.1, -2.0, 30.0]]}).encode()
MAX_SOCKETS = 20
HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def limited(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_guard, "RECEIVE_SECONDS", 1)
        patch.setattr(connection_guard, "SEND_SECONDS", 1)
        patch.setattr("service.frontend.guards.limits.MAX_RECEIVING_BYTES", 3_000_000)
        for name, value in {"MAX_MESSAGE_FRAMES": 200, "MAX_FRAME_RATE": 500, "MAX_PING_RATE": 50}.items():
            patch.setattr(f"service.frontend.http1.websocket_protocol.{name}", value)
        limits: dict[str, Any] = {"idle_seconds": 1, "max_connections": 2 * MAX_SOCKETS}
        with in_process(models_folder, tmp_path_factory.mktemp("log"), **limits) as running:
            # A new connection for each request: an idle one may close at the moment at which the client sends the next request.
            running.client.close()
            limit = httpx.Limits(max_keepalive_connections=0)
            running.client = httpx.Client(base_url=running.address, timeout=30, trust_env=False, limits=limit)
            yield running


@pytest.fixture(autouse=True)
def unharmed(limited: InProcess) -> Iterator[None]:
    yield
    check_unharmed(limited)


def closed(limited: InProcess, reason: str) -> float:
    return limited.metric("seqserve_connections_closed_total", reason=reason)


def read_to_end(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            data += part
    return data


def reply_to(limited: InProcess, message: bytes) -> bytes:
    """Send a message that the server answers with an error or with the end of the connection."""
    with connection(limited) as client:
        with suppress(OSError):  # the end of the connection, perhaps before that of the message
            client.sendall(message)
        return read_to_end(client)


def statuses(reply: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", reply)]


def test_large_or_many_headers_get_431(limited: InProcess) -> None:
    many = b"".join(b"X-%d: %b\r\n" % (n, b"y" * 999) for n in range(80))
    most = GENERAL_HEADER + b"Connection: close\r\n" + b"X: 1\r\n" * 96
    assert statuses(reply_to(limited, INFER + most + LENGTH + b"\r\n" + BODY)) == [200], "100 headers, with Host and the length"
    for headers in (b"X: " + b"x" * (1 << 17) + b"\r\n", most + b"X: 1\r\n", many):
        reply = reply_to(limited, INFER + headers + LENGTH + b"\r\n" + BODY)
        assert statuses(reply) == [431] and b'"code":"headers_too_large"' in reply and b"connection: close\r\n" in reply
    assert statuses(reply_to(limited, INFER + b"X: " + b"x" * (1 << 20))) == [431], "before its end"
    assert closed(limited, "headers_too_large") > 0


@pytest.mark.parametrize(
    "head",
    [
        b"POST /infer HTTP/1.1\r\n",
        *(INFER.replace(b"HTTP/1.1", version) for version in (b"HTTP/2.0", b"HTTP/0.9")),
        *(INFER + b"Transfer-Encoding: %b\r\n" % coding for coding in (b"chunked", b"xchunked")),
        *(INFER + line for line in (b"Host: b\r\n", b"Content-Length: 5\r\n", b"Content-Length : 5\r\n", b" folded: 1\r\n")),
        *(INFER + b"X: a\0b\r\n", INFER[:-2] + b"\nX: b\n"),
    ],
)
def test_ambiguous_head_gets_400_and_nothing_after_it_is_read(limited: InProcess, head: bytes) -> None:
    reply = reply_to(limited, head + LENGTH + b"\r\n" + BODY + HIDDEN)
    assert statuses(reply) == [400] and b'"code":"invalid_request"' in reply


UNREADABLE = (
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"POST /tokens HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    handshake(),
    b"\0",
)


@pytest.mark.parametrize("before", [b"GET /models HTTP/1.1\r\n", b"POST /infer?general HTTP/1.1\r\n" + LENGTH])
def test_unreadable_request_is_refused_behind_the_replies_before_it(limited: InProcess, before: bytes) -> None:
    since, body = limited.log_bytes, BODY if before.startswith(b"POST") else b""
    for unreadable in UNREADABLE:
        reply = reply_to(limited, 3 * (before + b"Host: localhost\r\n\r\n" + body) + unreadable)
        assert statuses(reply) == [200, 200, 200, 400]
    assert not limited.events("bug", since=since) and not limited.events("library warning", since=since)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_body_of_a_request_that_offers_an_upgrade_is_its_body(limited: InProcess, upgrade: bytes) -> None:
    offer = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: %b\r\n" % upgrade
    reply = reply_to(limited, b"POST /infer HTTP/1.1\r\n" + offer + LENGTH + b"\r\n" + BODY + HIDDEN)
    assert statuses(reply) == [200, 200], "the second is a request of its own"
    body_is_a_request = b"Content-Length: %d\r\n\r\n%b" % (len(HIDDEN), HIDDEN)
    for line in (b"POST /v2/repository/index HTTP/1.1\r\n", b"GET /stream HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\n"):
        assert statuses(reply_to(limited, line + offer + body_is_a_request)) == [400]


UNFINISHED = (
    *(b"POST /inf", INFER, INFER + LENGTH + b"\r\n" + BODY[:9], INFER + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"),
    b"GET /stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
)


def test_unfinished_requests_get_408(limited: InProcess) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connection(limited)) for _ in UNFINISHED]
        for client, begin in zip(clients, UNFINISHED, strict=True):
            client.sendall(begin)
        for reply in map(read_to_end, clients):
            assert statuses(reply) == [408] and b'"code":"request_timeout"' in reply


def test_silent_connections_are_closed_and_make_room(limited: InProcess) -> None:
    assert reply_to(limited, b"") == reply_to(limited, b"\r\n") == b""
    assert closed(limited, "idle") > 0
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(connection(limited)).sendall(b"\r\n")
        assert limited.infer("words", ["how far"]).status_code == 200
        eventually(lambda: closed(limited, "too_many") > 0)


def test_reader_that_stops_reading_is_disconnected(limited: InProcess) -> None:
    """The replies to pipelined requests wait for a client that never reads."""
    body = json.dumps({"model": "words", "inputs": [[1] * 60] * 60, "return": ["sequence"]}).encode()
    before = closed(limited, "slow_reader")
    with connection(limited) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(5)
        with suppress(OSError):  # the end of the connection, or the time-out of a full socket
            for _ in range(400):
                client.sendall(INFER + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        eventually(lambda: closed(limited, "slow_reader") > before)


def test_incomplete_bodies_share_a_budget(limited: InProcess) -> None:
    """Four clients send a megabyte each of a body that they do not complete. The fourth is refused, and small requests are not."""
    with ExitStack() as parked:
        clients = [parked.enter_context(connection(limited)) for _ in range(4)]
        for client, path in zip(clients, (b"/infer", b"/v2/models/words/infer", b"/infer", b"/infer?general"), strict=True):
            client.sendall(INFER.replace(b"/infer", path) + b"Content-Length: 9000000\r\n\r\n" + bytes(900_000))
        assert limited.infer("words", ["how far"]).status_code == 200
        with suppress(OSError):
            for _ in range(40):
                clients[3].sendall(bytes(100_000))
        reply = read_to_end(clients[3])
    assert statuses(reply) == [503] and b'"overloaded"' in reply and closed(limited, "overloaded") > 0


# WebSockets.


@pytest.mark.parametrize(
    "data, code, reason",
    [
        (frame(PING) * 51, 1008, "too_many_pings"),
        (frame(PONG) * 51, 1008, "too_many_pings"),
        (frame(BINARY, last=False) + frame(CONTINUATION, last=False) * 200, 1008, "too_many_frames"),
        (frame(BINARY, last=False), 1008, "slow_request"),
        (frame(BINARY, b"1234")[:-1], 1008, "slow_request"),
        (frame(BINARY, bytes(MAX_MESSAGE_BYTES + 1)), 1009, "too_large"),
        ((frame(BINARY, bytes(600_000), last=False) + frame(CONTINUATION, bytes(600_000))), 1009, "too_large"),
        (frame(TEXT, b"\xff"), 1007, "invalid_request"),
        (frame(CONTINUATION, b"1"), 1002, "invalid_request"),
        (frame(3), 1002, "invalid_request"),
        (b"\x82\x01a", 1002, "invalid_request"),
    ],
)
def test_client_beyond_a_limit_is_closed_with_a_code(limited: InProcess, data: bytes, code: int, reason: str) -> None:
    before = closed(limited, reason)
    with open_socket(limited) as client:
        client.sendall(data)
        assert close_code(client) == code
    assert closed(limited, reason) == before + 1


def mixed_frames() -> Iterator[bytes]:
    """Yield messages of all lengths of a head, whole, in fragments, with pings between, masked, and two messages that are refused."""
    row = b"[0.1, -2.0, 30.0]"
    for size in (30, 125, 126, 127, 300, 65_535, 65_536):
        yield frame(TEXT, b'{"input": [%b]}' % row + b" " * (size - 30), mask=b"\x01\x80\xff\x00")
    yield frame(BINARY, struct.pack("<3f", 0.1, -2.0, 30.0) * 40, mask=b"abcd")
    yield (
        frame(TEXT, MESSAGE[:9], last=False, mask=b"efgh")
        + frame(PING, b"ping")
        + frame(CONTINUATION, MESSAGE[9:], mask=b"ijkl")
    )
    yield frame(PING) + frame(BINARY) + frame(TEXT)
    yield frame(TEXT, '{"input": "é"}'.encode(), mask=b"mnop") + frame(TEXT, MESSAGE)


def replies_to(limited: InProcess, pieces: list[bytes]) -> tuple[list[str | int], list[float]]:
    """Return the error or the number of steps of every reply to `mixed_frames`, and the scores of all replies."""
    with open_socket(limited) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        frames = [receive_frame(client) for _ in range(15)]
    assert [payload for opcode, payload in frames if opcode == PONG] == [b"ping", b""]
    replies = [json.loads(payload) for opcode, payload in frames if opcode == TEXT]
    outputs = [reply["outputs"][0] for reply in replies if "outputs" in reply]
    scores = [score for output in outputs for score in output["scores"].values()]
    return [reply.get("error") or reply["session"]["steps"] for reply in replies], scores


def test_replies_do_not_depend_on_where_the_frames_are_cut(limited: InProcess) -> None:
    """Messages that arrive whole and messages that arrive in parts are parsed by different code."""
    frames = list(mixed_frames())
    expected, scores = replies_to(limited, frames)
    assert [reply for reply in expected if isinstance(reply, int)] == [1, 2, 3, 4, 5, 6, 7, 47, 48, 49]
    data, generator = b"".join(frames), random.Random(3)
    random_cuts = [sorted({*generator.sample(range(2_000), 20), *generator.sample(range(len(data)), 20)}) for _ in range(3)]
    for cuts in (*random_cuts, list(range(2_000))):
        pieces = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]
        replies, same_scores = replies_to(limited, pieces)
        assert replies == expected
        assert same_scores == pytest.approx(scores, rel=1e-5)


def test_handshake_beyond_the_number_of_sockets_gets_503(limited: InProcess) -> None:
    before = closed(limited, "overloaded")
    with ExitStack() as sockets:
        for _ in range(MAX_SOCKETS):
            sockets.enter_context(open_socket(limited))
        with connection(limited) as client:
            client.sendall(handshake())
            reply = client.recv(1 << 16)
        assert reply.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"20 WebSockets are open" in reply and b"SEQSERVE_MAX_CONNECTIONS" in reply and b'"code":"overloaded"' in reply
        assert limited.infer("words", ["how far"]).status_code == 200
    assert closed(limited, "overloaded") == before + 1


# Connections end at their longest age and at SIGTERM, so that clients connect again, and nothing on them is lost.

HOT, GENERAL = request(b'{"model": "accumulator", "inputs": [[1]]}'), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSES = b"connection: close"


@pytest.fixture
def service(heads_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    monkeypatch.setattr(connection_guard, "REPLICA_CONNECTION_SECONDS", 10 * LIMIT_SECONDS)
    with in_process(heads_folder, tmp_path, replicated=True) as running:
        yield running


def replies(client: Any, requests: bytes, count: int) -> bytes:
    """Send requests and return their replies, and whatever is sent until the end of a connection that closes."""
    client.sendall(requests)
    data = b""
    while (CLOSES in data.lower() or count_replies(data) < count) and (part := client.recv(1 << 16)):
        data += part
    assert count_replies(data.lower()) == count
    return data.lower()


def test_old_connections_close_after_the_replies_to_what_has_arrived(
    service: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "REPLICA_CONNECTION_SECONDS", -1.0)  # old from the beginning
    for last in (HOT, GENERAL):
        with connection(service) as client:
            assert CLOSES in replies(client, last, 1)
        with connection(service) as client:
            assert replies(client, HOT + last, 2).count(CLOSES) == 1


def test_drain_ends_connections_after_their_replies(service: InProcess) -> None:
    """A stream continues, an HTTP connection closes after its reply, and a gRPC client connects again."""
    with connection(service) as client, grpc.insecure_channel(service.grpc) as channel:
        assert CLOSES not in replies(client, HOT, 1)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        requests: queue.Queue[Any] = queue.Queue()
        method = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = method(iter(requests.get, None), metadata=[("x-session-id", "a")], wait_for_ready=True)
        requests.put(ids(b"\2\0\0\0", "accumulator", parameters={"sequence_start": {"bool_param": True}}).SerializeToString())
        assert next(answers)
        eventually(lambda: states and states[-1] is grpc.ChannelConnectivity.READY)
        service.call(lambda: setattr(service.frontend, "draining", True))  # as the supervisor asks at SIGTERM
        assert CLOSES in replies(client, HOT, 1)
        eventually(lambda: states and states[-1] is grpc.ChannelConnectivity.IDLE)
        for steps in range(2, 7):
            requests.put(ids(b"\2\0\0\0", "accumulator").SerializeToString())
            answer = METHODS["ModelStreamInfer"].response_type.FromString(next(answers))
            assert answer.infer_response.parameters["sequence_steps"].int64_param == steps
        requests.put(None)
