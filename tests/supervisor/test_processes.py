"""Models are replaced, and processes end, while a service with two engines answers. The tests share the service, in their order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tritonclient import grpc as triton
from websockets.sync.client import connect

from loadtest.generator.loops import clock_of
from service.cli import main
from service.modeling import spec
from tests import models
from tests.planted import Gate
from tests.reloading import TEXT, answered, load, unload
from tests.serving import Server, alive, asking, eventually, idle, is_fresh, serving

SESSIONS = ("old", "new", "other", "s")
QUICK = [[[0.1, 0.2, 0.3]] * 5]
PATIENT_SECONDS = 300
"""A deadline that a busy machine meets through two restarts."""


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


def ask(server: Server, inputs: list[Any]) -> httpx.Response:
    """Send a request on a new connection."""
    body = {"model": "sensors", "inputs": inputs, "deadline_ms": 1000 * PATIENT_SECONDS}
    return httpx.post(f"{server.address}/infer", json=body, timeout=2 * PATIENT_SECONDS, trust_env=False)


def in_flight(server: Server, pool: ThreadPoolExecutor, count: int) -> list[Future[httpx.Response]]:
    """Send requests one after the other, and return when engines have them all. The gate must be closed."""
    futures = []
    for _ in range(count):
        before = arrived(server)
        futures.append(pool.submit(ask, server, QUICK))
        eventually(lambda before=before: arrived(server) > before)  # type: ignore[misc]
    return futures


def arrived(server: Server) -> float:
    return server.metric("seqserve_stage_seconds_count", model="sensors", stage="channel")


def restarts(server: Server, process: str) -> float:
    return server.metric("seqserve_process_restarts_total", process=process, reason="ended")


def names(metrics: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))


@pytest.fixture(scope="module")
def started(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A service with two engines that started with two good models and a model without weights."""
    scratch = tmp_path_factory.mktemp("reloading")
    root = scratch / "models"
    models.words(root)
    models.sensors(root)
    models.words(root, "weightless")
    (root / "weightless" / "1" / spec.WEIGHTS).write_bytes(b"")
    (root / spec.ALIASES).write_text('any = "weightless"\npinned = "weightless/1"\n')
    patient = {"lame_duck_seconds": "60", "max_deadline_ms": str(1000 * PATIENT_SECONDS)}
    flags = ("--device", "cpu,cpu", "--health-port", "0")
    with serving(root, scratch, *flags, strict="0", **patient) as server:
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


@pytest.fixture
def two_engines(started: tuple[Server, Path]) -> Server:
    """The service, which serves sensors, without requests in flight."""
    server, root = started
    models.sensors(root)
    load(server, "sensors")
    eventually(lambda: idle(server))
    return server


def test_both_engines_have_loaded_before_the_service_is_ready(started: tuple[Server, Path]) -> None:
    two_engines, _ = started
    assert {event["process"] for event in two_engines.events("loaded")} == {"engine-0", "engine-1"}
    assert {model["device"] for model in two_engines.client.get("/models").json()["models"]} == {"cpu, cpu"}
    assert two_engines.metric("seqserve_max_batch_sequences") == 64, "the limit of one batch, not the sum over engines"
    assert ask(two_engines, QUICK).status_code == 200
    here = two_engines.scrape()
    there = eventually(lambda: is_fresh(text := httpx.get(f"{two_engines.health}/metrics").text) and text)
    assert names(there) == names(here) and 'seqserve_requests_total{model="sensors"' in there


def test_idle_service_uses_at_most_one_percent_of_a_core(started: tuple[Server, Path]) -> None:
    """The best of several intervals counts, in processor time: other work on the machine changes little of it."""
    server, _ = started
    clocks = [clock_of(pid) for pid in (server.process.pid, *(event["pid"] for event in server.events("started")))]

    def is_idle() -> bool:
        began, used = time.monotonic(), -sum(map(time.clock_gettime, clocks))
        time.sleep(2.0)
        return used + sum(map(time.clock_gettime, clocks)) <= 0.01 * (time.monotonic() - began)

    eventually(is_idle)


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
    eventually(lambda: len(reloaded.events("unloaded")) == 6)
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


def test_session_stays_with_its_first_version(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    shutil.copytree(root / "accumulator" / "1", root / "accumulator" / "2")
    load(server, "accumulator")
    assert summed(server, [1], "old") == ("1", 3)
    assert summed(server, [1], "new") == ("2", 1)
    assert "belongs to accumulator version 1" in refused(server, 409, "session_conflict", session="old", version="2")
    assert summed(server, [1], "old", start=True) == ("2", 1), "the session was restarted"


def test_sessions_of_an_unloaded_version_continue_to_their_end(reloaded: Reloaded) -> None:
    server, root, _ = reloaded
    assert summed(server, [1, 1], "old") == ("1", 2)
    shutil.copytree(root / "accumulator" / "1", root / "accumulator" / "2")
    load(server, "accumulator")
    unload(server, "accumulator")
    assert summed(server, [1], "old") == ("1", 3), "although a newer version was unloaded too"
    with connect(server.address.replace("http", "ws") + "/stream?model=accumulator&session=old", proxy=None) as socket:
        socket.send('{"input": [2]}')
        assert json.loads(socket.recv(60))["session"]["steps"] == 4
    assert server.infer("accumulator", [[1]], session="other").status_code == 404, "its code tells what was forgotten by now"
    refused(server, 404, "unknown_model", session="old", start=True)
    assert summed(server, [1], "old", end=True) == ("1", 5)
    eventually(lambda: len(reloaded.events("unloaded")) == 4)
    refused(server, 404, "unknown_model", session="old")


def test_requests_of_a_killed_frontend_are_cancelled_and_its_totals_kept(two_engines: Server, gate: Gate) -> None:
    assert ask(two_engines, QUICK).status_code == 200
    answered, sequences = (two_engines.metric(f"seqserve_{name}_total") for name in ("requests", "sequences"))
    killed = two_engines.pid("frontend-0")
    with ThreadPoolExecutor() as pool:
        gate.let(0)
        cut = in_flight(two_engines, pool, 3)
        os.kill(killed, signal.SIGKILL)
        assert all(isinstance(request.exception(), httpx.TransportError) for request in cut)
    eventually(lambda: two_engines.pid("frontend-0") != killed)
    gate.open()
    eventually(lambda: idle(two_engines))
    assert two_engines.metric("seqserve_sequences_total") <= sequences + 2, "a request that waited was not computed"
    assert ask(two_engines, QUICK).status_code == 200
    assert two_engines.metric("seqserve_requests_total") == answered + 4
    assert two_engines.metric("seqserve_requests_total", outcome="cut_off") == 3
    assert restarts(two_engines, "frontend") == 1


def test_sigterm_loses_no_request(two_engines: Server, gate: Gate) -> None:
    """Clients send requests until the port is closed: every accepted request is answered. The last test with this service."""
    answered, lost = list[int](), list[str]()
    stopping = threading.Event()

    def send_requests() -> None:
        with httpx.Client(base_url=two_engines.address, timeout=PATIENT_SECONDS, trust_env=False) as client:
            while True:
                try:
                    answered.append(client.post("/infer", json={"model": "sensors", "inputs": QUICK}).status_code)
                except httpx.TransportError as error:
                    # The port closes after the lame-duck time; the kernel resets connections that no frontend has accepted.
                    if not stopping.is_set():
                        lost.append(repr(error))
                    return

    def readiness() -> int:
        return httpx.get(f"{two_engines.health}/readyz", trust_env=False).status_code

    assert readiness() == 200
    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(send_requests) for _ in range(2)]
        eventually(lambda: len(answered) > 5)
        two_engines.process.terminate()
        eventually(lambda: readiness() == 503 and not two_engines.ready())
        assert httpx.get(f"{two_engines.health}/healthz", trust_env=False).status_code == 200
        assert ask(two_engines, QUICK).status_code == 200, "during the lame-duck time the service still answers"
        gate.let(0)
        eventually(lambda: two_engines.last_metric("seqserve_requests_in_flight") == len(clients))
        before = len(answered)
        stopping.set()
        two_engines.process.send_signal(signal.SIGINT)  # ends the lame-duck time
        gate.open()
        for client in clients:
            client.result()
    assert two_engines.process.wait(PATIENT_SECONDS) == 0
    assert lost == [] and set(answered) == {200} and len(answered) >= before + len(clients)
    assert not any(alive(event["pid"]) for event in two_engines.events("started"))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(two_engines.health.rpartition(":")[2])), 5).close()


def test_start_error_is_the_last_line_and_the_exit_status(models_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--models", str(models_folder), "--port", str(port), "--grpc-port", "0"]) == 1
    assert f"port {port}" in capsys.readouterr().err.splitlines()[-1]
