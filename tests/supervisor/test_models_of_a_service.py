"""Models are loaded, replaced and unloaded while a service answers, which the tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tritonclient import grpc as triton
from websockets.sync.client import ClientConnection, connect

from service.modeling import spec
from tests import models
from tests.reloading import TEXT, answered, load, unload
from tests.serving import Server, asking, eventually, serving

SESSIONS = ("old", "new", "other", "s")
SECRET = "the secret outside"


def index(server: Server, name: str) -> dict[str, tuple[str, str]]:
    """Return the state and reason of every version."""
    rows = server.client.post("/v2/repository/index").json()
    return {row["version"]: (row["state"], row["reason"]) for row in rows if row["name"] == name}


def summed(server: Server, values: Sequence[int], session: str, **options: Any) -> tuple[str, int]:
    """Send a chunk to a session of the accumulator; return the version that answered and the steps of the session."""
    reply = server.infer("accumulator", [[value + 1 for value in values]], session=session, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()["version"], reply.json()["session"]["steps"]


def refused(server: Server, status: int, code: str, model: str = "accumulator", **options: Any) -> str:
    """Send a request that is refused; return the error message."""
    reply = server.infer(model, [[1, 2]], **options)
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    message: str = reply.json()["error"]
    return message


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A service that started with a good model and a model without weights."""
    scratch = tmp_path_factory.mktemp("reloading")
    root = scratch / "models"
    models.words(root)
    models.words(root, "weightless")
    (root / "weightless" / "1" / spec.WEIGHTS).write_bytes(b"")
    (root / spec.ALIASES).write_text('any = "weightless"\npinned = "weightless/1"\n')
    with serving(root, scratch, "--device", "cpu", strict="0", max_model_bytes="4000000") as server:
        yield server, root


class Reloaded(NamedTuple):
    """The service, its models folder, and the size of its log when the test began."""

    server: Server
    root: Path
    log_bytes: int

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.server.events(name, since=self.log_bytes)


@pytest.fixture
def reloaded(started: tuple[Server, Path]) -> Iterator[Reloaded]:
    """The service without sessions. It serves version 1 of words and of accumulator, loaded for this test."""
    server, root = started
    log_bytes = server.log_bytes
    for name in SESSIONS:
        server.client.delete(f"/sessions/{name}/state")
    listed = server.client.get("/models").json()
    for name in {model["name"] for kind in ("models", "unavailable") for model in listed[kind]}:
        unload(server, name)
    eventually(lambda: server.metric("seqserve_model_weight_bytes") == 0)
    shutil.rmtree(root)
    models.words(root)
    models.accumulator(root)
    for name in ("words", "accumulator"):
        load(server, name, policy={"all": {}})
    yield Reloaded(server, root, server.log_bytes)
    print(server.log_file.read_bytes()[log_bytes:].decode())


def test_bad_model_is_listed_with_its_reason_and_repaired_by_a_load(started: tuple[Server, Path], tmp_path: Path) -> None:
    """Each API tells the reason, without the path of the models folder."""
    server, root = started
    reason = "weightless/1/weights.safetensors does not have the digest"
    assert server.ready() and answered(server)[0] == "1"
    [entry] = server.client.get("/models").json()["unavailable"]
    assert (entry["name"], entry["version"], entry["ready"]) == ("weightless", "1", False)
    assert entry["reason"].startswith(reason)
    assert index(server, "weightless") == {"1": ("UNAVAILABLE", entry["reason"])}
    for call in ({"model": "weightless"}, {"model": "weightless", "version": "1"}, {"model": "any"}, {"model": "pinned"}):
        reply = server.client.post("/infer", json={"inputs": [TEXT], **call})
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
        assert f"weightless version 1 cannot be served: {reason}" in reply.json()["error"]
    assert server.infer("weightless", [TEXT], version="2").status_code == 404
    reply = server.client.get("/v2/models/weightless/ready")
    assert reply.status_code == 503 and reason in reply.json()["error"]
    with closing(triton.InferenceServerClient(server.grpc)) as client:
        assert not client.is_model_ready("weightless") and client.is_model_ready("words")
    models.words(root, "weightless")
    load(server, "weightless")
    assert answered(server, "any")[0] == "1" and server.client.get("/models").json()["unavailable"] == []


def test_versions_are_replaced_under_load(reloaded: Reloaded) -> None:
    """Every request gets the answer of the version that it names, and none fails."""
    server, root, _ = reloaded
    expected = dict([answered(server)])
    with asking(server, *[{"model": "words", "inputs": [TEXT]}] * 3) as replies:
        for version in (2, 3, 4):
            models.words(root, version=version, seed=version)
            load(server, "words", policy={"latest": {"num_versions": 1}})
            newest, scores = answered(server)
            assert newest == str(version)
            expected[newest] = scores
            so_far = len(replies)
            eventually(lambda so_far=so_far: len(replies) > so_far + 3)  # type: ignore[misc]
    assert len({tuple(scores.values()) for scores in expected.values()}) == len(expected)
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["scores"] == pytest.approx(expected[reply.json()["version"]], abs=1e-5)
    eventually(lambda: len(reloaded.events("unloaded")) == 3)
    assert list(index(server, "words").values()).count(("READY", "")) == 1


def test_unloaded_models_are_unknown_and_have_no_metrics(reloaded: Reloaded) -> None:
    """Without any model the service is ready, and another can be loaded."""
    server, root, _ = reloaded
    ok = server.metric("seqserve_requests_total", model="unloaded", outcome="ok")
    answered(server)
    unload(server, "words")
    assert "served are accumulator" in refused(server, 404, "unknown_model", "words")
    assert unload(server, "words", status=404)["code"] == "unknown_model"
    eventually(lambda: 'model="words"' not in server.scrape())
    assert server.metric("seqserve_requests_total", model="unloaded", outcome="ok") == ok + 1
    unload(server, "accumulator")
    assert server.ready()
    models.tagger(root)
    load(server, "tagger")
    assert server.infer("tagger", [TEXT]).status_code == 200


def test_version_without_memory_beside_the_old_one_is_refused(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    models.sensors(root)
    load(server, "sensors")
    shutil.copytree(root / "sensors" / "1", root / "sensors" / "2")
    refusal = load(server, "sensors", status=507)
    assert refusal["code"] == "no_room" and "unload another version" in refusal["error"]
    unload(server, "sensors")
    eventually(lambda: reloaded.events("unloaded"))
    load(server, "sensors", policy={"latest": {"num_versions": 1}})
    assert server.infer("sensors", [[[0.1, 0.2, 0.3]]]).json()["version"] == "2"


@pytest.mark.parametrize("make", ["link", "fifo"])
def test_nothing_outside_of_the_models_folder_is_read(make: str, reloaded: Reloaded, tmp_path: Path) -> None:
    """A model is served without a card that is no file of its folder, and a linked tokenizer is refused."""
    server, root, _ = reloaded
    (tmp_path / "secret").write_text(SECRET)
    shutil.copytree(root / "words" / "1", root / "words" / "2")
    card, tokenizer = (root / "words" / "2" / name for name in (spec.CARD, spec.TOKENIZER))
    card.unlink()
    if make == "link":
        card.symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(card)
    load(server, "words")
    assert answered(server)[0] == "2"
    for path in ("/models", "/models/words", "/models/words/card", "/v2/models/words/versions/2"):
        assert SECRET not in server.client.get(path).text
    tokenizer.rename(tmp_path / spec.TOKENIZER)
    if make == "link":
        tokenizer.symlink_to(tmp_path / spec.TOKENIZER)
    else:
        os.mkfifo(tokenizer)
    assert load(server, "words", status=400)["code"] == "invalid_model"
    assert answered(server)[0] == "2"


def test_session_stays_with_its_first_version(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    shutil.copytree(root / "accumulator" / "1", root / "accumulator" / "2")
    load(server, "accumulator")
    assert summed(server, [1], "old") == ("1", 3)
    assert summed(server, [1], "new") == ("2", 1)
    assert "belongs to accumulator version 1" in refused(server, 409, "session_conflict", session="old", version="2")
    assert summed(server, [1], "old", start=True) == ("2", 1), "the session was restarted"


def test_chunk_is_validated_for_the_session_s_version(reloaded: Reloaded, tmp_path: Path) -> None:
    server, root, _ = reloaded
    models.sensors(root, features=3, hidden=4)
    load(server, "sensors", policy={"all": {}})
    assert server.infer("sensors", [[[0.1, 0.2, 0.3]]], session="old").status_code == 200
    models.sensors(tmp_path / "wider", features=4, hidden=4)
    shutil.move(tmp_path / "wider" / "sensors" / "1", root / "sensors" / "2")
    load(server, "sensors")
    for session, row, version in (("old", [0.1] * 3, "1"), ("new", [0.1] * 4, "2"), ("old", [0.2] * 3, "1")):
        reply = server.infer("sensors", [[row]], session=session)
        assert (reply.status_code, reply.json().get("version")) == (200, version), reply.text
    assert server.infer("sensors", [[[0.1] * 4]], session="old").json()["field"] == "inputs[0][0]"
    refusal = server.infer("sensors", [[[0.1] * 3]], session="old", version="2")
    assert refusal.status_code == 400, "the request names the version"
    assert server.infer("sensors", [[[0.1] * 3]], session="other").status_code == 400


def test_socket_continues_the_version_of_its_session(reloaded: Reloaded, tmp_path: Path) -> None:
    """A second socket finds the version too, although its first chunk is not valid for the newest version."""
    server, root, _ = reloaded
    models.sensors(root, features=3, hidden=4)
    load(server, "sensors", policy={"all": {}})

    def send(stream: ClientConnection, features: int, **options: Any) -> tuple[str, int]:
        stream.send(json.dumps({"input": [[0.1] * features], **options}))
        reply = json.loads(stream.recv(timeout=30))
        return reply.get("version") or reply["code"], reply.get("session", {}).get("steps", 0)

    def open_stream(query: str) -> ClientConnection:
        return connect(server.address.replace("http", "ws") + f"/stream?model=sensors&{query}", proxy=None)

    with open_stream("session=old") as first:
        assert send(first, 3) == ("1", 1)
        models.sensors(tmp_path / "wider", features=4, hidden=4)
        shutil.move(tmp_path / "wider" / "sensors" / "1", root / "sensors" / "2")
        load(server, "sensors")
        assert send(first, 3) == ("1", 2)
        assert send(first, 4) == ("invalid_input", 0)
        with open_stream("session=old") as second:
            assert [send(second, 3), send(second, 3)] == [("1", 3), ("1", 4)]
        assert server.client.delete("/sessions/old/state").status_code == 200
        assert send(first, 3) == ("unknown_session", 0)
        assert send(first, 4, start=True) == ("2", 1)
        assert [send(first, 4), send(first, 4, end=True), send(first, 4)] == [("2", 2), ("2", 3), ("2", 1)]
    with open_stream("version=2&session=new") as exact, open_stream("version=1&session=new") as conflicting:
        assert [send(exact, 4), send(conflicting, 3)] == [("2", 1), ("session_conflict", 0)]


def test_sessions_of_an_unloaded_version_continue_to_their_end(reloaded: Reloaded) -> None:
    server, *_ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    unload(server, "accumulator")
    assert summed(server, [1], "old") == ("1", 3)
    refused(server, 404, "unknown_session", session="other")
    refused(server, 404, "unknown_model", session="old", start=True)
    assert not reloaded.events("unloaded")
    assert summed(server, [1], "old", end=True) == ("1", 4)
    eventually(lambda: reloaded.events("unloaded"))
    refused(server, 404, "unknown_model", session="old")


def test_sessions_of_a_replaced_version_keep_its_weights(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    text = root / "accumulator" / "1" / spec.MODEL
    text.write_text('description = "the same, described"\n' + text.read_text())
    load(server, "accumulator")
    assert reloaded.events("loaded")
    assert summed(server, [1], "old", version="1") == ("1", 3)
    assert summed(server, [1], "new", version="1") == ("1", 1)


def test_restarted_processes_leave_out_a_model_whose_files_were_overwritten(reloaded: Reloaded) -> None:
    """The processes that have read the files compute with what they have read."""
    server, root, _ = reloaded
    before = answered(server)
    with (root / "words" / "1" / spec.WEIGHTS).open("r+b") as weights:
        weights.seek(-64, os.SEEK_END)
        weights.write(bytes(64))
    (root / "words" / "1" / spec.TOKENIZER).write_bytes(b"")
    assert answered(server) == before
    for child in ("engine-0", "frontend-0"):
        kill(server, child)
    assert summed(server, [1], "s") == ("1", 1)
    assert "words version 1 cannot be served" in refused(server, 503, "unavailable", "words")
    models.words(root)
    load(server, "words")
    assert answered(server) == before


def kill(server: Server, child: str) -> None:
    """Kill a process and wait until its successor serves."""
    before = len(server.events("started"))
    os.kill(server.pid(child), signal.SIGKILL)
    eventually(lambda: len(server.events("started")) > before and server.ready())
