"""Request ids and trace headers: well-formed values are kept, all others are ignored. Every reply names its request, over every API."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.frontend.oip.protobuf import METHODS
from service.frontend.run.origin import NO_ORIGIN, Header, RequestIdentity, RequestIds, RequestOrigin, parse_parent
from tests.frontend.in_process import InProcess
from tests.serving import eventually

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01".encode()


def parent_of(traceparent: bytes, *states: bytes) -> tuple[str, str, bool, str] | None:
    headers = [(b"traceparent", traceparent), *((b"tracestate", state) for state in states)]
    return parse_parent(RequestOrigin.read(headers))


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
    assert parse_parent(RequestOrigin.read([(b"traceparent", VALID), (b"traceparent", VALID)])) is None
    assert RequestOrigin.read([(b"tracestate", b"a=1"), (b"baggage", b"user=x")]) is NO_ORIGIN


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
    return RequestIdentity(RequestOrigin.read([(b"x-request-id", id) for id in ids]), RequestIds()).request_id


@pytest.mark.parametrize(
    "ids", [[id] for id in (b"", b"x" * 129, b"a b", b"a\nb", b'a"b', b"a\\b", b"a\x7f", b"\xff", b"<a>")] + [[b"a", b"a"]]
)
def test_malformed_or_repeated_request_id_is_replaced(ids: list[bytes]) -> None:
    for id in (b"a", b"x" * 128, b"8bd12a4e-55bd-4be2-a2c3-9f0f0c5b2b39", b"Root=1-67891233-abcdef0123"):
        assert id_of(id) == id, "a well-formed id is kept"
    made = {id_of(*ids) for _ in range(10)}
    assert len(made) == 10 and all(re.fullmatch(rb"[0-9a-f]{32}", id) for id in made)


@given(
    st.lists(st.tuples(st.sampled_from((b"x-request-id", b"traceparent", b"tracestate")), st.binary(max_size=80)), max_size=5)
)
def test_any_header_leaves_only_harmless_characters(headers: list[Header]) -> None:
    origin = RequestOrigin.read(headers)
    parent = parse_parent(origin)
    assert re.fullmatch(rb"[!-~]{1,128}", RequestIdentity(origin, RequestIds()).request_id)
    assert parent is None or re.fullmatch(r"[ -~]*", parent.trace + parent.span + parent.state)


# Replies, errors and unusual paths included. Nothing of a header harms the log.

MADE = re.compile(r"[0-9a-f]{32}")
ROWS = [[0.1, -2.0, 30.0]] * 3
BODY = {"model": "sensors", "inputs": [ROWS]}
SERVICE = "/inference.GRPCInferenceService"
NOBODY = METHODS["ModelInfer"].request_type(model_name="nobody").SerializeToString()
REQUESTS: list[tuple[str, str, Any]] = [
    *(("POST", "/infer", body) for body in (BODY, {**BODY, "model": "nobody"}, {**BODY, "surplus": 1})),
    ("POST", "/v2/models/sensors/infer", {"inputs": []}),
    *(("GET", path, None) for path in ("/v2/models/nobody", "/metrics", "/nowhere", "/stream")),
    *(("DELETE", "/infer", None), ("DELETE", "/sessions/none/state", None)),
]


def lines_of(heads: InProcess, request_id: str) -> list[dict[str, Any]]:
    """Return the log lines of a request. Every line of the log is a JSON object, or this fails."""
    return [line for line in heads.log() if line.get("request_id") == request_id]


@pytest.mark.parametrize("general", [{}, {"te": "trailers"}])
def test_http_reply_names_its_request(heads: InProcess, general: dict[str, str]) -> None:
    for method, path, body in REQUESTS:
        made, given, hostile = (
            heads.client.request(method, path, json=body, headers={**general, **sent})
            for sent in ({}, {"X-Request-Id": "a-b.c:1"}, {"X-Request-Id": 'evil","level":"error'})
        )
        assert MADE.fullmatch(hostile.headers["x-request-id"]) and MADE.fullmatch(made.headers["x-request-id"]), path
        assert given.headers.get_list("x-request-id") == ["a-b.c:1"] and given.status_code == made.status_code
    trace = {"traceparent": f"00-{7:032x}-{'ab' * 8}-01"}
    sent = heads.client.post("/infer", json=BODY, headers=general | trace).headers["x-request-id"]
    [line] = eventually(partial(lines_of, heads, sent))
    assert b"evil" not in heads.log_file.read_bytes()
    assert (line["trace_id"], line["outcome"], line["sequences"], line["tokens"]) == (f"{7:032x}", "ok", 1, 3)


def test_messages_of_a_websocket_have_the_id_of_the_handshake(heads: InProcess) -> None:
    address = heads.address.replace("http", "ws")
    with connect(f"{address}/stream?model=sensors", proxy=None, additional_headers={"x-request-id": "ws-1"}) as stream:
        assert stream.response is not None and stream.response.headers["x-request-id"] == "ws-1"
        for message in ({"input": ROWS}, {"wrong": 1}):
            stream.send(json.dumps(message))
            stream.recv(timeout=30)
    lines = eventually(lambda: len(lines := lines_of(heads, "ws-1")) == 2 and lines)
    assert [line["outcome"] for line in lines] == ["ok", "invalid_input"]
    for path in ("/stream?model=nobody", "/nowhere"):
        with pytest.raises(InvalidStatus) as raised:
            connect(address + path, proxy=None)
        assert MADE.fullmatch(raised.value.response.headers["x-request-id"])


def test_grpc_reply_names_its_call(heads: InProcess) -> None:
    with grpc.insecure_channel(heads.grpc) as channel:
        for method in (f"{SERVICE}/ModelInfer", f"{SERVICE}/ServerLive", f"{SERVICE}/Nothing", "/grpc.health.v1.Health/Check"):
            for sent, expected in (("g-1", re.compile("g-1")), ("a b", MADE)):
                future = channel.unary_unary(method).future(NOBODY, metadata=[("x-request-id", sent)], timeout=60)
                future.exception()
                assert expected.fullmatch(dict(future.trailing_metadata())["x-request-id"]), method
        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
        assert len(list(stream(iter([NOBODY] * 2), metadata=[("x-request-id", "g-3")], timeout=60))) == 2
    lines = eventually(lambda: len(lines := lines_of(heads, "g-3")) == 2 and lines)
    assert [(line["api"], line["outcome"]) for line in lines] == [("grpc_stream", "unknown_model")] * 2
