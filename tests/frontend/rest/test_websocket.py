"""The WebSocket /stream over a real socket: chunks, errors, refused handshakes, and how the connection closes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from service.errors import SessionConflict
from service.frontend.rest.websocket import ChunkRunner
from service.ipc.messages.inference import Request
from service.ipc.messages.sessions import EndSession
from service.ipc.session_placement import engine_of_session
from tests.frontend.in_process import EMBEDDING_WIDTH, InProcess, in_process
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


def test_chunks_form_one_sequence_and_are_counted_as_requests(local: InProcess) -> None:
    """In text and binary messages, with the options of the query, and in a session that outlives the socket."""

    def counts() -> list[float]:
        stages = [local.metric("seqserve_stage_seconds_count", model="sensors", stage=stage) for stage in ("parse", "total")]
        ended = [local.metric("seqserve_requests_total", outcome=outcome) for outcome in ("ok", "invalid_request")]
        return [*stages, *ended, local.metric("seqserve_requests_accepted_total")]

    whole = local.infer("sensors", [[ROW] * 6]).json()
    before = counts()
    with open_stream(local, f"{MODEL}&version=1&return=embedding,sequence&priority=3&session=kept") as stream:
        first, second = send(stream, {"input": [ROW] * 2}), send(stream, struct.pack("<12f", *ROW * 4))
        assert send(stream, "{")["code"] == "invalid_request"
    assert [after - count for after, count in zip(counts(), before, strict=True)] == [2, 3, 2, 1, 3]
    assert [reply["session"] for reply in (first, second)] == [{"id": "kept", "steps": steps} for steps in (2, 6)]
    assert (second["model"], second["version"]) == (whole["model"], whole["version"])
    [output] = second["outputs"]
    assert output["scores"] == pytest.approx(whole["outputs"][0]["scores"], rel=1e-5)
    assert (len(output["embedding"]), len(output["sequence"])) == (EMBEDDING_WIDTH, 4)
    assert cast(Request, local.engine.received[-1].message).priority == 3
    with open_stream(local, f"{MODEL}&session=kept") as stream:
        assert send(stream, {"input": [ROW], "end": True})["session"]["steps"] == 7


def test_refused_chunk_leaves_socket_and_session_unchanged(local: InProcess) -> None:
    wrong = ["{", "[]", "{}", {"input": []}, {"input": "text"}, {"input": [ROW], "x": 1}, {"input": [[1, 2]]}, b"1234", b""]
    with open_stream(local) as stream:
        assert "error" in send(stream, {"input": [[1]]}), "the first message can be repeated"
        assert send(stream, {"input": [ROW]})["session"]["steps"] == 1
        for message in (*wrong, {"input": [ROW], "steps": 2**64}):
            refused = send(stream, message)
            assert set(refused) <= {"error", "code", "field"}
            assert refused["code"] in ("invalid_request", "invalid_input")
        assert send(stream, {"input": [ROW]})["session"]["steps"] == 2
        assert send(stream, {"input": [ROW], "end": True})["session"]["steps"] == 3
        assert send(stream, {"input": [ROW], "start": False})["code"] == "unknown_session"


@pytest.mark.parametrize("rows", [1, 60], ids=["small", "more than are sent together"])
def test_messages_sent_ahead_are_answered_in_order(local: InProcess, rows: int) -> None:
    """Each may name the steps after those before it."""
    with open_stream(local) as stream:
        for number in range(100):
            steps = rows * (number - number // 10 - 1)
            stream.send(json.dumps({"input": [ROW] * rows, "steps": steps} if number % 10 else {"inputs": 1}))
        answers = [json.loads(stream.recv(timeout=30)) for _ in range(100)]
    assert ["error" in answer for answer in answers] == [number % 10 == 0 for number in range(100)]
    answered = [answer["session"]["steps"] for answer in answers if "error" not in answer]
    assert answered == [rows * number for number in range(1, 91)]


@pytest.mark.parametrize(
    "path, status, code, field",
    [
        (f"{MODEL}&colour=9", 400, "invalid_input", "colour"),
        (f"{MODEL}&version=9", 404, "unknown_model", "version"),
        *((path, 404, "unknown_route", None) for path in ("/infer", "/stream/x")),
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


@pytest.mark.parametrize(
    ("request_lines", "problem"),
    [
        (b"GET /stream HTTP/1.1\r\n", "missing Sec-WebSocket-Key header"),
        (b"POST /stream HTTP/1.1\r\nContent-Length: 0\r\n", "allows only GET"),
        (b"GET /stream HTTP/1.1\r\nName: " + b"x" * 9000 + b"\r\n", "no more than 8192 bytes"),
    ],
    ids=["no key", "POST", "long header"],
)
def test_malformed_handshake_is_refused_with_an_error_body(local: InProcess, request_lines: bytes, problem: str) -> None:
    with connection(local) as client, client.makefile("rb") as reader:
        client.sendall(request_lines + b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        head, _, body = reader.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4") and b"x-request-id: " in head
    assert problem in json.loads(body)["error"]
    assert "WebSocket" in local.client.get(MODEL).json()["error"], "a GET without an upgrade"


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


def test_chunk_of_a_lost_engine_is_refused_alone(local: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the chunk of another engine leaves in the same tick."""
    names = [next(name for name in map(str, range(99)) if engine_of_session(name, 2) == place) for place in (0, 1)]
    with (
        open_stream(local, f"{MODEL}&session={names[0]}") as kept,
        open_stream(local, f"{MODEL}&session={names[1]}") as lost,
        monkeypatch.context() as patches,
    ):
        assert [send(stream, {"input": [ROW]})["session"]["steps"] for stream in (kept, lost)] == [1, 1]
        patches.setattr(local.frontend.dispatcher, "_engine_count", 2)
        local.call(lambda: list(map(ClientConnection.send, (kept, lost), [struct.pack("<3f", *ROW)] * 2)))
        replies = [json.loads(stream.recv(timeout=30)) for stream in (kept, lost)]
    assert (replies[0].get("session"), replies[1].get("code")) == ({"id": names[0], "steps": 2}, "engine_lost")


@pytest.mark.parametrize("method", ["build", "write"])
def test_internal_error_closes_the_socket_with_1011(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The session may or may not have the chunk. An error of the engine leaves the socket open."""

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    with in_process(models_folder, tmp_path) as service, open_stream(service) as stream:
        service.engine.refusal = SessionConflict("busy")
        assert send(stream, {"input": [ROW]})["code"] == "session_conflict"
        service.engine.refusal = None
        monkeypatch.setattr(ChunkRunner, method, fail)
        reply = send(stream, {"input": [ROW]})
        assert reply["code"] == "inference_failed" and "ZeroDivisionError" not in reply["error"]
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=30)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert closed.value.rcvd.reason, "a close frame with 1011 and no reason echoes that of the client"
