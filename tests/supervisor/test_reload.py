"""Models are loaded, replaced and unloaded while a real server answers: every request gets the answer of the version that it names."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvloop
from websockets.sync.client import ClientConnection, connect

from service.modeling import spec
from tests import models
from tests.planted import constants
from tests.reloading import TEXT, Load, answered, load, unload
from tests.serving import Server, eventually, serving

RELOADS = 10
LOAD_SHARE = 0.8
"""Request rate during reloads, as a share of the capacity."""
POLL_SECONDS = 0.1
SESSIONS = ("old", "new", "other", "s")


def index(server: Server, name: str) -> dict[str, tuple[str, str]]:
    """Return the state and reason of every version."""
    rows = server.client.post("/v2/repository/index").json()
    return {row["version"]: (row["state"], row["reason"]) for row in rows if row["name"] == name}


def summed(server: Server, values: Sequence[int], session: str, model: str = "accumulator", **options: Any) -> tuple[str, int]:
    """Send a chunk to a session of an accumulator; return the version that answered and the steps of the session."""
    reply = server.infer(model, [[value + 1 for value in values]], session=session, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()["version"], reply.json()["session"]["steps"]


def refused(server: Server, status: int, code: str, model: str = "accumulator", **options: Any) -> str:
    """Send a request that is refused; return the error message."""
    reply = server.infer(model, [[1, 2]], **options)
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    message: str = reply.json()["error"]
    return message


def copy_version(root: Path, name: str, version: int) -> None:
    """Add a version with the files of version 1."""
    shutil.copytree(root / name / "1", root / name / str(version))


@contextmanager
def reloading(tmp_path: Path, *flags: str, **settings: str) -> Iterator[tuple[Server, Path]]:
    root = tmp_path / "models"
    models.words(root)
    models.accumulator(root)
    with serving(root, tmp_path, *flags, **settings) as server:
        yield server, root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    with reloading(tmp_path_factory.mktemp("reloading"), "--frontends", "2") as both:
        yield both


class Reloaded(NamedTuple):
    """A server that tests share, its models folder, and the size of its log when the test began."""

    server: Server
    root: Path
    log_bytes: int

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.server.events(name, since=self.log_bytes)


@pytest.fixture
def reloaded(shared: tuple[Server, Path]) -> Iterator[Reloaded]:
    """The shared server without sessions. It serves version 1 of words and of accumulator, loaded for this test."""
    server, root = shared
    log_bytes = server.log_bytes
    for name in SESSIONS:
        server.client.delete(f"/sessions/{name}/state")
    for name in {model["name"] for model in server.client.get("/models").json()["models"]}:
        unload(server, name)
    eventually(lambda: server.metric("seqserve_model_weight_bytes") == 0)
    eventually(lambda: 'model="words"' not in server.scrape())
    shutil.rmtree(root)
    models.words(root)
    models.accumulator(root)
    for name in ("words", "accumulator"):
        load(server, name, policy={"all": {}})
    yield Reloaded(server, root, server.log_bytes)
    print(server.log_file.read_bytes()[log_bytes:].decode())


# Under load.


def test_reloads_under_load_lose_no_request_and_mix_no_versions(tmp_path: Path) -> None:
    with reloading(tmp_path, "--frontends", "2") as (server, root):
        load_of = Load(server)
        rate = LOAD_SHARE * uvloop.run(load_of.capacity())
        load_of = Load(server)
        expected = {"1": answered(server)[1]}
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(uvloop.run, load_of.keep(rate))
            try:
                for version in range(2, RELOADS + 2):
                    models.words(root, version=version, seed=version)
                    load(server, "words", policy={"latest": {"num_versions": 1}})
                    newest, scores = answered(server)
                    assert newest == str(version)
                    expected[newest] = scores
            finally:
                load_of.ended.set()
            running.result()
        sent = load_of.check(expected)
        assert len(load_of.answers) > RELOADS / 2, "requests were answered between most reloads"
        assert len({json.dumps(scores) for scores in expected.values()}) == RELOADS + 1, "each version has its own answer"
        print(f"{sent} requests at {rate:.0f}/s, {LOAD_SHARE} of capacity, {RELOADS} reloads: 0 failed")
        eventually(lambda: list(index(server, "words").values()).count(("READY", "")) == 1, within_seconds=10)
        eventually(lambda: len(server.events("unloaded")) == RELOADS, within_seconds=10)


# Served versions.


def test_version_with_changed_files_is_loaded_again(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    _, before = answered(server)
    load(server, "words")
    assert not reloaded.events("loaded"), "nothing had changed"
    models.words(root, seed=5)
    load(server, "words")
    version, after = answered(server)
    assert (version, before == after) == ("1", False)


def test_policy_of_a_load_selects_the_versions(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    for version in (2, 3):
        models.words(root, version=version, seed=version)
    load(server, "words", policy={"latest": {"num_versions": 1}})
    assert list(index(server, "words")) == ["1", "2", "3"]
    assert answered(server)[0] == "3"
    assert "served are 3" in refused(server, 404, "unknown_model", "words", version="2")
    load(server, "words", policy={"specific": {"versions": [1, 2]}})
    assert [answered(server)[0], answered(server, version=1)[0]] == ["2", "1"]
    load(server, "words", policy={"all": {}})
    assert [answered(server, version=version)[0] for version in (1, 2, 3)] == ["1", "2", "3"]


def test_unloaded_model_is_unknown_and_has_no_metrics(reloaded: Reloaded) -> None:
    server, *_ = reloaded
    ok = server.metric("seqserve_requests_total", model="unloaded", outcome="ok")
    answered(server)
    unload(server, "words")
    assert "served are accumulator" in refused(server, 404, "unknown_model", "words")
    assert unload(server, "words", status=404)["code"] == "unknown_model"
    assert index(server, "words")["1"][0] in ("UNLOADING", "UNAVAILABLE")
    eventually(lambda: 'model="words"' not in server.scrape(), within_seconds=10)
    assert server.metric("seqserve_requests_total", model="unloaded", outcome="ok") == ok + 1
    load(server, "words")
    assert answered(server)[0] == "1"


def test_last_model_can_be_replaced_by_another(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    unload(server, "words")
    unload(server, "accumulator")
    assert server.ready()
    eventually(lambda: len(reloaded.events("unloaded")) == 2, within_seconds=10)
    models.tagger(root)
    load(server, "tagger")
    assert server.infer("tagger", [TEXT]).status_code == 200


def test_aliases_are_read_again_with_each_load(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    models.words(root, version=2, seed=2)
    (root / spec.ALIASES).write_text('any = "words"\nstable = "words/1"')
    load(server, "words")
    assert [answered(server, name)[0] for name in ("any", "stable")] == ["2", "1"]
    listed = {
        model["version"]: model["aliases"]
        for model in server.client.get("/models").json()["models"]
        if model["name"] == "words"
    }
    assert listed == {"1": ["any", "stable"], "2": ["any"]}
    unload(server, "words")
    load(server, "accumulator")
    assert "unknown model any" in refused(server, 404, "unknown_model", "any"), "its model is not served"
    load(server, "words")
    (root / spec.ALIASES).write_text('any = "nobody"')
    assert "any stands for 'nobody'" in load(server, "words", status=400)["error"]
    assert answered(server, "any")[0] == "2"


# Refusals.


def test_invalid_model_is_refused_while_the_old_one_serves(
    reloaded: Reloaded,
) -> None:
    server, root, _ = reloaded
    before, invalid = answered(server), server.metric("seqserve_model_changes_total", outcome="invalid_model")
    models.words(root, version=2, seed=2)
    truncated = root / "words" / "2" / spec.WEIGHTS
    truncated.write_bytes(truncated.read_bytes()[:100])
    refusal = load(server, "words", status=400)
    assert refusal["code"] == "invalid_model"
    message = refusal["error"]
    assert message.startswith("words/2/weights.safetensors does not have the digest"), "without the path of the models folder"
    assert index(server, "words")["2"] == ("UNAVAILABLE", message)
    truncated.unlink()
    assert "cannot be read" in load(server, "words", status=400)["error"]
    (root / "words" / "2" / spec.MODEL).unlink()
    assert "model.toml is missing" in load(server, "words", status=400)["error"]
    assert answered(server) == before
    assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == invalid + 3
    weights = root / "words" / "1" / spec.WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[::-1])
    assert "does not have the digest" in load(server, "words", status=400, policy={"specific": {"versions": [1]}})["error"]
    weights.write_bytes(content)
    shutil.rmtree(root / "words" / "2")
    load(server, "words")
    assert index(server, "words") == {"1": ("READY", "")}


@pytest.mark.parametrize("name", ["nobody", "..%2Fmodels", "%2Fetc", "."])
def test_only_folders_in_the_models_folder_can_be_loaded(reloaded: Reloaded, name: str) -> None:
    answer = reloaded.server.client.post(f"/v2/repository/models/{name}/load")
    assert answer.status_code in (400, 404), answer.text


def test_version_without_memory_next_to_the_old_one_is_refused(tmp_path: Path) -> None:
    with reloading(tmp_path, max_model_bytes="6000") as (server, root):
        weights = server.metric("seqserve_model_weight_bytes", model="words")
        assert weights > 3000
        models.words(root, version=2, seed=2)
        refusal = load(server, "words", status=507)
        assert refusal["code"] == "no_room"
        assert "unload another version" in refusal["error"]
        assert answered(server)[0] == "1"
        unload(server, "words")
        eventually(lambda: len(server.events("unloaded")) == 1, within_seconds=10)
        load(server, "words", policy={"latest": {"num_versions": 1}})
        assert answered(server)[0] == "2"


def test_load_is_refused_when_reload_is_off(tmp_path: Path) -> None:
    with reloading(tmp_path, reload="off") as (server, root):
        models.words(root, version=2, seed=2)
        assert load(server, "words", status=501)["code"] == "unsupported"
        assert answered(server)[0] == "1"


def test_one_of_several_replicas_changes_no_models_alone(tmp_path: Path) -> None:
    with reloading(tmp_path, replicated="1") as (server, root):
        models.words(root, version=2, seed=2)
        for path in ("load", "unload"):
            answer = server.client.post(f"/v2/repository/models/words/{path}")
            assert answer.status_code == 501
            assert "SEQSERVE_REPLICATED is set" in answer.json()["error"] and "SEQSERVE_RELOAD=poll" in answer.json()["error"]
        assert answered(server)[0] == "1"


def test_replicas_that_poll_the_models_folder_take_loads(tmp_path: Path) -> None:
    never = {"service.supervisor.reload.POLL_SECONDS": 600}
    with constants(never), reloading(tmp_path, replicated="1", reload="poll") as (server, root):
        models.words(root, version=2, seed=2)
        load(server, "words")
        assert answered(server)[0] == "2"
        assert "versions.toml" in load(server, "words", status=501, policy={"latest": {"num_versions": 1}})["error"]
        assert "versions.toml" in server.client.post("/v2/repository/models/words/unload").json()["error"]
        assert answered(server)[0] == "2"


# Sessions.


def test_session_stays_with_its_first_version(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    copy_version(root, "accumulator", 2)
    load(server, "accumulator")
    assert summed(server, [1], "old") == ("1", 3)
    assert summed(server, [1], "new") == ("2", 1)
    assert "belongs to accumulator version 1" in refused(server, 409, "session_conflict", session="old", version="2")
    assert summed(server, [1], "old", start=True) == ("2", 1), "the session was restarted"


def test_chunk_is_validated_for_the_session_s_version(reloaded: Reloaded, tmp_path: Path) -> None:
    server, root, _ = reloaded
    models.sensors(root, features=3)
    load(server, "sensors")
    assert server.infer("sensors", [[[0.1, 0.2, 0.3]]], session="old").status_code == 200
    models.sensors(tmp_path / "wider", features=4)
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
    models.sensors(root, features=3)
    load(server, "sensors")

    def send(stream: ClientConnection, features: int, **options: Any) -> tuple[str, int]:
        stream.send(json.dumps({"input": [[0.1] * features], **options}))
        reply = json.loads(stream.recv(timeout=30))
        return reply.get("version") or reply["code"], reply.get("session", {}).get("steps", 0)

    def open_stream(query: str) -> ClientConnection:
        return connect(server.address.replace("http", "ws") + f"/stream?model=sensors&{query}", proxy=None)

    with open_stream("session=old") as first:
        assert send(first, 3) == ("1", 1)
        models.sensors(tmp_path / "wider", features=4)
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
    eventually(lambda: reloaded.events("unloaded"), within_seconds=10)
    refused(server, 404, "unknown_model", session="old")


def test_session_that_outlasts_its_version_gets_one_409(tmp_path: Path) -> None:
    with constants({"service.supervisor.reload.UNLOAD_SECONDS": 3}), reloading(tmp_path) as (server, root):
        assert summed(server, [1, 1], "old") == ("1", 2)
        copy_version(root, "accumulator", 2)
        load(server, "accumulator", policy={"latest": {"num_versions": 1}})
        assert summed(server, [1], "old") == ("1", 3)
        eventually(lambda: server.events("unloaded"), within_seconds=10)
        assert "was unloaded" in refused(server, 409, "session_lost", session="old")
        assert summed(server, [1], "old") == ("2", 1)
        assert server.metric("seqserve_sessions_ended_total", reason="unloaded") == 1


def test_sessions_of_a_replaced_version_keep_its_weights(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    text = root / "accumulator" / "1" / spec.MODEL
    text.write_text('description = "the same, described"\n' + text.read_text())
    load(server, "accumulator")
    assert reloaded.events("loaded")
    assert summed(server, [1], "old", version="1") == ("1", 3)
    assert summed(server, [1], "new", version="1") == ("1", 1)


# Processes.


def test_restarted_engine_serves_what_was_loaded_last(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    models.words(root, version=2, seed=2)
    load(server, "words", policy={"latest": {"num_versions": 1}})
    before = answered(server)
    kill(server, "engine-0")
    assert answered(server) == before


def test_restarted_processes_leave_out_a_broken_model(
    reloaded: Reloaded,
) -> None:
    server, root, _ = reloaded
    (root / "words" / "1" / spec.WEIGHTS).write_bytes(b"")
    (root / "words" / "1" / spec.TOKENIZER).write_bytes(b"")
    for child in ("engine-0", "frontend-0", "frontend-1"):
        kill(server, child)
    assert summed(server, [1], "s") == ("1", 1)
    assert "words version 1 cannot be served" in refused(server, 503, "unavailable", "words")
    models.words(root)
    load(server, "words")
    assert answered(server)[0] == "1"


def kill(server: Server, child: str) -> None:
    """Kill a process and wait until its successor serves."""
    before = len(server.events("started"))
    os.kill(server.pid(child), signal.SIGKILL)
    eventually(lambda: len(server.events("started")) > before and server.ready(), within_seconds=30)


# A polled folder.


@pytest.fixture(scope="module")
def polled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    polling, folder = {"service.supervisor.reload.POLL_SECONDS": POLL_SECONDS}, tmp_path_factory.mktemp("polled")
    with constants(polling), reloading(folder, reload="poll", versions="latest") as both:
        yield both


def test_polled_folder_is_served_as_it_changes(polled: tuple[Server, Path]) -> None:
    server, root = polled
    models.words(root, version=2, seed=2)
    eventually(lambda: answered(server)[0] == "2", within_seconds=10)
    models.tagger(root)
    eventually(lambda: server.infer("tagger", [TEXT]).status_code == 200, within_seconds=10)
    (root / spec.ALIASES).write_text('any = "words"')
    eventually(lambda: server.infer("any", [TEXT]).status_code == 200, within_seconds=10)
    shutil.rmtree(root / "tagger")
    eventually(lambda: server.infer("tagger", [TEXT]).status_code == 404, within_seconds=10)


def test_version_is_served_when_its_copy_is_complete(polled: tuple[Server, Path], tmp_path: Path) -> None:
    server, root = polled
    before = answered(server)[0]
    models.words(tmp_path, version=3, seed=3)
    source, copy = tmp_path / "words" / "3", root / "words" / "3"
    copy.mkdir()
    shutil.copy(source / spec.MODEL, copy)
    eventually(lambda: index(server, "words")["3"][0] == "UNAVAILABLE" and index(server, "words")["3"][1], within_seconds=10)
    assert answered(server)[0] == before
    for file in (spec.TOKENIZER, spec.WEIGHTS):
        shutil.copy(source / file, copy)
    eventually(lambda: answered(server)[0] == "3", within_seconds=10)
    assert index(server, "words")["3"] == ("READY", "")
