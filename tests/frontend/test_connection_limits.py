"""The replies of a running server to clients that send too much, too slowly or ambiguously, while it serves other clients."""

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
from tests.raw_websocket import connection
from tests.serving import eventually

BODY = json.dumps({"model": "words", "inputs": ["how far"]}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


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


def read_to_end(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def reply_to(limited: InProcess, message: bytes) -> bytes:
    """Send a message that the server answers with an error or with the end of the connection."""
    with connection(limited) as client:
        client.sendall(message)
        return read_to_end(client)


def test_large_or_many_headers_get_431(limited: InProcess) -> None:
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"
    for headers in (
        b"X: " + b"x" * (1 << 17) + b"\r\n",
        b"X: 1\r\n" * 101,
        b"".join(b"X-%d: %b\r\n" % (n, b"y" * 999) for n in range(80)),
    ):
        reply = reply_to(limited, head + headers + LENGTH + b"\r\n" + BODY)
        assert reply.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"connection: close\r\n" in reply
        assert b'"code":"headers_too_large"' in reply
    with connection(limited) as client:
        client.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nX: ")
        with suppress(OSError):  # the end of the connection, before that of the header
            for _ in range(20):
                client.sendall(b"x" * (1 << 16))
        assert read_to_end(client).startswith(b"HTTP/1.1 431 ")
    assert limited.metric("seqserve_connections_closed_total", reason="headers_too_large") > 0


@pytest.mark.parametrize(
    "head",
    [
        b"POST /infer HTTP/1.1\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n",
        b"POST /infer HTTP/2.0\r\nHost: localhost\r\n",
        b"POST /infer HTTP/0.9\r\nHost: localhost\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length : 5\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\n folded: 1\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\nX: b\n",
    ],
)
def test_ambiguous_head_gets_400_and_nothing_after_it_is_read(limited: InProcess, head: bytes) -> None:
    hidden = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reply = reply_to(limited, head + LENGTH + b"\r\n" + BODY + hidden)
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b'"code":"invalid_request"' in reply


HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


UNREADABLE = (
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"POST /tokens HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    b"GET /stream?model=words HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    b"\0",
)


@pytest.mark.parametrize("before", [b"GET /models HTTP/1.1\r\n", b"POST /infer?general HTTP/1.1\r\n" + LENGTH])
def test_unreadable_request_is_refused_behind_the_replies_before_it(limited: InProcess, before: bytes) -> None:
    since = limited.log_bytes
    body = BODY if before.startswith(b"POST") else b""
    for unreadable in UNREADABLE:
        reply = reply_to(limited, 3 * (before + b"Host: localhost\r\n\r\n" + body) + unreadable)
        assert re.findall(rb"HTTP/1.1 (\d+) ", reply) == [b"200", b"200", b"200", b"400"]
    assert not limited.events("bug", since=since) and not limited.events("library warning", since=since)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_body_of_a_request_that_offers_an_upgrade_is_its_body(limited: InProcess, upgrade: bytes) -> None:
    offer = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: %b\r\n" % upgrade
    reply = reply_to(limited, b"POST /infer HTTP/1.1\r\n" + offer + LENGTH + b"\r\n" + BODY + HIDDEN)
    assert reply.count(b"HTTP/1.1 200 OK\r\n") == reply.count(b"HTTP/1.1 ") == 2, "the second is a request of its own"
    body_is_a_request = b"Content-Length: %d\r\n\r\n%b" % (len(HIDDEN), HIDDEN)
    for line in (b"POST /v2/repository/index HTTP/1.1\r\n", b"GET /stream HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\n"):
        reply = reply_to(limited, line + offer + body_is_a_request)
        assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert reply.count(b"HTTP/1.1 ") == 1


UNFINISHED = (
    b"POST /inf",
    b"POST /infer HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /infer HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"\r\n" + BODY[:9],
    b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"GET /stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
)


def test_unfinished_requests_get_408(limited: InProcess) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connection(limited)) for _ in UNFINISHED]
        for client, begin in zip(clients, UNFINISHED, strict=True):
            client.sendall(begin)
        for reply in map(read_to_end, clients):
            assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b'"code":"request_timeout"' in reply


def test_silent_connections_are_closed_and_make_room(limited: InProcess) -> None:
    assert reply_to(limited, b"") == b""
    assert limited.metric("seqserve_connections_closed_total", reason="idle") > 0
    with ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(connection(limited))
        assert limited.infer("words", ["how far"]).status_code == 200
        eventually(lambda: limited.metric("seqserve_connections_closed_total", reason="too_many") > 0)


def test_reader_that_stops_reading_is_disconnected(limited: InProcess) -> None:
    """The replies to pipelined requests wait for a client that never reads."""
    ids = [[1] * 60] * 60
    body = json.dumps({"model": "words", "inputs": ids, "return": ["sequence"]}).encode()
    message = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    before = limited.metric("seqserve_connections_closed_total", reason="slow_reader")
    with connection(limited) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(5)
        with suppress(OSError):  # the end of the connection, or the time-out of a full socket
            for _ in range(400):
                client.sendall(message)
        eventually(lambda: limited.metric("seqserve_connections_closed_total", reason="slow_reader") > before)


def test_incomplete_bodies_share_a_budget(limited: InProcess) -> None:
    """Four clients send a megabyte each of a body that they do not complete. The fourth is refused, and small requests are not."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    with ExitStack() as parked:
        clients = [parked.enter_context(connection(limited)) for _ in range(4)]
        for client, path in zip(clients, (b"/infer", b"/v2/models/words/infer", b"/infer", b"/infer?general"), strict=True):
            client.sendall(head % path + bytes(900_000))
        assert limited.infer("words", ["how far"]).status_code == 200
        with suppress(OSError):
            for _ in range(40):
                clients[3].sendall(bytes(100_000))
        reply = read_to_end(clients[3])
    assert reply.startswith(b"HTTP/1.1 503 Service Unavailable\r\n") and b'"overloaded"' in reply
    assert limited.metric("seqserve_connections_closed_total", reason="overloaded") > 0
