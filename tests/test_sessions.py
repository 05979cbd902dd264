"""Sessions on a real server: sequences that arrive in chunks over requests and sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from loadtest import oip_requests
from service.ipc.session_placement import engine_of_session
from tests import models
from tests.serving import Server, eventually, nearly_equal, serving

ROW = [0.1, -0.2, 0.3]
ROWS = [[0.1 * step, -0.5, 1.0 / step] for step in range(1, 24)]
HUGE = [[3e38] * 3] * 6
IDS = [1, 5, 11, 0, 3, 3, 7, 2, 9, 4, 6, 8, 10]
CUTS = (0, 1, 2, 7, 8)
SLOW = [ROW] * 60_000


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with every head that has a result for the steps so far."""
    root = tmp_path_factory.mktemp("models")
    ids, rows = models.IDS, {"kind": "features", "features": 3, "max_steps": 500}
    gru, lstm = {"kind": "gru", "hidden": 5}, {"kind": "lstm", "hidden": 6}
    models.words(root, bidirectional=False)
    models.sensors(root)
    models.speller(root)
    models.forecaster(root)
    models.reader(root)
    conv = {"kind": "conv", "filters": 4, "width": 3, "padding": "causal"}
    tcn = {"kind": "tcn", "filters": 4, "levels": 2}
    models.made_up(root, "scanner", ids, models.EMBEDDING, conv, head={"kind": "tag", "labels": models.LABELS})
    models.made_up(root, "widener", ids, models.EMBEDDING, tcn, head={"kind": "embed", "pool": "max"})
    models.made_up(root, "summer", rows, conv, head={"kind": "embed", "pool": "mean"})
    models.made_up(root, "tagger", ids, models.EMBEDDING, gru, head={"kind": "tag", "labels": models.LABELS})
    models.made_up(root, "averager", rows, lstm, head={"kind": "embed", "pool": "mean"})
    models.made_up(root, "tracker", rows, {"kind": "sru", "hidden": 4}, gru, head={"kind": "sequence"})
    return root


@pytest.fixture(scope="module")
def two_fronts(streaming: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(streaming, tmp_path_factory.mktemp("log"), "--frontends", "2") as running:
        yield running


@pytest.fixture(scope="module")
def two_engines(streaming: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines with two state slots each, fewer than there are sessions."""
    with serving(
        streaming,
        tmp_path_factory.mktemp("log"),
        "--device",
        "cpu,cpu",
        state_slots="2",
        default_deadline_ms="600000",
        max_deadline_ms="600000",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def few(streaming: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with at most two sessions."""
    with serving(streaming, tmp_path_factory.mktemp("log"), max_sessions="2") as running:
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
    assert answer.headers["content-type"] == "application/octet-stream"
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


def chunks(sequence: list[Any]) -> list[list[Any]]:
    """Cut a sequence into chunks of many lengths."""
    return [sequence[begin:end] for begin, end in zip(CUTS, (*CUTS[1:], None), strict=True)]


def names_at(place: int, count: int, prefix: str) -> list[str]:
    """Return names of sessions that belong to one of two engines."""
    found = [name for name in (f"{prefix}-{number}" for number in range(100)) if engine_of_session(name, 2) == place]
    return found[:count]


# Chunks.

PER_CHUNK = {"tagger": ("labels", "scores"), "scanner": ("labels", "scores"), "tracker": ("sequence",)}
"""Outputs with an entry per time step, which come chunk by chunk. For other outputs the last chunk has the result of the whole sequence."""
OF_EVERY_MODEL: list[tuple[str, list[Any]]] = [
    ("words", [int(id) % len(models.WORDS) for id in IDS]),
    ("speller", IDS),
    ("tagger", IDS),
    ("scanner", IDS),
    ("widener", IDS),
    ("sensors", ROWS),
    ("forecaster", ROWS),
    ("averager", ROWS),
    ("tracker", ROWS),
]


def agree(model: str, whole: dict[str, Any], answers: list[dict[str, Any]], sequence: list[Any]) -> None:
    """Check that the chunks of a sequence give the result of the whole sequence."""
    [expected] = whole["outputs"]
    outputs = [answer["outputs"][0] for answer in answers]
    counted, so_far = [], 0
    for chunk in chunks(sequence):
        so_far += len(chunk)
        counted.append(so_far)
    assert [answer["session"]["steps"] for answer in answers] == counted
    for name, value in expected.items():
        found = [one for output in outputs for one in output[name]] if name in PER_CHUNK.get(model, ()) else outputs[-1][name]
        assert nearly_equal(found, value), name


@pytest.mark.parametrize("model, sequence", OF_EVERY_MODEL, ids=[model for model, _ in OF_EVERY_MODEL])
def test_chunks_give_the_result_of_the_whole_sequence(two_fronts: Server, model: str, sequence: list[Any]) -> None:
    whole = two_fronts.infer(model, [sequence]).json()
    asked = [ask(two_fronts, model, chunk, f"whole {model}").json() for chunk in chunks(sequence)]
    agree(model, whole, asked, sequence)
    assert delete(two_fronts, f"whole {model}").json() == {"session": f"whole {model}"}
    with streamed(two_fronts, f"model={model}") as stream:
        agree(model, whole, [tell(stream, input=chunk) for chunk in chunks(sequence)], sequence)
    with streamed(two_fronts, f"model={model}") as stream:
        for chunk in chunks(sequence):
            values = [value for row in chunk for value in row] if isinstance(chunk[0], list) else chunk
            stream.send(struct.pack(f"<{len(values)}{'f' if isinstance(values[0], float) else 'i'}", *values))
        agree(model, whole, [json.loads(stream.recv(timeout=60)) for _ in chunks(sequence)], sequence)


def test_start_and_end_delimit_a_session(two_fronts: Server) -> None:
    assert code(ask(two_fronts, "speller", [1], "a", start=False)) == (404, "unknown_session")
    assert [steps(ask(two_fronts, "speller", [1, 2], "a")) for _ in range(2)] == [2, 4]
    assert steps(ask(two_fronts, "speller", [1], "a", start=False)) == 5
    assert steps(ask(two_fronts, "speller", [1], "a", start=True)) == 1
    assert steps(ask(two_fronts, "speller", [1], "a", end=True)) == 2
    assert code(ask(two_fronts, "speller", [1], "a", start=False)) == (404, "unknown_session")
    assert steps(ask(two_fronts, "speller", [1], "a", end=True)) == 1, "a session of one chunk"
    assert two_fronts.metric("seqserve_sessions") == 0


def test_invalid_chunk_is_refused_and_leaves_the_session_intact(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "speller", [1], "mine")) == 1
    assert code(ask(two_fronts, "sensors", [ROW], "mine")) == (409, "session_conflict")
    assert code(ask(two_fronts, "speller", [99], "mine")) == (400, "invalid_input")
    refused = ask(two_fronts, "reader", [1], "read")
    assert code(refused) == (400, "invalid_input")
    assert refused.json()["error"] == (
        "reader has no sessions, because layers.1 (sru) and head (span) need a whole sequence: "
        "leave session out, and the header x-session-id"
    )
    assert steps(ask(two_fronts, "speller", [1], "mine", end=True)) == 2


def test_chunk_that_is_not_finite_leaves_the_session_intact(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "summer", ROWS[:3], "sane")) == 3
    expected = ask(two_fronts, "summer", ROWS[3:9], "sane", end=True).json()["outputs"]
    assert steps(ask(two_fronts, "summer", ROWS[:3], "driven")) == 3
    refused = ask(two_fronts, "summer", HUGE, "driven")
    assert code(refused) == (400, "invalid_input")
    assert refused.json()["field"] == "inputs[0]"
    assert refused.json()["error"] == "inputs[0] drives summer to values that are not finite: send smaller numbers"
    again = ask(two_fronts, "summer", ROWS[3:9], "driven", end=True)
    assert steps(again) == 9 and again.json()["outputs"] == expected
    with streamed(two_fronts, "model=summer") as stream:
        assert tell(stream, input=HUGE)["code"] == "invalid_input"
        assert tell(stream, input=ROWS[:3])["session"]["steps"] == 3
        assert tell(stream, input=HUGE)["field"] == "input"
        assert tell(stream, input=ROWS[3:9], end=True)["outputs"] == expected
    assert code(ask(two_fronts, "summer", HUGE, "never")) == (400, "invalid_input")
    assert code(ask(two_fronts, "summer", [ROW], "never", start=False)) == (404, "unknown_session")


def test_session_continues_at_any_frontend(two_fronts: Server) -> None:
    sequence = IDS[:6]
    whole = two_fronts.infer("speller", [sequence]).json()["outputs"]
    for number, id in enumerate(sequence):
        with stopped(two_fronts.pid(f"frontend-{number % 2}")):
            answer = ask(two_fronts, "speller", [id], "anywhere", end=number == 5)
        assert steps(answer) == number + 1
    assert nearly_equal(answer.json()["outputs"], whole)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def ones(two_fronts: Server) -> list[Any]:
    """Return the speller's output after `times` equal ids."""
    said: list[Any] = two_fronts.infer("speller", [[1] * count for count in range(1, 65)]).json()["outputs"]
    return said


def test_concurrent_chunks_run_in_sequence(two_fronts: Server, ones: list[Any]) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(two_fronts, "speller", [1], "crowded").json(), range(64)))
    assert sorted(answer["session"]["steps"] for answer in answers) == list(range(1, 65))
    for answer in answers:
        assert nearly_equal(answer["outputs"][0], ones[answer["session"]["steps"] - 1])
    assert delete(two_fronts, "crowded").status_code == 200


def test_concurrent_chunks_over_http_and_grpc_run_in_sequence(two_fronts: Server, ones: list[Any]) -> None:
    """Each chunk gets the result of one number of steps, over every API."""
    method = oip_requests.METHOD
    message = method.request_type(model_name="speller", raw_input_contents=[struct.pack("<i", 1)])
    message.inputs.add(name="ids", datatype="INT32", shape=[1])
    message.parameters["sequence_id"].string_param = "both"

    def over_grpc(number: int) -> int:
        with grpc.insecure_channel(two_fronts.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            reply = method.response_type.FromString(channel.unary_unary(oip_requests.PATH)(message.SerializeToString()))
        return int(reply.parameters["sequence_steps"].int64_param)

    def over_http(number: int) -> int:
        answer = ask(two_fronts, "speller", [1], "both").json()
        assert nearly_equal(answer["outputs"][0], ones[answer["session"]["steps"] - 1])
        return int(answer["session"]["steps"])

    assert over_http(0) == 1, "over HTTP, the first chunk starts the session"
    with ThreadPoolExecutor(16) as pool:
        steps = pool.map(lambda number: (over_grpc if number % 2 else over_http)(number), range(1, 64))
        assert sorted(steps) == list(range(2, 65))
    assert delete(two_fronts, "both").status_code == 200


def test_chunks_sent_ahead_on_a_socket_keep_their_order(two_fronts: Server, ones: list[Any]) -> None:
    with streamed(two_fronts, "model=speller") as stream:
        for _ in range(64):
            stream.send('{"input": [1]}')
        answers = [json.loads(stream.recv(timeout=60)) for _ in range(64)]
    assert [answer["session"]["steps"] for answer in answers] == list(range(1, 65))
    assert nearly_equal([answer["outputs"][0] for answer in answers], ones)


def test_chunk_that_names_other_steps_is_refused_with_the_steps(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "speller", [1, 1], "counted", steps=0)) == 2
    for wrong in (0, 3):
        refused = ask(two_fronts, "speller", [1], "counted", steps=wrong)
        assert code(refused) == (409, "session_conflict")
        assert (refused.json()["field"], refused.json()["steps"]) == ("steps", 2)
    assert steps(ask(two_fronts, "speller", [1], "counted", steps=2, end=True)) == 3
    lost = ask(two_fronts, "speller", [1], "counted", steps=3)
    assert (*code(lost), lost.json()["steps"]) == (409, "session_lost", 0)
    assert steps(ask(two_fronts, "speller", [1], "counted", steps=9, start=True, end=True)) == 1


def test_chunks_sent_ahead_name_the_steps_after_those_before_them(two_fronts: Server) -> None:
    with streamed(two_fronts, "model=speller") as stream:
        for sent in range(32):
            stream.send(json.dumps({"input": [1], "steps": sent}))
        stream.send('{"input": [1], "steps": 31}')
        answers = [json.loads(stream.recv(timeout=60)) for _ in range(33)]
    assert [answer["session"]["steps"] for answer in answers[:32]] == list(range(1, 33))
    assert (answers[32]["code"], answers[32]["steps"]) == ("session_conflict", 32)


def test_sequence_steps_of_the_open_inference_protocol(two_fronts: Server) -> None:
    def send(**parameters: Any) -> httpx.Response:
        tensor = {"name": "ids", "datatype": "INT32", "shape": [1, 2], "data": [1, 1]}
        body = {"inputs": [tensor], "parameters": {"sequence_id": "oip-counted", **parameters}}
        return two_fronts.client.post("/v2/models/speller/infer", json=body)

    assert send(sequence_start=True).json()["parameters"]["sequence_steps"] == 2
    refused = send(sequence_steps=3)
    assert (refused.status_code, refused.json()["steps"]) == (409, 2)
    assert send(sequence_steps=2, sequence_end=True).json()["parameters"]["sequence_steps"] == 4


# States that are taken along.


def test_exported_state_continues_elsewhere_bit_for_bit(two_fronts: Server, two_engines: Server) -> None:
    for model, sequence in OF_EVERY_MODEL:
        begun, rest = sequence[:5], sequence[5:9]
        assert steps(ask(two_fronts, model, begun, "moving")) == 5
        taken = state(two_fronts, "moving")
        assert put(two_engines, "moved/here", taken, "application/octet-stream").json() == {"session": "moved/here"}
        here, there = ask(two_fronts, model, rest, "moving", end=True), ask(two_engines, model, rest, "moved/here", end=True)
        assert steps(here) == steps(there) == 9
        assert here.json()["outputs"] == there.json()["outputs"]


def test_fork_continues_independently(two_engines: Server) -> None:
    [original], [copy] = names_at(0, 1, "original"), names_at(1, 1, "copy")
    assert steps(ask(two_engines, "speller", IDS[:5], original)) == 5
    forked = two_engines.client.post(f"/sessions/{original}/fork", json={"session": copy})
    assert (forked.status_code, forked.json()) == (200, {"session": copy})
    assert steps(ask(two_engines, "speller", [2, 2], copy)) == 7
    assert steps(ask(two_engines, "speller", [3], original, start=False)) == 6
    answers = [ask(two_engines, "speller", [7], name, end=True).json()["outputs"] for name in (original, copy)]
    whole = two_engines.infer("speller", [[*IDS[:5], 3, 7], [*IDS[:5], 2, 2, 7]]).json()["outputs"]
    assert nearly_equal([output for outputs in answers for output in outputs], whole)


def test_fork_of_an_unknown_session_or_to_a_used_name_is_refused(two_fronts: Server) -> None:
    def fork(name: str, copy: Any) -> httpx.Response:
        return two_fronts.client.post(f"/sessions/{name}/fork", json={"session": copy})

    assert code(fork("nobody", "copy")) == (404, "unknown_session")
    assert steps(ask(two_fronts, "speller", [1], "one")) == 1
    assert code(fork("one", "one")) == (409, "session_conflict")
    assert code(fork("one", " copy")) == (400, "invalid_input")
    assert code(fork("one", 7)) == (400, "invalid_input")
    assert code(two_fronts.client.post("/sessions/one/fork", content="copy")) == (400, "invalid_request")
    assert code(put(two_fronts, "one", state(two_fronts, "one"))) == (409, "session_conflict")
    assert steps(ask(two_fronts, "speller", [1], "one", end=True)) == 2


def test_deleted_session_is_unknown(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "speller", [1], "short")) == 1
    assert (delete(two_fronts, "short").status_code, two_fronts.metric("seqserve_sessions")) == (200, 0)
    for gone in (delete(two_fronts, "short"), two_fronts.client.get("/sessions/short/state")):
        assert code(gone) == (404, "unknown_session")
    assert code(ask(two_fronts, "speller", [1], "short", start=False)) == (404, "unknown_session")


def test_state_of_another_model_or_format_is_refused(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "speller", [1, 2], "known")) == 2
    good = state(two_fronts, "known")
    refused = {
        "another model": (good.replace(b"speller", b"sensors"), (409, "session_conflict")),
        "no model": (good.replace(b"speller", b"smeller"), (409, "session_conflict")),
        "another version": (good.replace(b'"version":"1"', b'"version":"7"'), (409, "session_conflict")),
        "truncated": (good[:-1], (400, "invalid_request")),
        "header alone": (good[:60], (400, "invalid_request")),
        "too long": (good + b"\0", (400, "invalid_request")),
        "empty": (b"", (400, "invalid_request")),
        "garbage": (os.urandom(200), (400, "invalid_request")),
        "JSON": (b'{"state": 1}', (400, "invalid_request")),
        "not a number": (good[:-4] + struct.pack("<f", float("nan")), (400, "invalid_request")),
    }
    for said, (content, expected) in refused.items():
        assert code(put(two_fronts, "brought", content)) == expected, said
    assert code(put(two_fronts, "brought", bytes((16 << 20) + 1))) == (413, "too_large")
    assert code(put(two_fronts, "brought", good, "application/json")) == (415, "unsupported_media")
    assert code(put(two_fronts, "%20brought", good)) == (400, "invalid_input")
    assert code(two_fronts.client.patch("/sessions/brought/state")) == (405, "method_not_allowed")
    assert two_fronts.client.patch("/sessions/brought/state").headers["allow"] == "DELETE, GET, PUT"
    assert two_fronts.metric("seqserve_sessions") == 1
    assert steps(ask(two_fronts, "speller", [1], "known", end=True)) == 3


def test_hostile_state_neither_ends_nor_stalls_the_engine(two_fronts: Server) -> None:
    assert steps(ask(two_fronts, "speller", [1, 2], "kept")) == 2
    metadata = json.loads(state(two_fronts, "kept")[8:].partition(b"}")[0] + b"}}")["__metadata__"]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for said, tensors in {
        "dimensions that overflow": {"a": empty | {"shape": [0, 1 << 62, 1 << 62]}},
        "very many tensors": {f"{number}": empty for number in range(100_000)},
        "very many dimensions": {"a": empty | {"shape": [0] * 65}},
    }.items():
        header = json.dumps({"__metadata__": metadata, **tensors}).encode()
        assert code(put(two_fronts, "hostile", struct.pack("<Q", len(header)) + header)) == (400, "invalid_request"), said
    assert steps(ask(two_fronts, "speller", [1], "kept", end=True)) == 3
    assert two_fronts.metric("seqserve_process_restarts_total") == 0


# Limits.


def test_idle_session_expires_and_reports_it_once(streaming: Path, tmp_path: Path) -> None:
    with serving(streaming, tmp_path, session_idle_seconds="1.0") as forgetful:
        assert steps(ask(forgetful, "speller", [1], "idle")) == 1
        eventually(lambda: forgetful.metric("seqserve_sessions") == 0)
        assert forgetful.metric("seqserve_sessions_ended_total", reason="expired") == 1
        told = ask(forgetful, "speller", [1], "idle")
        assert code(told) == (404, "session_expired")
        assert "SEQSERVE_SESSION_IDLE_SECONDS" in told.json()["error"]
        assert code(ask(forgetful, "speller", [1], "idle", start=False)) == (404, "unknown_session")
        assert steps(ask(forgetful, "speller", [1], "idle", end=True)) == 1


def test_session_over_the_limit_is_refused_and_others_continue(few: Server) -> None:
    with (
        streamed(few, "model=speller") as one,
        streamed(few, "model=speller") as other,
        streamed(few, "model=speller") as third,
    ):
        assert [tell(stream, input=[1])["session"]["steps"] for stream in (one, other)] == [1, 1]
        refused = ask(few, "speller", [1], "one more")
        assert code(refused) == (429, "too_many_sessions")
        assert int(refused.headers["retry-after"]) >= 1
        assert "SEQSERVE_MAX_SESSIONS is 2" in refused.json()["error"]
        assert tell(third, input=[1])["code"] == "too_many_sessions"
        assert [tell(stream, input=[1])["session"]["steps"] for stream in (one, other)] == [2, 2]
        one.close()
        eventually(lambda: few.metric("seqserve_sessions") == 1, 5)
        assert tell(third, input=[1])["session"]["steps"] == 1, "the place of a socket that closed is free at once"


def test_more_sessions_than_slots_give_exact_results(two_engines: Server) -> None:
    sequences = {f"many-{number}": [(number * 7 + step * 5) % 12 for step in range(6)] for number in range(20)}
    whole = two_engines.infer("speller", list(sequences.values())).json()["outputs"]
    for step in range(6):
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(ask, two_engines, "speller", [ids[step]], name, end=step == 5) for name, ids in sequences.items()
            ]
        answers = [one.result() for one in asked]
        assert {steps(answer) for answer in answers} == {step + 1}
    assert nearly_equal([answer.json()["outputs"][0] for answer in answers], whole)
    assert two_engines.metric("seqserve_session_moves_total", to="host") > 0
    assert two_engines.metric("seqserve_sessions") == 0
    assert two_engines.metric("seqserve_state_slots_used") == 0


# Engines that end.


def test_lost_session_is_reported_once_and_the_other_engine_continues(two_engines: Server) -> None:
    lost, kept = names_at(0, 3, "die"), names_at(1, 3, "live")
    for name in (*lost, *kept):
        assert steps(ask(two_engines, "speller", [1], name)) == 1
    kill(two_engines, "engine-0")
    eventually(lambda: two_engines.client.get("/models").json()["models"][0]["device"] == "cpu", 5)
    assert code(ask(two_engines, "speller", [1], lost[0], start=True)) == (503, "engine_lost")
    assert [steps(ask(two_engines, "speller", [1], name, start=False)) for name in kept] == [2] * 3
    back = eventually(lambda: (answer := ask(two_engines, "speller", [1], lost[0])).status_code != 503 and answer, 20)
    assert code(back) == (409, "session_lost")
    assert [code(ask(two_engines, "speller", [1], name, start=False)) for name in lost[1:]] == [(409, "session_lost")] * 2
    for name in lost:
        assert code(ask(two_engines, "speller", [1], name, start=False)) == (404, "unknown_session")
        assert steps(ask(two_engines, "speller", [1], name)) == 1
    assert [steps(ask(two_engines, "speller", [1], name, end=True)) for name in kept] == [3] * 3
    assert [steps(ask(two_engines, "speller", [1], name, end=True)) for name in lost] == [2] * 3


def kill(server: Server, engine: str) -> None:
    os.kill(server.pid(engine), signal.SIGKILL)


def test_chunk_in_flight_on_a_killed_engine_gets_session_lost(two_engines: Server) -> None:
    [name], [socket_name] = names_at(1, 1, "flying"), names_at(1, 1, "streaming")
    assert steps(ask(two_engines, "sensors", [ROW], name)) == 1
    rerun = two_engines.metric("seqserve_rerun_total")
    with streamed(two_engines, f"model=sensors&session={socket_name}") as stream, ThreadPoolExecutor() as pool:
        assert tell(stream, input=[ROW])["session"]["steps"] == 1
        parsed = two_engines.metric("seqserve_stage_seconds_count", stage="parse")
        flying = pool.submit(ask, two_engines, "sensors", SLOW * 3, name)
        stream.send(struct.pack("<3f", *ROW) * 80_000)
        stream.send(json.dumps({"input": [ROW]}))
        eventually(lambda: two_engines.metric("seqserve_requests_in_flight") == 3, 10)
        eventually(lambda: two_engines.metric("seqserve_stage_seconds_count", stage="parse") == parsed + 1, 10)
        time.sleep(0.1)  # from the frontend to the engine
        kill(two_engines, "engine-1")
        assert code(flying.result(30)) == (409, "session_lost")
        assert [json.loads(stream.recv(timeout=30))["code"] for _ in range(2)] == ["session_lost"] * 2
        assert tell(stream, input=[ROW])["code"] == "unknown_session", "it is not begun again by accident"
        assert tell(stream, input=[ROW], start=True)["session"]["steps"] == 1
        assert tell(stream, input=[ROW], end=True)["session"]["steps"] == 2
    assert steps(ask(two_engines, "sensors", [ROW], name, end=True)) == 1
    assert two_engines.metric("seqserve_rerun_total") == rerun


# Counts, and the end of the service.


def test_disconnected_stream_frees_its_session_and_requests(two_fronts: Server) -> None:
    def requests(**labels: str) -> float:
        return two_fronts.metric("seqserve_requests_total", **labels)

    accepted, ended, gone = two_fronts.metric("seqserve_requests_accepted_total"), requests(), requests(outcome="client_gone")
    with streamed(two_fronts, "model=sensors") as stream:
        assert tell(stream, input=[ROW])["session"]["steps"] == 1
        for _ in range(4):
            stream.send(struct.pack("<3f", *ROW) * 80_000)
        eventually(lambda: two_fronts.metric("seqserve_requests_accepted_total") == accepted + 5)
        stream.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: two_fronts.metric("seqserve_sessions") == 0)
    eventually(lambda: requests() == ended + 5)
    assert requests(outcome="client_gone") > gone
    assert two_fronts.metric("seqserve_state_slots_used") == 0


def test_disconnect_during_the_first_chunk_ends_its_request(two_fronts: Server) -> None:
    """The service takes no further message before the first is answered, and notices the end of the socket nevertheless."""

    def requests(**labels: str) -> float:
        return two_fronts.metric("seqserve_requests_total", **labels)

    accepted, ended, gone = two_fronts.metric("seqserve_requests_accepted_total"), requests(), requests(outcome="client_gone")
    with ExitStack() as stack:
        streams = [stack.enter_context(streamed(two_fronts, "model=sensors")) for _ in range(5)]
        for stream in streams:
            stream.send(struct.pack("<3f", *ROW) * 80_000)
        eventually(lambda: two_fronts.metric("seqserve_requests_accepted_total") == accepted + 5)
        for stream in streams:
            stream.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: requests() == ended + 5)
    assert requests(outcome="client_gone") > gone
    eventually(lambda: two_fronts.metric("seqserve_sessions") == 0)


def test_accepted_requests_are_in_flight_or_have_an_outcome(two_fronts: Server) -> None:
    ended = threading.Event()
    traffic = (
        lambda: two_fronts.infer("speller", [IDS]),
        lambda: httpx.post(f"{two_fronts.address}/infer", content="{", trust_env=False),
        lambda: ask(two_fronts, "speller", [1], "counted"),
        lambda: hang_up(two_fronts),
        lambda: sent_ahead(two_fronts),
    )

    def keep(doing: Any) -> int:
        times = 0
        while not ended.is_set():
            doing()
            times += 1
            time.sleep(0.01)
        return times

    scrapes: list[float] = []
    with ThreadPoolExecutor(len(traffic)) as pool:
        done = [pool.submit(keep, one) for one in traffic]
        try:
            while len(scrapes) < 15:
                scrapes.append(conserved(two_fronts))
        finally:
            ended.set()
    assert all(one.result() > 1 for one in done)
    assert delete(two_fronts, "counted").status_code == 200
    eventually(lambda: two_fronts.metric("seqserve_requests_in_flight") + two_fronts.metric("seqserve_sessions") == 0, 5)
    conserved(two_fronts)
    assert max(scrapes) > 0, "some were seen on their way"


def conserved(server: Server) -> float:
    """Check that accepted requests are in flight or have an outcome. Returns the number in flight."""
    samples = [one for family in text_string_to_metric_families(server.scrape()) for one in family.samples]

    def total(name: str) -> float:
        return sum(one.value for one in samples if one.name == name)

    in_flight = total("seqserve_requests_in_flight")
    assert total("seqserve_requests_accepted_total") == total("seqserve_requests_total") + in_flight
    return in_flight


def hang_up(server: Server) -> None:
    """Send a request and disconnect."""
    body = json.dumps({"model": "sensors", "inputs": [SLOW[:2_000]]}).encode()
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def sent_ahead(server: Server) -> None:
    """Send chunks over a stream and close it during the replies."""
    with streamed(server, "model=sensors") as stream:
        for message in (b"123", struct.pack("<3f", *ROW), struct.pack("<3f", *ROW) * 5_000, "{", struct.pack("<3f", *ROW)):
            stream.send(message)
        stream.recv(timeout=60)


def test_shutdown_answers_sent_chunks_and_closes_streams(streaming: Path, tmp_path: Path) -> None:
    with (
        serving(streaming, tmp_path, lame_duck_seconds="0.2") as own,
        streamed(own, "model=sensors") as busy,
        streamed(own, "model=sensors") as idle,
    ):
        for stream in (busy, idle):
            assert tell(stream, input=[ROW])["session"]["steps"] == 1
        for _ in range(3):
            busy.send(struct.pack("<3f", *ROW) * 5_000)
        own.process.terminate()
        assert [json.loads(busy.recv(timeout=60))["session"]["steps"] for _ in range(3)] == [5_001, 10_001, 15_001]
        for stream in (busy, idle):
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        assert own.process.wait(10) == 0
    assert not own.events("library warning")
