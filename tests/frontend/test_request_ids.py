"""Every reply names its request, over every API, errors and unusual paths included, and nothing of a header harms the log."""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.frontend.oip.protobuf import METHODS
from tests.frontend.in_process import InProcess
from tests.serving import LIMIT_SECONDS, eventually

MADE = re.compile(r"[0-9a-f]{32}")
ROWS = [[0.1, -2.0, 30.0]] * 3
BODY = {"model": "sensors", "inputs": [ROWS]}
GENERAL = {"te": "trailers"}
SERVICE = "/inference.GRPCInferenceService"
HOSTILE = [
    b'evil"id',
    b"evil\\id",
    b"evil\x1b[31mid",
    b"evil\xffid",
    b"evil" * 100,
    b"evil id",
    b"{evil}",
    b'evil","level":"error',
]


def lines_of(heads: InProcess, request_id: str) -> list[dict[str, Any]]:
    """Return the log lines of a request. Every line of the log is a JSON object, or this fails."""
    return [line for line in heads.log() if line.get("request_id") == request_id]


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/infer", BODY),
    ("POST", "/infer", {**BODY, "model": "nobody"}),
    ("POST", "/infer", {**BODY, "surplus": 1}),
    (
        "POST",
        "/v2/models/sensors/infer",
        {"inputs": [{"name": "inputs", "datatype": "FP32", "shape": [1, 3, 3], "data": ROWS}]},
    ),
    ("POST", "/v2/models/sensors/infer", {"inputs": []}),
    ("GET", "/v2/models/nobody", None),
    ("GET", "/models", None),
    ("GET", "/metrics", None),
    ("GET", "/healthz", None),
    ("GET", "/nowhere", None),
    ("DELETE", "/infer", None),
    ("GET", "/stream", None),
    ("DELETE", "/sessions/none/state", None),
    ("POST", "/debug/trace", None),
]


@pytest.mark.parametrize("general", [{}, GENERAL])
def test_http_reply_names_its_request(heads: InProcess, general: dict[str, str]) -> None:
    for method, path, body in REQUESTS:
        made = heads.client.request(method, path, json=body, headers=general)
        given = heads.client.request(method, path, json=body, headers={"X-Request-Id": "a-b.c:1", **general})
        assert MADE.fullmatch(made.headers["x-request-id"]), path
        assert given.headers.get_list("x-request-id") == ["a-b.c:1"]
        assert given.status_code == made.status_code


@pytest.mark.parametrize("general", [b"", b"TE: trailers\r\n"])
@pytest.mark.parametrize("id", HOSTILE)
def test_malformed_id_is_replaced_and_not_logged(heads: InProcess, id: bytes, general: bytes) -> None:
    body = json.dumps(BODY).encode()
    ids = b"X-Request-Id: %b\r\nTraceparent: %b\r\nTracestate: %b\r\n" % (id, id, id)
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n%b%bContent-Length: %d\r\n\r\n" % (general, ids, len(body))
    reply = exchange(heads, head + body)
    [made] = re.findall(rb"x-request-id: ([^\r]*)\r\n", reply)
    assert MADE.fullmatch(made.decode()) and b"evil" not in reply
    if reply.startswith(b"HTTP/1.1 200"):  # the parser refuses some of these headers itself
        eventually(lambda: lines_of(heads, made.decode()))
    assert b"evil" not in heads.log_file.read_bytes()


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nX-Request-Id: mine\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 10_000 + b"\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\nX-Request-Id: b\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_refused_bytes_get_an_id(heads: InProcess, request_: bytes) -> None:
    [id] = re.findall(rb"\r\nx-request-id: ([^\r]*)\r\n", exchange(heads, request_))
    assert MADE.fullmatch(id.decode())


def exchange(heads: InProcess, data: bytes) -> bytes:
    """Send bytes and return the first reply."""
    address = urlsplit(heads.address)
    with socket.create_connection((address.hostname, address.port), LIMIT_SECONDS) as client:
        client.sendall(data)
        received = b""
        while b"\r\n\r\n" not in received and (part := client.recv(1 << 16)):
            received += part
    return received


def test_ids_and_traces_of_a_kept_connection_differ(heads: InProcess) -> None:
    """The heads of these requests differ only in the headers that identify them: the rest of a head is remembered."""
    for number in range(5):
        trace = f"{number + 1:032x}"
        sent = {"x-request-id": f"kept-{number}", "traceparent": f"00-{trace}-{'ab' * 8}-01"}
        assert heads.client.post("/infer", json=BODY, headers=sent).headers["x-request-id"] == f"kept-{number}"
        [line] = eventually(partial(lines_of, heads, f"kept-{number}"))
        assert line["trace_id"] == trace
    plain = heads.client.post("/infer", json=BODY).headers["x-request-id"]
    [line] = eventually(lambda: lines_of(heads, plain))
    assert "trace_id" not in line


def test_pipelined_requests_keep_their_ids(heads: InProcess) -> None:
    body = json.dumps(BODY).encode()
    one = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: pipe-%d\r\nContent-Length: %d\r\n\r\n%b"
    address = urlsplit(heads.address)
    with socket.create_connection((address.hostname, address.port), LIMIT_SECONDS) as client:
        client.sendall(b"".join(one % (number, len(body), body) for number in range(4)))
        received = b""
        while received.count(b'"outputs"') < 4:
            received += client.recv(1 << 16)
    assert re.findall(rb"x-request-id: (\S+)", received) == [b"pipe-0", b"pipe-1", b"pipe-2", b"pipe-3"]


def test_log_line_names_the_outcome(heads: InProcess) -> None:
    heads.client.post("/infer", json=BODY, headers={"x-request-id": "good"})
    heads.client.post("/infer", json={**BODY, "model": "nobody"}, headers={"x-request-id": "bad"})
    [good], [bad] = eventually(lambda: lines_of(heads, "good")), eventually(lambda: lines_of(heads, "bad"))
    assert (good["outcome"], good["status"], good["model"], good["sequences"], good["tokens"]) == ("ok", "200", "sensors", 1, 3)
    assert {"parse", "reply", "encode", "total"} <= good["ms"].keys()
    assert (bad["outcome"], bad["status"], bad["model"]) == ("unknown_model", "404", "unknown")


def test_websocket_handshake_returns_an_id_and_its_messages_have_it(heads: InProcess) -> None:
    address = heads.address.replace("http", "ws")
    with connect(f"{address}/stream?model=sensors", proxy=None, additional_headers={"x-request-id": "ws-1"}) as stream:
        assert stream.response is not None and stream.response.headers["x-request-id"] == "ws-1"
        for message in ({"input": ROWS}, {"input": ROWS}, {"wrong": 1}):
            stream.send(json.dumps(message))
            stream.recv(timeout=30)
    lines = eventually(lambda: len(lines := lines_of(heads, "ws-1")) == 3 and lines)
    assert [line["outcome"] for line in lines] == ["ok", "ok", "invalid_input"]
    for path in ("/stream?model=nobody", "/nowhere"):
        with pytest.raises(InvalidStatus) as raised:
            connect(address + path, proxy=None)
        assert MADE.fullmatch(raised.value.response.headers["x-request-id"])


GRPC_CALLS = [
    (f"{SERVICE}/ModelInfer", METHODS["ModelInfer"].request_type(model_name="nobody").SerializeToString()),
    (f"{SERVICE}/ModelInfer", b"\xff\xff"),
    (f"{SERVICE}/ServerLive", b""),
    (f"{SERVICE}/ModelMetadata", METHODS["ModelMetadata"].request_type(name="nobody").SerializeToString()),
    (f"{SERVICE}/Nothing", b""),
    ("/other.Service/Method", b""),
    ("/grpc.health.v1.Health/Check", b""),
]


def test_grpc_reply_names_its_call(heads: InProcess) -> None:
    with grpc.insecure_channel(heads.grpc) as channel:
        for method, message in GRPC_CALLS:
            for sent, expected in ((None, MADE), ("g-1", re.compile("g-1")), ("a b", MADE)):
                metadata = None if sent is None else [("x-request-id", sent)]
                future = channel.unary_unary(method).future(message, metadata=metadata, timeout=60)
                future.exception()
                assert expected.fullmatch(dict(future.trailing_metadata())["x-request-id"]), method


def test_grpc_call_is_logged_with_its_id(heads: InProcess) -> None:
    request = METHODS["ModelInfer"].request_type(model_name="sensors")
    request.inputs.add(name="inputs", datatype="FP32", shape=[1, 1, 3]).contents.fp32_contents.extend([0.5] * 3)
    with grpc.insecure_channel(heads.grpc) as channel:
        channel.unary_unary(f"{SERVICE}/ModelInfer")(
            request.SerializeToString(), metadata=[("x-request-id", "g-2")], timeout=60
        )
    [line] = eventually(lambda: lines_of(heads, "g-2"))
    assert (line["api"], line["status"], line["model"]) == ("grpc", "OK", "sensors")


def test_grpc_stream_has_one_id(heads: InProcess) -> None:
    request = METHODS["ModelInfer"].request_type(model_name="nobody").SerializeToString()
    with grpc.insecure_channel(heads.grpc) as channel:
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(
            iter([request] * 2), metadata=[("x-request-id", "g-3")], timeout=60
        )
        assert len(list(call)) == 2
        assert dict(call.trailing_metadata())["x-request-id"] == "g-3"
    lines = eventually(lambda: len(lines := lines_of(heads, "g-3")) == 2 and lines)
    assert {line["outcome"] for line in lines} == {"unknown_model"}
