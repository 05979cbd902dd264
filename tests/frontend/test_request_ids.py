"""Every reply names its request, over every API, errors and unusual paths included, and nothing of a header harms the log."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import grpc
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.frontend.oip.protobuf import METHODS
from tests.frontend.in_process import InProcess
from tests.serving import eventually

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
