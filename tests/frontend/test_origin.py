"""Request ids and trace headers: well-formed values are kept, all others are ignored."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.frontend.origin import NO_ORIGIN, Header, Origin, RequestIdentity, RequestIds, parse_parent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01".encode()


def parent_of(traceparent: bytes, *states: bytes) -> object:
    headers = [(b"traceparent", traceparent), *((b"tracestate", state) for state in states)]
    return parse_parent(Origin.read(headers))


def state_of(*states: bytes) -> str:
    parent = parse_parent(Origin.read([(b"traceparent", VALID), *((b"tracestate", state) for state in states)]))
    assert parent is not None
    return parent.state


def test_parent_is_read() -> None:
    assert parent_of(VALID) == (TRACE, SPAN, True, "")
    assert parent_of(VALID[:-1] + b"0") == (TRACE, SPAN, False, "")


@pytest.mark.parametrize("flags, sampled", [(b"00", False), (b"01", True), (b"02", False), (b"03", True), (b"ff", True)])
def test_only_the_sampled_flag_counts(flags: bytes, sampled: bool) -> None:
    assert parent_of(VALID[:-2] + flags) == (TRACE, SPAN, sampled, "")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        VALID[:-1],
        VALID + b"0",
        VALID + b"-",
        VALID + b"-00",
        VALID.upper(),
        b"ff" + VALID[2:],
        b"0" + VALID,
        b" " + VALID[1:],
        VALID.replace(TRACE.encode(), b"0" * 32),
        VALID.replace(SPAN.encode(), b"0" * 16),
        VALID.replace(b"-", b"_"),
        VALID.replace(b"a", b"g"),
        b"01-" + VALID[3:] + b"x",
        "٠٠".encode() + VALID[2:],
    ],
)
def test_invalid_traceparent_is_ignored(value: bytes) -> None:
    assert parent_of(value) is None


@pytest.mark.parametrize(
    "value", [b"01" + VALID[2:], b"cc" + VALID[2:], b"01" + VALID[2:] + b"-more-fields", b"fe" + VALID[2:] + b"-"]
)
def test_later_version_is_read_as_far_as_it_is_known(value: bytes) -> None:
    assert parent_of(value) == (TRACE, SPAN, True, "")


def test_repeated_traceparent_is_ignored() -> None:
    assert parse_parent(Origin.read([(b"traceparent", VALID), (b"traceparent", VALID)])) is None


def test_tracestate_without_traceparent_is_ignored() -> None:
    assert Origin.read([(b"tracestate", b"a=1")]) is NO_ORIGIN


def test_tracestates_are_joined_in_their_order() -> None:
    assert state_of(b"a=1, b=2", b"c=3") == "a=1,b=2,c=3"
    assert state_of(b"a=1,,\t, b=2,") == "a=1,b=2"
    assert state_of(b"tenant@vendor=x:y") == "tenant@vendor=x:y"


@pytest.mark.parametrize(
    "value",
    [
        b"a",
        b"A=1",
        b"a=1,a=2",
        b"a=\x00",
        b"a=1\n",
        b"a=x=y",
        b"a=" + b"x" * 257,
        b"=1",
        b"a=\xff",
        b",".join(b"k%d=1" % number for number in range(33)),
        b",".join(b"k%d=%b" % (number, b"x" * 100) for number in range(6)),
    ],
)
def test_invalid_tracestate_is_dropped_alone(value: bytes) -> None:
    assert parent_of(VALID, value) == (TRACE, SPAN, True, "")


def test_baggage_is_ignored() -> None:
    assert Origin.read([(b"baggage", b"user=x")]) is NO_ORIGIN


@pytest.mark.parametrize(
    "id", [b"a", b"x" * 128, b"8bd12a4e-55bd-4be2-a2c3-9f0f0c5b2b39", b"Root=1-67891233-abcdef012345678912345678"]
)
def test_well_formed_request_id_is_kept(id: bytes) -> None:
    assert RequestIdentity(Origin.read([(b"x-request-id", id)]), RequestIds()).headers == [(b"x-request-id", id)]


@pytest.mark.parametrize(
    "id", [b"", b"x" * 129, b"a b", b"a\nb", b'a"b', b"a\\b", b"a\x7f", b"\xff", b"a,b", b"<script>", b"a\x1b[31m"]
)
def test_malformed_request_id_is_replaced(id: bytes) -> None:
    check_made(RequestIdentity(Origin.read([(b"x-request-id", id)]), RequestIds()))


def test_repeated_request_id_is_replaced() -> None:
    check_made(RequestIdentity(Origin.read([(b"x-request-id", b"a"), (b"x-request-id", b"a")]), RequestIds()))


def check_made(identity: RequestIdentity) -> None:
    assert re.fullmatch(rb"[0-9a-f]{32}", identity.request_id)


def test_made_ids_differ() -> None:
    ids = RequestIds()
    assert len({ids.take() for _ in range(1000)}) == 1000


@given(
    st.lists(st.tuples(st.sampled_from((b"x-request-id", b"traceparent", b"tracestate")), st.binary(max_size=80)), max_size=5)
)
def test_any_header_leaves_only_harmless_characters(headers: list[Header]) -> None:
    origin = Origin.read(headers)
    parent = parse_parent(origin)
    identity = RequestIdentity(origin, RequestIds())
    assert re.fullmatch(rb"[!-~]{1,128}", identity.request_id)
    assert parent is None or re.fullmatch(r"[ -~]*", parent.trace + parent.span + parent.state)
