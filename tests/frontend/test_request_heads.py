"""Which request heads the hot path takes, and that they are parsed once."""

from __future__ import annotations

import pytest

from service.frontend import request_heads
from service.frontend.request_heads import RequestHeads

HEAD = b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n"

MAX_HEADERS = 100


def test_head_has_its_path_its_body_length_and_the_headers_that_are_read() -> None:
    head = RequestHeads(MAX_HEADERS).find(HEAD.replace(b"Host: a", b"Host: a\r\nX-Trace: 7\r\nContent-TYPE: x/y"))
    assert head is not None
    assert (head.path, head.length, head.headers) == ("/infer", 12, {b"content-type": b"x/y"})


@pytest.mark.parametrize(
    "old, new",
    [
        (b"POST", b"GET"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1", b"HTTP/2.0"),
        (b"/infer", b"/infer?a=1"),
        (b"/infer", b"/inf%65r"),
        (b"/infer", b"http://a/infer"),
        (b"/infer", b"*"),
        (b"Host: a\r\n", b""),
        (b"Host: a", b"Host: "),
        (b"Host: a", b"Host: a\r\nHost: b"),
        (b"Host: a", b"Host : a"),
        (b"Host: a", b"Host: a\r\n folded"),
        (b"Host: a", b"Host: a\0"),
        (b"Content-Length: 12\r\n", b""),
        (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Length: 12"),
        (b"Content-Length: 12", b"Content-Length: 12, 12"),
        (b"Content-Length: 12", b"Content-Length: +12"),
        (b"Content-Length: 12", b"Content-Length: 99999999999"),
        (b"Content-Length: 12", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nTransfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Encoding: gzip"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nExpect: 100-continue"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nConnection: close"),
        (b"Content-Length: 12\r\n", b"Content-Length: 0\n\nPOST / HTTP/1.1\r\nHost: a\r\n"),
        (b"Content-Length: 12\r\n", b"Content-Length: 12\n\nabc\r\n"),
    ],
)
def test_unusual_head_belongs_to_the_general_path(old: bytes, new: bytes) -> None:
    assert RequestHeads(MAX_HEADERS).find(HEAD) is not None
    assert RequestHeads(MAX_HEADERS).find(HEAD.replace(old, new)) is None


def test_offered_upgrade_is_ignored() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n"
    head = RequestHeads(MAX_HEADERS).find(HEAD.replace(b"Host: a\r\n", b"Host: a\r\n" + upgrade))
    assert head is not None
    assert head.length == 12


def test_head_with_many_headers_belongs_to_the_general_path() -> None:
    for count, hot in ((MAX_HEADERS, True), (MAX_HEADERS + 1, False)):
        more = b"".join(b"X-%d: 1\r\n" % number for number in range(count - 2))
        assert (RequestHeads(MAX_HEADERS).find(HEAD.replace(b"Host: a\r\n", b"Host: a\r\n" + more)) is not None) is hot


def test_head_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = RequestHeads(MAX_HEADERS)
    first = heads.find(HEAD)
    monkeypatch.setattr(request_heads, "_parse", None)
    assert heads.find(bytes(bytearray(HEAD))) is first


def test_memory_of_heads_is_bounded() -> None:
    heads = RequestHeads(MAX_HEADERS)
    for number in range(3 * request_heads.MAX_HEADS):
        assert heads.find(HEAD.replace(b"Host: a", b"Host: a%d" % number)) is not None
    assert len(heads._known) <= request_heads.MAX_HEADS
    long = HEAD.replace(b"Host: a", b"Host: a\r\nX: " + b"x" * request_heads.MAX_HEAD_BYTES)
    assert heads.find(long) is not None
    assert long not in heads._known
