"""The replies of a running server to WebSocket clients that send too much, too slowly or too often."""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.frontend.websocket_protocol import MAX_MESSAGE_BYTES
from tests.frontend.in_process import InProcess, in_process
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
from tests.serving import check_unharmed

MESSAGE = json.dumps({"input": [[0.1, -2.0, 30.0]]}).encode()
MAX_SOCKETS = 20


@pytest.fixture(scope="module")
def limited(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    limits = {
        "service.frontend.connection_guard.RECEIVE_SECONDS": 1,
        "service.frontend.connection_guard.RECEIVE_RATE": 10_000_000,
        "service.frontend.connection_guard.SEND_SECONDS": 1,
        "service.frontend.inference.MAX_RECEIVING_BYTES": 1_500_000,
        "service.frontend.websocket_protocol.MAX_MESSAGE_FRAMES": 200,
        "service.frontend.websocket_protocol.MAX_FRAME_RATE": 500,
        "service.frontend.websocket_protocol.MAX_PING_RATE": 50,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(name, value)
        with in_process(models_folder, tmp_path_factory.mktemp("log"), max_connections=2 * MAX_SOCKETS) as running:
            yield running


@pytest.fixture(autouse=True)
def unharmed(limited: InProcess) -> Iterator[None]:
    yield
    check_unharmed(limited)


def closed(limited: InProcess, reason: str) -> float:
    return limited.metric("seqserve_connections_closed_total", reason=reason)


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
