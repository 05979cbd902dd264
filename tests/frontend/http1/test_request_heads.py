"""Which request heads the hot path takes, and that they are parsed once."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.access.keys import create
from service.access.policy import AccessPolicy
from service.access.scopes import Scope
from service.frontend.http1 import request_heads
from service.frontend.http1.request_heads import MAX_HEADS, RequestHead, RequestHeads
from service.settings import Settings

HEAD = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n"
MAX_HEADERS = 100


def heads() -> RequestHeads:
    return RequestHeads(MAX_HEADERS, AccessPolicy(Settings()))


def with_lines(*lines: bytes) -> bytes:
    """Return the head with further lines."""
    return HEAD.replace(b"\r\n\r\n", b"\r\n".join([b"", *lines, b"", b""]))


def find(lines: bytes, known: RequestHeads | None = None) -> RequestHead:
    head = (known or heads()).find(lines)
    assert head is not None
    return head


def test_head_has_its_path_its_body_length_and_the_headers_that_are_read() -> None:
    """An offered upgrade is ignored."""
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAAA")
    head = find(with_lines(b"X-Trace: 7", b"Content-TYPE: x/y", *upgrade))
    assert (head.path, head.length, head.headers) == ("/infer", 12, {b"content-type": b"x/y"})


HOST, LENGTH = b"Host: localhost", b"Content-Length: 12"


@pytest.mark.parametrize(
    "old, new",
    [
        (b"POST", b"GET"),
        *((b"HTTP/1.1", version) for version in (b"HTTP/1.0", b"HTTP/2.0")),
        *((b"/infer", target) for target in (b"/infer?a=1", b"/inf%65r", b"http://a/infer", b"*")),
        *((HOST, host) for host in (b"Host: ", HOST + b"\r\nHost: b", b"Host : a", HOST + b"\r\n folded", HOST + b"\0")),
        *((HOST + b"\r\n", b""), (HOST, b"Host: example.com"), (LENGTH + b"\r\n", b"")),
        *((LENGTH, b"Content-Length: " + length) for length in (b"12, 12", b"+12", b"99999999999")),
        *(
            (LENGTH, b"%b\r\n%b" % (LENGTH, line))
            for line in (LENGTH, b"Transfer-Encoding: chunked", b"Content-Encoding: gzip")
        ),
        *((LENGTH, b"%b\r\n%b" % (LENGTH, line)) for line in (b"Origin: http://localhost", b"Expect: 100-continue")),
        *((LENGTH, line) for line in (b"Transfer-Encoding: chunked", LENGTH + b"\r\nConnection: close")),
        (LENGTH + b"\r\n", b"Content-Length: 0\n\nPOST / HTTP/1.1\r\nHost: localhost\r\n"),
        (LENGTH + b"\r\n", LENGTH + b"\n\nabc\r\n"),
    ],
)
def test_unusual_head_belongs_to_the_general_path(old: bytes, new: bytes) -> None:
    assert heads().find(HEAD) is not None
    assert heads().find(HEAD.replace(old, new)) is None


def test_head_with_many_headers_belongs_to_the_general_path() -> None:
    """Those that identify the request are counted too."""
    lines = [b"X-%d: 1" % number for number in range(MAX_HEADERS)]
    find(with_lines(*lines[: MAX_HEADERS - 2]))
    for more in ([], [b"X-Request-Id: a"]):
        assert heads().find(with_lines(*more, *lines[: MAX_HEADERS - 1 - 2 * len(more)])) is None


def test_head_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = heads()
    first = known.find(HEAD)
    find(with_lines(b"X-Request-Id: a"), known)
    monkeypatch.setattr(request_heads, "_parse", None)
    assert known.find(bytes(bytearray(HEAD))) is first
    known.forget()
    assert not known._known and not known._rests


def test_memory_of_heads_is_bounded() -> None:
    known = heads()
    for number in range(3 * MAX_HEADS):
        find(HEAD.replace(HOST, b"Host: localhost:%d" % number), known)
    assert len(known._known) <= MAX_HEADS
    long = with_lines(b"X: " + b"x" * request_heads.MAX_HEAD_BYTES)
    find(long, known)
    assert long not in known._known


LINES = [
    *(b"X-Request-Id: a-1", b"x-request-id:b-2", b"x-request-id: two words", b"x-request-id: ", b"x-request-id: \xff"),
    *(b"x-request-id : a", b"xx-request-id: a", b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    *(b"TraceParent:\t00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", b"traceparent: \x01"),
    *(b"tracestate: a=1, b=2", b"Tracestate: c=3", b"tracestate: a=1 \t", b"X-Session-Id: a", b"x-session-id:two words \t"),
    *(b"x-session-id: ", b"x-session-id: \xff", b" folded", b"\tfolded", b"Accept: */*", b"Transfer-Encoding: chunked"),
]


@given(st.lists(st.sampled_from(LINES), max_size=5), st.randoms(use_true_random=False))
def test_lines_that_identify_a_request_change_nothing_else(lines: list[bytes], random: Random) -> None:
    """The head has the same meaning whether the lines are cut out or parsed. A second request with this head finds the remembered rest."""
    known = heads()
    parts = HEAD.removesuffix(b"\r\n\r\n").split(b"\r\n")
    for line in lines:
        parts.insert(random.randint(1, len(parts)), line)
    head = b"\r\n".join([*parts, b"", b""])
    whole = known._parse(head, MAX_HEADERS)
    assert known.find(head) == known.find(head) == whole


def test_remembered_rest_keeps_the_identity_and_the_session_of_each_request() -> None:
    known = heads()
    for number in range(3 * MAX_HEADS):
        head = find(with_lines(b"X-Request-Id: id-%d" % number, b"X-Session-Id: pump %d" % number), known)
        assert (head.origin.request_id, head.session) == (b"id-%d" % number, f"pump {number}")
    assert not known._known and len(known._rests) == 1


def test_refused_heads_do_not_replace_remembered_heads(tmp_path: Path) -> None:
    key, other = (create(tmp_path / "keys.toml", name, [name], name) for name in (Scope.INFER, Scope.METRICS))
    known = RequestHeads(MAX_HEADERS, AccessPolicy(Settings(keys=str(tmp_path / "keys.toml"))))

    def with_key(key: str, line: bytes = b"Accept: */*") -> bytes:
        return with_lines(f"Authorization: Bearer {key}".encode(), line)

    first = find(with_key(key), known)
    assert first.refusal is None
    for number in range(3 * MAX_HEADS):
        refusal = find(with_key(f"wrong-{number}", (b"Accept: */*", b"X-Request-Id: a")[number % 2]), known).refusal
        assert refusal is not None and refusal.has_key
    assert find(with_key(key), known) is first
    assert len(known._known) == 1 and not known._rests
    refusal = find(HEAD, known).refusal
    assert refusal is not None and not refusal.has_key and "has no key" in refusal.message
    assert known.find(with_key(other)) is None, "the general path refuses a key without the scope"
    assert known.find(with_key("wrong", b"X-Forwarded-For: 10.0.0.1")) is None, "and clients behind a proxy"
