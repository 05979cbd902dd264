"""Sessions on a real server with two frontends and two engines. tests/engine/batching/test_sessions.py has the rules of an engine."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from loadtest import oip_requests
from service.ipc.session_placement import engine_of_session
from tests import models
from tests.planted import Gate
from tests.serving import Server, eventually, nearly_equal, serving

ROW = [0.1, -0.2, 0.3]
IDS = [1, 5, 11, 0, 3, 3, 7, 2, 9]


@pytest.fixture(scope="module")
def shared(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each engine has two state slots, fewer than there are sessions."""
    root = tmp_path_factory.mktemp("models")
    models.sensors(root)
    models.speller(root)
    flags = ("--device", "cpu,cpu", "--frontends", "2")
    settings = {"state_slots": "2", "lame_duck_seconds": "0.2", "default_deadline_ms": "600000", "max_deadline_ms": "600000"}
    closed = "import os, runpy; os.close(0); runpy.run_module('service', run_name='__main__')"  # as with <&-
    with serving(root, tmp_path_factory.mktemp("log"), *flags, program=("-c", closed), **settings) as running:
        yield running


def ask(server: Server, model: str, chunk: Any, session: str, **options: Any) -> httpx.Response:
    """Send one chunk over a new connection."""
    body = {"model": model, "inputs": [chunk], "session": session, **options}
    return httpx.post(f"{server.address}/infer", json=body, timeout=60, trust_env=False)


def steps(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    counted: int = answer.json()["session"]["steps"]
    return counted


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def state(server: Server, session: str) -> bytes:
    answer = server.client.get(f"/sessions/{session}/state")
    assert answer.status_code == 200, answer.text
    return answer.content


def put(server: Server, session: str, content: bytes, media: str | None = None) -> httpx.Response:
    headers = {} if media is None else {"content-type": media}
    return server.client.put(f"/sessions/{session}/state", content=content, headers=headers)


def delete(server: Server, session: str) -> httpx.Response:
    return server.client.delete(f"/sessions/{session}/state")


def streamed(server: Server, query: str) -> ClientConnection:
    return connect(f"{server.address.replace('http', 'ws')}/stream?{query}", proxy=None)


def tell(stream: ClientConnection, **message: Any) -> Any:
    """Send a message and return the reply."""
    stream.send(json.dumps(message))
    return json.loads(stream.recv(timeout=60))


def names_at(place: int, count: int, prefix: str) -> list[str]:
    """Return names of sessions that belong to one of two engines."""
    found = [name for name in (f"{prefix}-{number}" for number in range(100)) if engine_of_session(name, 2) == place]
    return found[:count]


def test_chunks_over_http_and_grpc_run_in_sequence(shared: Server) -> None:
    """Each chunk gets a number of steps, over every API."""
    method = oip_requests.METHOD
    message = method.request_type(model_name="speller", raw_input_contents=[struct.pack("<i", 1)])
    message.inputs.add(name="ids", datatype="INT32", shape=[1])
    message.parameters["sequence_id"].string_param = "both"

    def over_grpc() -> int:
        with grpc.insecure_channel(shared.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            reply = method.response_type.FromString(channel.unary_unary(oip_requests.PATH)(message.SerializeToString()))
        return int(reply.parameters["sequence_steps"].int64_param)

    def over_http() -> int:
        return steps(ask(shared, "speller", [1], "both"))

    assert over_http() == 1, "over HTTP, the first chunk starts the session"
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(over_grpc if number % 2 else over_http) for number in range(1, 64)]
    assert sorted(answer.result() for answer in answers) == list(range(2, 65))
    assert delete(shared, "both").json() == {"session": "both"}


def test_empty_chunk_ends_a_session_over_each_api(shared: Server) -> None:
    """The reply has the steps, and no outputs. Without an end it is refused, and so is one that starts a session."""
    method, parameters = oip_requests.METHOD, {"sequence_id": "ended", "sequence_end": True}
    shapes = {"ids": [1, 1], "lengths": [1, 1]}
    tensors = [{"name": name, "datatype": "INT32", "shape": shape, "data": [0]} for name, shape in shapes.items()]
    message = method.request_type(model_name="speller", raw_input_contents=[bytes(4)] * 2)
    message.parameters["sequence_id"].string_param, message.parameters["sequence_end"].bool_param = "ended", True
    for name, shape in shapes.items():
        message.inputs.add(name=name, datatype="INT32", shape=shape)

    def over_oip() -> tuple[Any, int]:
        reply = shared.client.post("/v2/models/speller/infer", json={"inputs": tensors, "parameters": parameters}).json()
        return reply["outputs"], reply["parameters"]["sequence_steps"]

    def over_grpc() -> tuple[Any, int]:
        with grpc.insecure_channel(shared.grpc) as channel:
            reply = method.response_type.FromString(channel.unary_unary(oip_requests.PATH)(message.SerializeToString()))
        return [*reply.outputs], reply.parameters["sequence_steps"].int64_param

    def over_http() -> tuple[Any, int]:
        answer = ask(shared, "speller", [], "ended", end=True)
        return answer.json()["outputs"], steps(answer)

    def over_a_socket() -> tuple[Any, int]:
        with streamed(shared, "model=speller&session=ended") as stream:
            reply = tell(stream, input=[], end=True)
        return reply["outputs"], reply["session"]["steps"]

    for end in (over_oip, over_grpc, over_http, over_a_socket):
        assert steps(ask(shared, "speller", [1, 2], "ended")) == 2
        assert end() == ([], 2)
        assert code(delete(shared, "ended")) == (404, "unknown_session")
        assert code(ask(shared, "speller", [], "ended", end=True)) == (404, "unknown_session")
    for options in ({}, {"start": True, "end": True}):
        assert code(ask(shared, "speller", [], "ended", **options)) == (400, "invalid_input")


def test_state_continues_in_another_engine_bit_for_bit(shared: Server) -> None:
    """Exported and imported, or as a fork."""
    [here], [there], [fork] = names_at(0, 1, "moving"), names_at(1, 1, "moved/there"), names_at(1, 1, "copy")
    assert steps(ask(shared, "speller", IDS[:5], here)) == 5
    assert put(shared, there, state(shared, here), "application/octet-stream").json() == {"session": there}
    assert shared.client.post(f"/sessions/{here}/fork", json={"session": fork}).json() == {"session": fork}
    answers = [ask(shared, "speller", IDS[5:], name, end=True) for name in (here, there, fork)]
    assert {steps(answer) for answer in answers} == {len(IDS)}
    one, *others = (answer.json()["outputs"] for answer in answers)
    assert others == [one] * 2 and nearly_equal(one, shared.infer("speller", [IDS]).json()["outputs"])


def test_errors_of_sessions_have_their_codes_and_change_nothing(shared: Server) -> None:
    def fork(name: str, copy: Any) -> httpx.Response:
        return shared.client.post(f"/sessions/{name}/fork", json={"session": copy})

    assert [steps(ask(shared, "speller", [1, 2], "one")) for _ in range(2)] == [2, 4]
    counted, good = ask(shared, "speller", [1], "one", steps=3), state(shared, "one")
    assert (*code(counted), counted.json()["field"], counted.json()["steps"]) == (409, "session_conflict", "steps", 4)
    for refused, expected in (
        (ask(shared, "speller", [1], "two", start=False), (404, "unknown_session")),
        (ask(shared, "sensors", [ROW], "one"), (409, "session_conflict")),
        (ask(shared, "speller", [99], "one"), (400, "invalid_input")),
        (fork("nobody", "copy"), (404, "unknown_session")),
        (fork("one", "one"), (409, "session_conflict")),
        (put(shared, "one", good), (409, "session_conflict")),
        (put(shared, "brought", good.replace(b'"version":"1"', b'"version":"7"')), (409, "session_conflict")),
        *((put(shared, "brought", content), (400, "invalid_request")) for content in (good[:-1], os.urandom(200))),
        (put(shared, "brought", bytes((16 << 20) + 1)), (413, "too_large")),
        (put(shared, "brought", good, "application/json"), (415, "unsupported_media")),
        (put(shared, "%20brought", good), (400, "invalid_input")),
        *((fork("one", name), (400, "invalid_input")) for name in (" copy", 7)),
        (shared.client.post("/sessions/one/fork", content="copy"), (400, "invalid_request")),
    ):
        assert code(refused) == expected, refused.text
    assert shared.client.patch("/sessions/brought/state").headers["allow"] == "DELETE, GET, PUT"
    assert steps(ask(shared, "speller", [1], "one", steps=4, end=True)) == 5
    lost = ask(shared, "speller", [1], "one", steps=5)
    assert (*code(lost), lost.json()["steps"]) == (409, "session_lost", 0)
    for gone in (delete(shared, "one"), shared.client.get("/sessions/one/state")):
        assert code(gone) == (404, "unknown_session")
    assert shared.metric("seqserve_sessions") == 0


def test_lost_sessions_are_reported_once_and_the_other_engine_continues(shared: Server, gate: Gate) -> None:
    """Also to a chunk in flight, and to the chunks that a socket has sent ahead. No chunk runs twice."""
    lost, kept, [name], [socket_name] = (
        names_at(place, count, prefix)
        for place, count, prefix in ((0, 3, "die"), (1, 3, "live"), (0, 1, "fly"), (0, 1, "stream"))
    )
    for each in (*lost, *kept):
        assert steps(ask(shared, "speller", [1], each)) == 1
    assert steps(ask(shared, "sensors", [ROW], name)) == 1
    rerun = shared.metric("seqserve_rerun_total")
    with streamed(shared, f"model=sensors&session={socket_name}") as stream, ThreadPoolExecutor() as pool:
        assert tell(stream, input=[ROW])["session"]["steps"] == 1
        arrived = shared.metric("seqserve_stage_seconds_count", stage="channel")
        gate.let(0)
        flying = pool.submit(ask, shared, "sensors", [ROW], name)
        for _ in range(2):
            stream.send(json.dumps({"input": [ROW]}))
        eventually(lambda: shared.metric("seqserve_requests_in_flight") == 3)
        eventually(lambda: shared.metric("seqserve_stage_seconds_count", stage="channel") == arrived + 3)
        os.kill(shared.pid("engine-0"), signal.SIGKILL)
        assert code(flying.result()) == (409, "session_lost")
        assert [json.loads(stream.recv(timeout=60))["code"] for _ in range(2)] == ["session_lost"] * 2
        gate.open()
        eventually(lambda: shared.client.get("/models").json()["models"][0]["device"] == "cpu, cpu")
        assert tell(stream, input=[ROW])["code"] == "unknown_session", "it is not begun again by accident"
        assert tell(stream, input=[ROW], start=True)["session"]["steps"] == 1
        assert tell(stream, input=[ROW], end=True)["session"]["steps"] == 2
    assert [code(ask(shared, "speller", [1], each)) for each in lost] == [(409, "session_lost")] * 3
    assert [code(ask(shared, "speller", [1], each, start=False)) for each in lost] == [(404, "unknown_session")] * 3
    assert [steps(ask(shared, "speller", [1], each, end=True)) for each in (*kept, *lost)] == [2, 2, 2, 1, 1, 1]
    assert steps(ask(shared, "sensors", [ROW], name, end=True)) == 1
    assert shared.metric("seqserve_rerun_total") == rerun


def test_shutdown_answers_sent_chunks_and_closes_streams(shared: Server) -> None:
    """Also at SIGHUP, which a terminal sends when it closes. The last test with this service."""
    with streamed(shared, "model=sensors") as busy, streamed(shared, "model=sensors") as idle:
        for stream in (busy, idle):
            assert tell(stream, input=[ROW])["session"]["steps"] == 1
        for _ in range(3):
            busy.send(struct.pack("<3f", *ROW) * 2_000)
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup, by the service too
        shared.process.send_signal(signal.SIGTERM if is_ignored else signal.SIGHUP)
        assert [json.loads(busy.recv(timeout=60))["session"]["steps"] for _ in range(3)] == [2_001, 4_001, 6_001]
        for stream in (busy, idle):
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert shared.process.wait(60) == 0
    assert not shared.events("library warning")
