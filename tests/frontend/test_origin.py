"""Request ids and trace headers: well-formed values are kept, all others are ignored."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.frontend.origin import NO_ORIGIN, Header, Origin, RequestIdentity, RequestIds, parse_parent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01".encode()


def parent_of(traceparent: bytes, *states: bytes) -> tuple[str, str, bool, str] | None:
    headers = [(b"traceparent", traceparent), *((b"tracestate", state) for state in states)]
    return parse_parent(Origin.read(headers))


@pytest.mark.parametrize(
    "value, sampled",
    [
        *((VALID[:-2] + flags, sampled) for flags, sampled in ((b"00", False), (b"01", True), (b"02", False), (b"ff", True))),
        *((version + VALID[2:] + more, True) for version, more in ((b"01", b""), (b"cc", b"-more-fields"), (b"fe", b"-"))),
    ],
)
def test_parent_is_read_as_far_as_its_version_is_known(value: bytes, sampled: bool) -> None:
    assert parent_of(value) == (TRACE, SPAN, sampled, "")


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"00", VALID[:-1], VALID + b"0", VALID + b"-", VALID + b"-00", VALID.upper(), b"ff" + VALID[2:], b"0" + VALID),
        *(b" " + VALID[1:], VALID.replace(TRACE.encode(), b"0" * 32), VALID.replace(SPAN.encode(), b"0" * 16)),
        *(VALID.replace(b"-", b"_"), VALID.replace(b"a", b"g"), b"01-" + VALID[3:] + b"x", "٠٠".encode() + VALID[2:]),
    ],
)
def test_invalid_traceparent_is_ignored(value: bytes) -> None:
    assert parent_of(value) is None


def test_headers_alone_or_repeated_are_ignored() -> None:
    assert parse_parent(Origin.read([(b"traceparent", VALID), (b"traceparent", VALID)])) is None
    assert Origin.read([(b"tracestate", b"a=1"), (b"baggage", b"user=x")]) is NO_ORIGIN


@pytest.mark.parametrize(
    ("states", "joined"),
    [
        ([b"a=1, b=2", b"c=3"], "a=1,b=2,c=3"),
        ([b"a=1,,\t, b=2,"], "a=1,b=2"),
        ([b"tenant@vendor=x:y"], "tenant@vendor=x:y"),
        *(([value], "") for value in (b"a", b"A=1", b"a=1,a=2", b"a=\x00", b"a=1\n", b"a=x=y", b"=1", b"a=\xff")),
        ([b"a=" + b"x" * 257], ""),
        ([b",".join(b"k%d=1" % number for number in range(33))], ""),
        ([b",".join(b"k%d=%b" % (number, b"x" * 100) for number in range(6))], ""),
    ],
)
def test_tracestates_are_joined_in_their_order_or_dropped_alone(states: list[bytes], joined: str) -> None:
    assert parent_of(VALID, *states) == (TRACE, SPAN, True, joined)


def id_of(*ids: bytes) -> bytes:
    return RequestIdentity(Origin.read([(b"x-request-id", id) for id in ids]), RequestIds()).request_id


@pytest.mark.parametrize("id", [b"a", b"x" * 128, b"8bd12a4e-55bd-4be2-a2c3-9f0f0c5b2b39", b"Root=1-67891233-abcdef0123"])
def test_well_formed_request_id_is_kept(id: bytes) -> None:
    assert id_of(id) == id


@pytest.mark.parametrize(
    "ids", [[id] for id in (b"", b"x" * 129, b"a b", b"a\nb", b'a"b', b"a\\b", b"a\x7f", b"\xff", b"<a>")] + [[b"a", b"a"]]
)
def test_malformed_or_repeated_request_id_is_replaced(ids: list[bytes]) -> None:
    made = {id_of(*ids) for _ in range(10)}
    assert len(made) == 10 and all(re.fullmatch(rb"[0-9a-f]{32}", id) for id in made)


@given(
    st.lists(st.tuples(st.sampled_from((b"x-request-id", b"traceparent", b"tracestate")), st.binary(max_size=80)), max_size=5)
)
def test_any_header_leaves_only_harmless_characters(headers: list[Header]) -> None:
    origin = Origin.read(headers)
    parent = parse_parent(origin)
    assert re.fullmatch(rb"[!-~]{1,128}", RequestIdentity(origin, RequestIds()).request_id)
    assert parent is None or re.fullmatch(r"[ -~]*", parent.trace + parent.span + parent.state)
