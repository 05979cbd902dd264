"""The replies of a frontend to clients that send too much, too slowly or ambiguously, while it serves other clients."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.frontend import connection_guard
from tests.frontend.in_process import InProcess, in_process
from tests.raw_websocket import connection, handshake
from tests.serving import eventually

BODY = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
INFER = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"
HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def limited(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_guard, "RECEIVE_SECONDS", 1)
        patch.setattr(connection_guard, "SEND_SECONDS", 1)
        patch.setattr("service.frontend.inference.MAX_RECEIVING_BYTES", 3_000_000)
        limits: dict[str, Any] = {"idle_seconds": 1, "max_connections": 40}
        with in_process(models_folder, tmp_path_factory.mktemp("log"), **limits) as running:
            # A new connection for each request: an idle one may close at the moment at which the client sends the next request.
            running.client.close()
            limit = httpx.Limits(max_keepalive_connections=0)
            running.client = httpx.Client(base_url=running.address, timeout=30, trust_env=False, limits=limit)
            yield running


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
    for headers in (b"X: " + b"x" * (1 << 17) + b"\r\n", b"X: 1\r\n" * 101, many):
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
    assert reply_to(limited, b"") == b""
    assert closed(limited, "idle") > 0
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(connection(limited))
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
