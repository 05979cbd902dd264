"""Sessions on a real server: sequences that arrive in chunks over requests and sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from tests.serving import Server, eventually, nearly_equal, serving, stopped

ROW = [0.1, -0.2, 0.3]
ROWS = [[0.1 * step, -0.5, 1.0 / step] for step in range(1, 24)]
HUGE = [[3e38] * 3] * 6
IDS = [1, 5, 11, 0, 3, 3, 7, 2, 9, 4, 6, 8, 10]
CUTS = (0, 1, 2, 7, 8)
MAX_SESSIONS = 30


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
def shared(streaming: Path, gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with two frontends, and two engines with two state slots each, fewer than there are sessions."""
    flags = ("--device", "cpu,cpu", "--frontends", "2")
    settings = {"state_slots": "2", "max_sessions": str(MAX_SESSIONS), "lame_duck_seconds": "0.2"}
    long = {"default_deadline_ms": "600000", "max_deadline_ms": "600000"}
    with serving(streaming, tmp_path_factory.mktemp("log"), *flags, **settings, **long) as running:
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
def test_chunks_give_the_result_of_the_whole_sequence(shared: Server, model: str, sequence: list[Any]) -> None:
    whole = shared.infer(model, [sequence]).json()
    asked = [ask(shared, model, chunk, f"whole {model}").json() for chunk in chunks(sequence)]
    agree(model, whole, asked, sequence)
    assert delete(shared, f"whole {model}").json() == {"session": f"whole {model}"}


@pytest.mark.parametrize("model, sequence", [("speller", IDS), ("sensors", ROWS)])
def test_chunks_over_a_socket_are_json_or_raw_values(shared: Server, model: str, sequence: list[Any]) -> None:
    whole = shared.infer(model, [sequence]).json()
    with streamed(shared, f"model={model}") as stream:
        agree(model, whole, [tell(stream, input=chunk) for chunk in chunks(sequence)], sequence)
    with streamed(shared, f"model={model}") as stream:
        for chunk in chunks(sequence):
            values = [value for row in chunk for value in row] if isinstance(chunk[0], list) else chunk
            stream.send(struct.pack(f"<{len(values)}{'f' if isinstance(values[0], float) else 'i'}", *values))
        agree(model, whole, [json.loads(stream.recv(timeout=60)) for _ in chunks(sequence)], sequence)


def test_start_and_end_delimit_a_session(shared: Server) -> None:
    assert code(ask(shared, "speller", [1], "a", start=False)) == (404, "unknown_session")
    assert [steps(ask(shared, "speller", [1, 2], "a")) for _ in range(2)] == [2, 4]
    assert steps(ask(shared, "speller", [1], "a", start=False)) == 5
    assert steps(ask(shared, "speller", [1], "a", start=True)) == 1
    assert steps(ask(shared, "speller", [1], "a", end=True)) == 2
    assert code(ask(shared, "speller", [1], "a", start=False)) == (404, "unknown_session")
    assert steps(ask(shared, "speller", [1], "a", end=True)) == 1, "a session of one chunk"
    assert shared.metric("seqserve_sessions") == 0


def test_invalid_chunk_is_refused_and_leaves_the_session_intact(shared: Server) -> None:
    assert steps(ask(shared, "speller", [1], "mine")) == 1
    assert code(ask(shared, "sensors", [ROW], "mine")) == (409, "session_conflict")
    assert code(ask(shared, "speller", [99], "mine")) == (400, "invalid_input")
    refused = ask(shared, "reader", [1], "read")
    assert code(refused) == (400, "invalid_input")
    assert refused.json()["error"] == (
        "reader has no sessions, because layers.1 (sru) and head (span) need a whole sequence: "
        "leave session out, and the header x-session-id"
    )
    assert steps(ask(shared, "speller", [1], "mine", end=True)) == 2


def test_chunk_that_is_not_finite_leaves_the_session_intact(shared: Server) -> None:
    assert steps(ask(shared, "summer", ROWS[:3], "sane")) == 3
    expected = ask(shared, "summer", ROWS[3:9], "sane", end=True).json()["outputs"]
    assert steps(ask(shared, "summer", ROWS[:3], "driven")) == 3
    refused = ask(shared, "summer", HUGE, "driven")
    assert code(refused) == (400, "invalid_input")
    assert refused.json()["field"] == "inputs[0]"
    assert refused.json()["error"] == "inputs[0] drives summer to values that are not finite: send smaller numbers"
    again = ask(shared, "summer", ROWS[3:9], "driven", end=True)
    assert steps(again) == 9 and again.json()["outputs"] == expected
    with streamed(shared, "model=summer") as stream:
        assert tell(stream, input=HUGE)["code"] == "invalid_input"
        assert tell(stream, input=ROWS[:3])["session"]["steps"] == 3
        assert tell(stream, input=HUGE)["field"] == "input"
        assert tell(stream, input=ROWS[3:9], end=True)["outputs"] == expected
    assert code(ask(shared, "summer", HUGE, "never")) == (400, "invalid_input")
    assert code(ask(shared, "summer", [ROW], "never", start=False)) == (404, "unknown_session")


def test_session_continues_at_any_frontend(shared: Server) -> None:
    sequence = IDS[:2]
    whole = shared.infer("speller", [sequence]).json()["outputs"]
    for number, id in enumerate(sequence):
        with stopped(shared.pid(f"frontend-{number % 2}")):
            answer = ask(shared, "speller", [id], "anywhere", end=number == 1)
        assert steps(answer) == number + 1
    assert nearly_equal(answer.json()["outputs"], whole)


@pytest.fixture(scope="module")
def ones(shared: Server) -> list[Any]:
    """Return the speller's output after `times` equal ids."""
    said: list[Any] = shared.infer("speller", [[1] * count for count in range(1, 65)]).json()["outputs"]
    return said


def test_concurrent_chunks_over_http_and_grpc_run_in_sequence(shared: Server, ones: list[Any]) -> None:
    """Each chunk gets the result of one number of steps, over every API."""
    method = oip_requests.METHOD
    message = method.request_type(model_name="speller", raw_input_contents=[struct.pack("<i", 1)])
    message.inputs.add(name="ids", datatype="INT32", shape=[1])
    message.parameters["sequence_id"].string_param = "both"

    def over_grpc(number: int) -> int:
        with grpc.insecure_channel(shared.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            reply = method.response_type.FromString(channel.unary_unary(oip_requests.PATH)(message.SerializeToString()))
        return int(reply.parameters["sequence_steps"].int64_param)

    def over_http(number: int) -> int:
        answer = ask(shared, "speller", [1], "both").json()
        assert nearly_equal(answer["outputs"][0], ones[answer["session"]["steps"] - 1])
        return int(answer["session"]["steps"])

    assert over_http(0) == 1, "over HTTP, the first chunk starts the session"
    with ThreadPoolExecutor(16) as pool:
        steps = pool.map(lambda number: (over_grpc if number % 2 else over_http)(number), range(1, 64))
        assert sorted(steps) == list(range(2, 65))
    assert delete(shared, "both").status_code == 200


def test_chunks_sent_ahead_on_a_socket_keep_their_order(shared: Server, ones: list[Any]) -> None:
    with streamed(shared, "model=speller") as stream:
        for _ in range(64):
            stream.send('{"input": [1]}')
        answers = [json.loads(stream.recv(timeout=60)) for _ in range(64)]
    assert [answer["session"]["steps"] for answer in answers] == list(range(1, 65))
    assert nearly_equal([answer["outputs"][0] for answer in answers], ones)


def test_chunk_that_names_other_steps_is_refused_with_the_steps(shared: Server) -> None:
    assert steps(ask(shared, "speller", [1, 1], "counted", steps=0)) == 2
    for wrong in (0, 3):
        refused = ask(shared, "speller", [1], "counted", steps=wrong)
        assert code(refused) == (409, "session_conflict")
        assert (refused.json()["field"], refused.json()["steps"]) == ("steps", 2)
    assert steps(ask(shared, "speller", [1], "counted", steps=2, end=True)) == 3
    lost = ask(shared, "speller", [1], "counted", steps=3)
    assert (*code(lost), lost.json()["steps"]) == (409, "session_lost", 0)
    assert steps(ask(shared, "speller", [1], "counted", steps=9, start=True, end=True)) == 1


def test_chunks_sent_ahead_name_the_steps_after_those_before_them(shared: Server) -> None:
    with streamed(shared, "model=speller") as stream:
        for sent in range(32):
            stream.send(json.dumps({"input": [1], "steps": sent}))
        stream.send('{"input": [1], "steps": 31}')
        answers = [json.loads(stream.recv(timeout=60)) for _ in range(33)]
    assert [answer["session"]["steps"] for answer in answers[:32]] == list(range(1, 33))
    assert (answers[32]["code"], answers[32]["steps"]) == ("session_conflict", 32)


# States that are taken along.


def test_exported_state_continues_in_another_engine_bit_for_bit(shared: Server) -> None:
    [here], [there] = names_at(0, 1, "moving"), names_at(1, 1, "moved/there")
    for model, sequence in OF_EVERY_MODEL:
        begun, rest = sequence[:5], sequence[5:9]
        assert steps(ask(shared, model, begun, here)) == 5
        assert put(shared, there, state(shared, here), "application/octet-stream").json() == {"session": there}
        one, other = (ask(shared, model, rest, name, end=True) for name in (here, there))
        assert steps(one) == steps(other) == 9
        assert one.json()["outputs"] == other.json()["outputs"]


def test_fork_continues_independently(shared: Server) -> None:
    [original], [copy] = names_at(0, 1, "original"), names_at(1, 1, "copy")
    assert steps(ask(shared, "speller", IDS[:5], original)) == 5
    forked = shared.client.post(f"/sessions/{original}/fork", json={"session": copy})
    assert (forked.status_code, forked.json()) == (200, {"session": copy})
    assert steps(ask(shared, "speller", [2, 2], copy)) == 7
    assert steps(ask(shared, "speller", [3], original, start=False)) == 6
    answers = [ask(shared, "speller", [7], name, end=True).json()["outputs"] for name in (original, copy)]
    whole = shared.infer("speller", [[*IDS[:5], 3, 7], [*IDS[:5], 2, 2, 7]]).json()["outputs"]
    assert nearly_equal([output for outputs in answers for output in outputs], whole)


def test_fork_of_an_unknown_session_or_to_a_used_name_is_refused(shared: Server) -> None:
    def fork(name: str, copy: Any) -> httpx.Response:
        return shared.client.post(f"/sessions/{name}/fork", json={"session": copy})

    assert code(fork("nobody", "copy")) == (404, "unknown_session")
    assert steps(ask(shared, "speller", [1], "one")) == 1
    assert code(fork("one", "one")) == (409, "session_conflict")
    assert code(fork("one", " copy")) == (400, "invalid_input")
    assert code(fork("one", 7)) == (400, "invalid_input")
    assert code(shared.client.post("/sessions/one/fork", content="copy")) == (400, "invalid_request")
    assert code(put(shared, "one", state(shared, "one"))) == (409, "session_conflict")
    assert steps(ask(shared, "speller", [1], "one", end=True)) == 2


def test_deleted_session_is_unknown(shared: Server) -> None:
    assert steps(ask(shared, "speller", [1], "short")) == 1
    assert (delete(shared, "short").status_code, shared.metric("seqserve_sessions")) == (200, 0)
    for gone in (delete(shared, "short"), shared.client.get("/sessions/short/state")):
        assert code(gone) == (404, "unknown_session")
    assert code(ask(shared, "speller", [1], "short", start=False)) == (404, "unknown_session")


def test_state_of_another_model_or_format_is_refused(shared: Server) -> None:
    assert steps(ask(shared, "speller", [1, 2], "known")) == 2
    good = state(shared, "known")
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
        assert code(put(shared, "brought", content)) == expected, said
    assert code(put(shared, "brought", bytes((16 << 20) + 1))) == (413, "too_large")
    assert code(put(shared, "brought", good, "application/json")) == (415, "unsupported_media")
    assert code(put(shared, "%20brought", good)) == (400, "invalid_input")
    assert code(shared.client.patch("/sessions/brought/state")) == (405, "method_not_allowed")
    assert shared.client.patch("/sessions/brought/state").headers["allow"] == "DELETE, GET, PUT"
    assert shared.metric("seqserve_sessions") == 1
    assert steps(ask(shared, "speller", [1], "known", end=True)) == 3


def test_hostile_state_neither_ends_nor_stalls_the_engine(shared: Server) -> None:
    assert steps(ask(shared, "speller", [1, 2], "kept")) == 2
    metadata = json.loads(state(shared, "kept")[8:].partition(b"}")[0] + b"}}")["__metadata__"]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for said, tensors in {
        "dimensions that overflow": {"a": empty | {"shape": [0, 1 << 62, 1 << 62]}},
        "very many tensors": {f"{number}": empty for number in range(100_000)},
        "very many dimensions": {"a": empty | {"shape": [0] * 65}},
    }.items():
        header = json.dumps({"__metadata__": metadata, **tensors}).encode()
        assert code(put(shared, "hostile", struct.pack("<Q", len(header)) + header)) == (400, "invalid_request"), said
    assert steps(ask(shared, "speller", [1], "kept", end=True)) == 3
    assert shared.metric("seqserve_process_restarts_total") == 0


# Limits.


def test_session_over_the_limit_is_refused_and_others_continue(shared: Server) -> None:
    """The place of a socket that closed is free at once. The limit is that of one engine."""
    *names, more = names_at(0, MAX_SESSIONS, "limited")
    assert {steps(ask(shared, "speller", [1], name)) for name in names} == {1}
    with streamed(shared, f"model=speller&session={more}") as last:
        assert tell(last, input=[1])["session"]["steps"] == 1
        refused = ask(shared, "speller", [1], names_at(0, 1, "one more")[0])
        assert code(refused) == (429, "too_many_sessions")
        assert int(refused.headers["retry-after"]) >= 1
        assert f"SEQSERVE_MAX_SESSIONS is {MAX_SESSIONS}" in refused.json()["error"]
        with streamed(shared, f"model=speller&session={names_at(0, 1, 'another')[0]}") as stream:
            assert tell(stream, input=[1])["code"] == "too_many_sessions"
    assert delete(shared, more).status_code == 200
    assert {steps(ask(shared, "speller", [1], name, end=True)) for name in names} == {2}
    assert shared.metric("seqserve_sessions") == 0


def test_more_sessions_than_slots_give_exact_results(shared: Server) -> None:
    sequences = {f"many-{number}": [(number * 7 + step * 5) % 12 for step in range(6)] for number in range(20)}
    whole = shared.infer("speller", list(sequences.values())).json()["outputs"]
    for step in range(6):
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, shared, "speller", [ids[step]], name, end=step == 5) for name, ids in sequences.items()]
        answers = [one.result() for one in asked]
        assert {steps(answer) for answer in answers} == {step + 1}
    assert nearly_equal([answer.json()["outputs"][0] for answer in answers], whole)
    assert shared.metric("seqserve_session_moves_total", to="host") > 0
    assert shared.metric("seqserve_sessions") == 0
    assert shared.metric("seqserve_state_slots_used") == 0


# Engines that end.


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


# Counts, and the end of the service.


def test_disconnected_stream_frees_its_session_and_requests(shared: Server) -> None:
    def requests(**labels: str) -> float:
        return shared.metric("seqserve_requests_total", **labels)

    accepted, ended, gone = shared.metric("seqserve_requests_accepted_total"), requests(), requests(outcome="client_gone")
    with streamed(shared, "model=sensors") as stream:
        assert tell(stream, input=[ROW])["session"]["steps"] == 1
        for _ in range(4):
            stream.send(struct.pack("<3f", *ROW) * 5_000)
        eventually(lambda: shared.metric("seqserve_requests_accepted_total") == accepted + 5)
        stream.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: shared.metric("seqserve_sessions") == 0)
    eventually(lambda: requests() == ended + 5)
    assert requests(outcome="client_gone") > gone
    assert shared.metric("seqserve_state_slots_used") == 0


def test_shutdown_answers_sent_chunks_and_closes_streams(shared: Server) -> None:
    """The last test with this service."""
    with streamed(shared, "model=sensors") as busy, streamed(shared, "model=sensors") as idle:
        for stream in (busy, idle):
            assert tell(stream, input=[ROW])["session"]["steps"] == 1
        for _ in range(3):
            busy.send(struct.pack("<3f", *ROW) * 2_000)
        shared.process.terminate()
        assert [json.loads(busy.recv(timeout=60))["session"]["steps"] for _ in range(3)] == [2_001, 4_001, 6_001]
        for stream in (busy, idle):
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert shared.process.wait(60) == 0
    assert not shared.events("library warning")
