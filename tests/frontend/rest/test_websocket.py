"""The WebSocket door over a real socket: what is refused, and what the connection itself does."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.serving import Server, check_unharmed, eventually, serving

ROW = [0.1, -2.0, 30.0]
MODEL = "/stream?model=sensors"


def opened(server: Server, path: str = MODEL) -> ClientConnection:
    return connect(server.address.replace("http", "ws") + path, proxy=None, max_size=None)


def tell(stream: ClientConnection, message: Any) -> Any:
    """A message, and its answer."""
    stream.send(message if isinstance(message, bytes | str) else json.dumps(message))
    return json.loads(stream.recv(timeout=30))


@pytest.fixture(scope="module")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own, on which no other test has left a session."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    yield
    check_unharmed(server)


def test_chunks_are_answered_as_one_sequence_and_the_steps_are_counted(server: Server) -> None:
    whole = server.infer("sensors", [[ROW] * 6]).json()
    with opened(server) as stream:
        first, second = tell(stream, {"input": [ROW] * 2}), tell(stream, {"input": [ROW] * 4})
    assert (first["session"]["steps"], second["session"]["steps"]) == (2, 6)
    assert first["session"]["id"] == second["session"]["id"]
    assert {name: second[name] for name in ("model", "version")} == {name: whole[name] for name in ("model", "version")}
    assert second["outputs"][0]["scores"] == pytest.approx(whole["outputs"][0]["scores"], rel=1e-5)


def test_bytes_are_answered_as_text_is(server: Server) -> None:
    with opened(server) as text, opened(server) as raw:
        for rows in ([ROW], [ROW, [0.0, 1.0, 2.0]]):
            said = tell(text, {"input": rows})
            values = [value for row in rows for value in row]
            assert tell(raw, struct.pack(f"<{len(values)}f", *values))["outputs"] == said["outputs"]


def test_what_the_query_asks_for_comes_with_every_answer(server: Server) -> None:
    with opened(server, f"{MODEL}&version=1&return=embedding,sequence&priority=3&deadline_ms=20000") as stream:
        for steps in (3, 1):
            [output] = tell(stream, {"input": [ROW] * steps})["outputs"]
            assert len(output["embedding"]) == 8
            assert len(output["sequence"]) == steps
            assert output["sequence"][-1] == output["embedding"]


def test_an_error_leaves_the_socket_and_the_session_as_they_were(server: Server) -> None:
    wrong = ["{", "[]", "{}", {"input": []}, {"input": "text"}, {"input": [ROW], "x": 1}, {"input": [[1, 2]]}, b"1234", b""]
    with opened(server) as stream:
        assert tell(stream, {"input": [ROW]})["session"]["steps"] == 1
        for message in wrong:
            refused = tell(stream, message)
            assert set(refused) <= {"error", "code", "field"}
            assert refused["code"] in ("invalid_request", "invalid_input")
        assert tell(stream, {"input": [ROW]})["session"]["steps"] == 2


def test_a_first_message_that_is_refused_may_be_sent_again(server: Server) -> None:
    with opened(server) as stream:
        assert "error" in tell(stream, {"input": [[1]]})
        assert tell(stream, {"input": [ROW]})["session"]["steps"] == 1


def test_end_and_start_begin_the_session_anew(server: Server) -> None:
    messages: list[dict[str, Any]] = [{}, {"end": True}, {}, {"start": True}, {}, {"start": False, "end": True}]
    with opened(server) as stream:
        for message in messages:
            stream.send(json.dumps({"input": [ROW], **message}))
        assert [json.loads(stream.recv(timeout=30))["session"]["steps"] for _ in messages] == [1, 2, 1, 1, 2, 3]
        assert server.metric("seqserve_sessions") == 0
        assert tell(stream, {"input": [ROW], "start": False})["code"] == "unknown_session"


def test_messages_may_be_sent_ahead_and_are_answered_in_their_order(server: Server) -> None:
    with opened(server) as stream:
        for number in range(200):
            stream.send(json.dumps({"input": [ROW]} if number % 10 else {"inputs": 1}))
        answers = [json.loads(stream.recv(timeout=30)) for _ in range(200)]
    assert ["error" in answer for answer in answers] == [number % 10 == 0 for number in range(200)]
    assert [answer["session"]["steps"] for answer in answers if "error" not in answer] == list(range(1, 181))


def test_a_model_that_needs_the_whole_sequence_says_so(server: Server) -> None:
    with opened(server, "/stream?model=words") as stream:
        refused = tell(stream, {"input": "who"})
    assert (refused["code"], "has no sessions" in refused["error"]) == ("invalid_input", True)


def test_every_chunk_is_counted_like_a_request(server: Server) -> None:
    def counts() -> dict[str, float]:
        stages = {
            stage: server.metric("seqserve_stage_seconds_count", model="sensors", stage=stage)
            for stage in ("parse", "encode", "total")
        }
        outcomes = {
            outcome: server.metric("seqserve_requests_total", model="sensors", outcome=outcome)
            for outcome in ("ok", "invalid_request")
        }
        return stages | outcomes | {"accepted": server.metric("seqserve_requests_accepted_total")}

    before = counts()
    with opened(server) as stream:
        tell(stream, {"input": [ROW]})
        tell(stream, "{")
    after = counts()
    assert {name: after[name] - before[name] for name in after} == {
        "parse": 1,
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
def test_what_is_not_served_is_refused_at_the_handshake(
    server: Server, path: str, status: int, code: str, field: str | None
) -> None:
    with pytest.raises(InvalidStatus) as raised:
        opened(server, path)
    answer = raised.value.response
    body = json.loads(answer.body or b"")
    assert (answer.status_code, body["code"], body.get("field")) == (status, code, field)


def test_without_an_upgrade_the_path_says_what_it_is(server: Server) -> None:
    answer = server.client.get(MODEL)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert "WebSocket" in answer.json()["error"]


def test_a_message_that_is_too_large_closes_the_socket_and_says_why(server: Server) -> None:
    with opened(server) as stream:
        with pytest.raises(ConnectionClosed) as raised:
            tell(stream, b"x" * (17 << 20))
        assert raised.value.rcvd is not None and raised.value.rcvd.code == 1009


def test_a_caller_who_hangs_up_has_his_chunks_cancelled_and_his_session_ended(server: Server) -> None:
    gone = server.metric("seqserve_requests_total", outcome="client_gone")
    with opened(server) as stream:
        tell(stream, {"input": [ROW]})
        for _ in range(5):
            stream.send(struct.pack("<3f", *ROW) * 60_000)
        eventually(lambda: server.metric("seqserve_requests_in_flight") == 5, 10)
        stream.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: server.metric("seqserve_sessions") == 0, 2)
    assert server.metric("seqserve_requests_total", outcome="client_gone") == gone + 5
    assert server.metric("seqserve_sessions_ended_total", reason="deleted") >= 1


def test_a_session_with_a_name_outlives_the_socket(server: Server) -> None:
    for steps in (1, 2):
        with opened(server, f"{MODEL}&session=mine") as stream:
            assert tell(stream, {"input": [ROW]})["session"] == {"id": "mine", "steps": steps}
    assert server.infer("sensors", [[ROW]], session="mine", end=True).json()["session"] == {"id": "mine", "steps": 3}


@pytest.mark.parametrize(
    "request_lines",
    [
        b"GET /stream HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"POST /stream HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n",
        b"GET /stream HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        + b"".join(b"Name-%d: value\r\n" % number for number in range(300))
        + b"\r\n",
    ],
    ids=["no key", "POST", "headers"],
)
def test_what_asks_for_an_upgrade_and_is_no_handshake_does_not_keep_its_connection(
    server: Server, request_lines: bytes
) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(request_lines)
        answer = connection.recv(1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(
        st.binary(max_size=48)
        | st.text(max_size=20)
        | st.dictionaries(
            st.sampled_from(["input", "start", "end", "x"]),
            st.none() | st.booleans() | st.integers() | st.just([ROW]) | st.just([[1]]) | st.text(max_size=5),
            max_size=4,
        ).map(json.dumps),
        max_size=8,
    )
)
def test_whatever_is_sent_gets_one_answer_each(server: Server, messages: list[bytes | str]) -> None:
    with opened(server) as stream:
        for message in messages:
            stream.send(message)
        for _ in messages:
            answer = json.loads(stream.recv(timeout=30))
            assert answer.get("code", "ok") in ("ok", "invalid_request", "invalid_input", "unknown_session"), answer
