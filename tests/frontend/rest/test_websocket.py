"""The WebSocket /stream over a real socket: chunks, errors, refused handshakes, and how the connection closes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from service.ipc.messages import EndSession, Request
from tests.frontend.in_process import EMBEDDING_WIDTH, InProcess
from tests.raw_websocket import connection
from tests.serving import check_unharmed, eventually

ROW = [0.1, -2.0, 30.0]
MODEL = "/stream?model=sensors"


def open_stream(local: InProcess, path: str = MODEL) -> ClientConnection:
    return connect(local.address.replace("http", "ws") + path, proxy=None, max_size=None)


def send(stream: ClientConnection, message: Any) -> Any:
    """Send a message and return the reply."""
    stream.send(message if isinstance(message, bytes | str) else json.dumps(message))
    return json.loads(stream.recv(timeout=30))


@pytest.fixture(autouse=True)
def unharmed(local: InProcess) -> Iterator[None]:
    yield
    check_unharmed(local)


def test_chunks_form_one_sequence_and_count_its_steps(local: InProcess) -> None:
    whole = local.infer("sensors", [[ROW] * 6]).json()
    with open_stream(local) as stream:
        first, second = send(stream, {"input": [ROW] * 2}), send(stream, {"input": [ROW] * 4})
    assert (first["session"]["steps"], second["session"]["steps"]) == (2, 6)
    assert first["session"]["id"] == second["session"]["id"]
    assert {name: second[name] for name in ("model", "version")} == {name: whole[name] for name in ("model", "version")}
    assert second["outputs"][0]["scores"] == pytest.approx(whole["outputs"][0]["scores"], rel=1e-5)


def test_query_options_apply_to_every_chunk(local: InProcess) -> None:
    with open_stream(local, f"{MODEL}&version=1&return=embedding,sequence&priority=3&deadline_ms=20000") as stream:
        for steps in (3, 1):
            [output] = send(stream, {"input": [ROW] * steps})["outputs"]
            assert (len(output["embedding"]), len(output["sequence"])) == (EMBEDDING_WIDTH, steps)
    assert cast(Request, local.engine.received[-1].message).priority == 3


def test_refused_chunk_leaves_socket_and_session_unchanged(local: InProcess) -> None:
    wrong = ["{", "[]", "{}", {"input": []}, {"input": "text"}, {"input": [ROW], "x": 1}, {"input": [[1, 2]]}, b"1234", b""]
    wrong.append({"input": [ROW], "steps": 2**64})
    with open_stream(local) as stream:
        assert "error" in send(stream, {"input": [[1]]}), "the first message can be repeated"
        assert send(stream, {"input": [ROW]})["session"]["steps"] == 1
        for message in wrong:
            refused = send(stream, message)
            assert set(refused) <= {"error", "code", "field"}
            assert refused["code"] in ("invalid_request", "invalid_input")
        assert send(stream, {"input": [ROW]})["session"]["steps"] == 2


def test_messages_sent_ahead_are_answered_in_order(local: InProcess) -> None:
    with open_stream(local) as stream:
        for number in range(200):
            stream.send(json.dumps({"input": [ROW]} if number % 10 else {"inputs": 1}))
        answers = [json.loads(stream.recv(timeout=30)) for _ in range(200)]
    assert ["error" in answer for answer in answers] == [number % 10 == 0 for number in range(200)]
    assert [answer["session"]["steps"] for answer in answers if "error" not in answer] == list(range(1, 181))


def test_every_chunk_is_counted_as_a_request(local: InProcess) -> None:
    def counts() -> dict[str, float]:
        stages = {
            stage: local.metric("seqserve_stage_seconds_count", model="sensors", stage=stage)
            for stage in ("parse", "reply", "encode", "total")
        }
        outcomes = {
            outcome: local.metric("seqserve_requests_total", model="sensors", outcome=outcome)
            for outcome in ("ok", "invalid_request")
        }
        return stages | outcomes | {"accepted": local.metric("seqserve_requests_accepted_total")}

    before = counts()
    with open_stream(local) as stream:
        send(stream, {"input": [ROW]})
        send(stream, "{")
    after = counts()
    assert {name: after[name] - before[name] for name in after} == {
        "parse": 1,
        "reply": 1,
        "encode": 1,
        "total": 2,
        "ok": 1,
        "invalid_request": 1,
        "accepted": 2,
    }


@pytest.mark.parametrize(
    "path, status, code, field",
    [
        ("/stream", 400, "invalid_input", "model"),
        ("/stream?model=nobody", 404, "unknown_model", "model"),
        ("/stream?model=sensors&version=9", 404, "unknown_model", "version"),
        ("/stream?model=sensors&colour=red", 400, "invalid_input", "colour"),
        ("/stream?model=sensors&session=%20a", 400, "invalid_input", "session"),
        ("/stream?model=sensors&deadline_ms=1e9", 400, "invalid_input", "deadline_ms"),
        ("/stream?model=words&return=embedding,all", 400, "invalid_input", "return"),
        ("/infer", 404, "unknown_route", None),
        ("/stream/x", 404, "unknown_route", None),
    ],
)
def test_invalid_handshake_is_refused_with_an_error_body(
    local: InProcess, path: str, status: int, code: str, field: str | None
) -> None:
    with pytest.raises(InvalidStatus) as raised:
        open_stream(local, path)
    answer = raised.value.response
    body = json.loads(answer.body or b"")
    assert (answer.status_code, body["code"], body.get("field")) == (status, code, field)


def test_disconnect_cancels_chunks_and_closes_the_session(local: InProcess) -> None:
    gone = local.metric("seqserve_requests_total", outcome="client_gone")
    with open_stream(local) as stream, local.held() as engine:
        cancelled = engine.cancelled
        stream.send(json.dumps({"input": [ROW]}))
        eventually(lambda: engine.waiting)
        stream.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: engine.cancelled == cancelled + 1)
        eventually(lambda: isinstance(engine.last_call, EndSession))
    assert local.metric("seqserve_requests_total", outcome="client_gone") == gone + 1


def test_named_session_outlives_the_socket(local: InProcess) -> None:
    for steps in (1, 2):
        with open_stream(local, f"{MODEL}&session=kept") as stream:
            assert send(stream, {"input": [ROW]})["session"] == {"id": "kept", "steps": steps}
    assert local.infer("sensors", [[ROW]], session="kept", end=True).json()["session"] == {"id": "kept", "steps": 3}


@pytest.mark.parametrize(
    ("request_lines", "problem"),
    [
        (b"GET /stream HTTP/1.1\r\n", "missing Sec-WebSocket-Key header"),
        (b"GET /stream HTTP/1.1\r\nSec-WebSocket-Key: short\r\n", "invalid Sec-WebSocket-Key header"),
        (b"GET /stream HTTP/1.1\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", "missing Sec-WebSocket-Version header"),
        (b"POST /stream HTTP/1.1\r\nContent-Length: 0\r\n", "allows only GET"),
        (b"GET /stream HTTP/1.1\r\nName: " + b"x" * 9000 + b"\r\n", "no more than 8192 bytes"),
    ],
    ids=["no key", "key", "no version", "POST", "long header"],
)
def test_malformed_handshake_is_refused_with_an_error_body(local: InProcess, request_lines: bytes, problem: str) -> None:
    with connection(local) as client, client.makefile("rb") as reader:
        client.sendall(request_lines + b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        head, _, body = reader.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4") and b"x-request-id: " in head
    assert problem in json.loads(body)["error"]
