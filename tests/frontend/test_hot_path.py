"""The hot path and the general path return the same bytes for the same requests, however these arrive."""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from urllib.parse import urlsplit

import pytest

from tests.frontend import golden
from tests.frontend.in_process import InProcess
from tests.serving import LIMIT_SECONDS, Service

HOT = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GENERAL_HEADER = b"TE: trailers\r\n"
"""A header that makes any request unusual, and that no endpoint reads."""


def request(body: bytes, *, head: bytes = HOT, length: int | None = None) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


def through_the_general_path(message: bytes) -> bytes:
    """Return the request with the header that sends it to the general path."""
    line, rest = message.split(b"\r\n", 1)
    return line + b"\r\n" + GENERAL_HEADER + rest


def exchange(server: Service, *pieces: bytes, replies: int = 1) -> bytes:
    """Send each piece in a separate write, and return all replies without their dates and ids."""
    address = urlsplit(server.address)
    with socket.create_connection((address.hostname, address.port), LIMIT_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        data = b""
        while count_replies(data) < replies:
            part = client.recv(1 << 16)
            if not part:
                break
            data += part
    return re.sub(rb"(date|x-request-id): [^\r]*\r\n", b"", data)


def count_replies(data: bytes) -> int:
    """Return the number of complete replies, each with its Content-Length; interim replies do not count."""
    count = 0
    while (end := data.find(b"\r\n\r\n")) >= 0:
        length = re.search(rb"content-length: (\d+)", data[:end])
        size = int(length[1]) if length else 0
        if len(data) < end + 4 + size:
            break
        data, count = data[end + 4 + size :], count + (length is not None)
    return count


def test_replies_are_those_that_were_recorded(local: InProcess) -> None:
    """On both paths, and on the hot path also when it knows the JSON of a binary request."""
    for _ in range(2):
        golden.check(golden.REQUESTS, partial(exchange, local))
    golden.check(golden.REQUESTS, lambda message: exchange(local, through_the_general_path(message)))


def test_replies_to_a_session_are_those_that_were_recorded(local: InProcess) -> None:
    """Most requests of the file fail or succeed because of the state of the session, which is hot-hot."""

    def reply(message: bytes) -> bytes:
        renamed = through_the_general_path(message.replace(b"hot-hot", b"general"))
        return exchange(local, renamed).replace(b"general", b"hot-hot")

    golden.check(golden.SESSION, partial(exchange, local))
    golden.check(golden.SESSION, reply)


def test_reply_does_not_depend_on_where_the_bytes_are_cut(local: InProcess) -> None:
    message = request(b'{"model": "words", "inputs": ["how far is it ?"]}')
    whole = exchange(local, message)
    assert whole.startswith(b"HTTP/1.1 200 OK")
    for cut in range(1, len(message), 7):
        assert exchange(local, message[:cut], message[cut:]) == whole


def test_pipelined_requests_are_answered_in_order(local: InProcess) -> None:
    texts = ["how", "far", "is", "it"]
    bodies = [json.dumps({"model": "words", "inputs": texts[:count]}).encode() for count in (1, 2, 3, 4)]
    hot = [request(body) for body in bodies]
    general = [through_the_general_path(message) for message in hot]
    replies = b"".join(exchange(local, message) for message in hot)
    for order in (hot, general, [general[0], hot[1], general[2], hot[3]], [hot[0], general[1], general[2], hot[3]]):
        stream = b"".join(order)
        assert exchange(local, stream, replies=4) == replies
        assert exchange(local, *[stream[at : at + 97] for at in range(0, len(stream), 97)], replies=4) == replies


INFER = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "message",
    [
        b"GARBAGE\r\n\r\n",
        *(INFER.replace(b"1.1", b"1.0") + line + b"Content-Length: 2\r\n\r\n{}" for line in (b"", b"Connection: close\r\n")),
        INFER + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        *(INFER + b"Content-%b\r\nContent-Length: 2\r\n\r\n{}" % line for line in (b"Encoding: gzip", b"Type: text/plain")),
        INFER + b"Content-Length: 2\r\nContent-Type: application/vnd.x+json\r\n\r\n{}",
        *(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/healthz", b"/infer")),
        *(INFER.replace(b"/infer", path) + b"Content-Length: 2\r\n\r\n{}" for path in (b"/elsewhere", b"/infer?x")),
    ],
)
def test_unusual_request_is_answered_and_the_next_hot_one_too(local: InProcess, message: bytes) -> None:
    """After a reply of the general path without a close, the connection is ready for the hot path."""
    alone = exchange(local, message)
    hot = request(b'{"model": "words", "inputs": ["how far"]}')
    assert re.match(rb"HTTP/1\.[01] [2-5]\d\d ", alone)
    if b"connection: close" not in alone:
        assert exchange(local, message, hot, replies=2) == alone + exchange(local, hot)
        assert exchange(local, message + hot, replies=2) == alone + exchange(local, hot)
    assert exchange(local, hot + message, replies=2) == exchange(local, hot) + alone


def test_expect_100_continue_gets_its_interim_reply(local: InProcess) -> None:
    body = b'{"model": "words", "inputs": ["how far"]}'
    data = exchange(local, request(body, head=HOT + b"Expect: 100-continue\r\n"))
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
