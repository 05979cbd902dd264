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
from service.frontend import request_heads
from service.frontend.request_heads import RequestHeads
from service.settings import Settings

HEAD = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n"

MAX_HEADERS = 100


def heads() -> RequestHeads:
    return RequestHeads(MAX_HEADERS, AccessPolicy(Settings()))


def test_head_has_its_path_its_body_length_and_the_headers_that_are_read() -> None:
    head = heads().find(HEAD.replace(b"Host: localhost", b"Host: localhost\r\nX-Trace: 7\r\nContent-TYPE: x/y"))
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
        (b"Host: localhost\r\n", b""),
        (b"Host: localhost", b"Host: "),
        (b"Host: localhost", b"Host: localhost\r\nHost: b"),
        (b"Host: localhost", b"Host : a"),
        (b"Host: localhost", b"Host: localhost\r\n folded"),
        (b"Host: localhost", b"Host: localhost\0"),
        (b"Content-Length: 12\r\n", b""),
        (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Length: 12"),
        (b"Content-Length: 12", b"Content-Length: 12, 12"),
        (b"Content-Length: 12", b"Content-Length: +12"),
        (b"Content-Length: 12", b"Content-Length: 99999999999"),
        (b"Content-Length: 12", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nTransfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nContent-Encoding: gzip"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nOrigin: http://localhost"),
        (b"Host: localhost", b"Host: example.com"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nExpect: 100-continue"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nConnection: close"),
        (b"Content-Length: 12\r\n", b"Content-Length: 0\n\nPOST / HTTP/1.1\r\nHost: localhost\r\n"),
        (b"Content-Length: 12\r\n", b"Content-Length: 12\n\nabc\r\n"),
    ],
)
def test_unusual_head_belongs_to_the_general_path(old: bytes, new: bytes) -> None:
    assert heads().find(HEAD) is not None
    assert heads().find(HEAD.replace(old, new)) is None


def test_offered_upgrade_is_ignored() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n"
    head = heads().find(HEAD.replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + upgrade))
    assert head is not None
    assert head.length == 12


def test_head_with_many_headers_belongs_to_the_general_path() -> None:
    for count, hot in ((MAX_HEADERS, True), (MAX_HEADERS + 1, False)):
        more = b"".join(b"X-%d: 1\r\n" % number for number in range(count - 2))
        assert (heads().find(HEAD.replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + more)) is not None) is hot


def test_head_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = heads()
    first = known.find(HEAD)
    monkeypatch.setattr(request_heads, "_parse", None)
    assert known.find(bytes(bytearray(HEAD))) is first


def test_memory_of_heads_is_bounded() -> None:
    known = heads()
    for number in range(3 * request_heads.MAX_HEADS):
        assert known.find(HEAD.replace(b"Host: localhost", b"Host: localhost:%d" % number)) is not None
    assert len(known._known) <= request_heads.MAX_HEADS
    long = HEAD.replace(b"Host: localhost", b"Host: localhost\r\nX: " + b"x" * request_heads.MAX_HEAD_BYTES)
    assert known.find(long) is not None
    assert long not in known._known


LINES = [
    b"X-Request-Id: a-1",
    b"x-request-id:b-2",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"TraceParent:\t00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
    b"tracestate: a=1, b=2",
    b"Tracestate: c=3",
    b"x-request-id: two words",
    b"x-request-id: ",
    b"x-request-id: \xff",
    b"x-request-id : a",
    b"traceparent: \x01",
    b"tracestate: a=1 \t",
    b"X-Session-Id: a",
    b"x-session-id:two words \t",
    b"x-session-id: ",
    b"x-session-id: \xff",
    b"xx-request-id: a",
    b" folded",
    b"\tfolded",
    b"Accept: */*",
    b"Transfer-Encoding: chunked",
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


def test_remembered_rest_keeps_the_identity_of_each_request() -> None:
    known = heads()
    for number in range(3 * request_heads.MAX_HEADS):
        head = known.find(HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: id-%d\r\n\r\n" % number))
        assert head is not None and head.origin.request_id == b"id-%d" % number
    assert not known._known and len(known._rests) == 1


def test_remembered_rest_keeps_the_session_of_each_request() -> None:
    known = heads()
    for number in range(3 * request_heads.MAX_HEADS):
        head = known.find(HEAD.replace(b"\r\n\r\n", b"\r\nX-Session-Id: pump %d\r\n\r\n" % number))
        assert head is not None and head.session == f"pump {number}"
    assert not known._known and len(known._rests) == 1


def test_identifying_headers_count_as_headers() -> None:
    for count in (MAX_HEADERS - 3, MAX_HEADERS - 2, MAX_HEADERS):
        head = HEAD.replace(
            b"\r\n\r\n", b"\r\nX-Request-Id: a\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(count)) + b"\r\n"
        )
        assert heads().find(head) is None


def test_forgotten_heads_are_parsed_again() -> None:
    known = heads()
    known.find(HEAD)
    known.find(HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: a\r\n\r\n"))
    known.forget()
    assert not known._known and not known._rests


def with_key(key: str, *lines: str) -> bytes:
    return HEAD.replace(b"\r\n\r\n", "\r\n".join(["", f"Authorization: Bearer {key}", *lines, "", ""]).encode())


@pytest.mark.parametrize("line", ["Accept: */*", "X-Request-Id: a"])
def test_refused_heads_do_not_replace_remembered_heads(line: str, tmp_path: Path) -> None:
    key = create(tmp_path / "keys.toml", "valid", [Scope.INFER], "valid")
    known = RequestHeads(MAX_HEADERS, AccessPolicy(Settings(keys=str(tmp_path / "keys.toml"))))
    first = known.find(with_key(key, "Accept: */*"))
    assert first is not None and first.refusal is None
    for number in range(3 * request_heads.MAX_HEADS):
        refused = known.find(with_key(f"wrong-{number}", line))
        assert refused is not None and refused.refusal is not None and refused.refusal.has_key
    assert known.find(with_key(key, "Accept: */*")) is first
    assert len(known._known) == 1 and not known._rests


def test_request_without_a_key_is_refused_for_that(tmp_path: Path) -> None:
    create(tmp_path / "keys.toml", "valid", [Scope.INFER], "valid")
    refused = RequestHeads(MAX_HEADERS, AccessPolicy(Settings(keys=str(tmp_path / "keys.toml")))).find(HEAD)
    assert refused is not None and refused.refusal is not None
    assert not refused.refusal.has_key and "has no key" in refused.refusal.message


def test_key_without_the_scope_belongs_to_the_general_path(tmp_path: Path) -> None:
    key = create(tmp_path / "keys.toml", "valid", [Scope.METRICS], "valid")
    known = RequestHeads(MAX_HEADERS, AccessPolicy(Settings(keys=str(tmp_path / "keys.toml"))))
    assert known.find(with_key(key)) is None
