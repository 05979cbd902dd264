"""Requests survive when processes end and when the service shuts down. The tests share a service with two engines, in their order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.planted import Gate
from tests.serving import Server, alive, eventually, idle, is_fresh, serving

QUICK = [[[0.1, 0.2, 0.3]] * 5]
PATIENT_SECONDS = 300
"""A deadline that a busy machine meets through two restarts."""


@pytest.fixture(scope="module")
def shared(models_folder: Path, gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--device", "cpu,cpu", "--health-port", "0")
    patient = {"lame_duck_seconds": "60", "max_deadline_ms": str(1000 * PATIENT_SECONDS)}
    with serving(models_folder, tmp_path_factory.mktemp("log"), *flags, **patient) as server:
        yield server


@pytest.fixture
def two_engines(shared: Server) -> Server:
    eventually(lambda: idle(shared))
    return shared


def ask(server: Server, inputs: list[Any]) -> httpx.Response:
    """Send a request on a new connection."""
    body = {"model": "sensors", "inputs": inputs, "deadline_ms": 1000 * PATIENT_SECONDS}
    return httpx.post(f"{server.address}/infer", json=body, timeout=2 * PATIENT_SECONDS, trust_env=False)


def scores(response: httpx.Response) -> dict[str, float]:
    """Return the scores of one sequence; the last digits depend on where it was cut into chunks."""
    outputs: list[dict[str, dict[str, float]]] = response.json()["outputs"]
    return outputs[0]["scores"]


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


def test_both_engines_have_loaded_before_the_service_is_ready(two_engines: Server) -> None:
    assert {event["process"] for event in two_engines.events("loaded")} == {"engine-0", "engine-1"}
    assert {model["device"] for model in two_engines.client.get("/models").json()["models"]} == {"cpu, cpu"}
    assert two_engines.metric("seqserve_max_batch_sequences") == 64, "the limit of one batch, not the sum over engines"
    assert ask(two_engines, QUICK).status_code == 200
    here = two_engines.scrape()
    there = eventually(lambda: is_fresh(text := httpx.get(f"{two_engines.health}/metrics").text) and text)
    assert names(there) == names(here) and 'seqserve_requests_total{model="sensors"' in there


def test_request_that_ended_two_engines_is_refused_and_others_are_answered(two_engines: Server, gate: Gate) -> None:
    """Each engine has a request. While both engines restart, requests are refused."""
    undisturbed = scores(ask(two_engines, QUICK))
    with ThreadPoolExecutor() as pool:
        gate.let(0)
        requests = in_flight(two_engines, pool, 2)
        os.kill(two_engines.pid("engine-0"), signal.SIGKILL)
        eventually(lambda: two_engines.metric("seqserve_rerun_total") == 1)
        assert two_engines.ready(), "the other engine serves"
        os.kill(two_engines.pid("engine-1"), signal.SIGKILL)
        eventually(lambda: not two_engines.ready())
        refused = ask(two_engines, QUICK)
        assert two_engines.client.get("/healthz").status_code == 200
        gate.open()
        replies = sorted((request.result() for request in requests), key=lambda reply: reply.status_code)
    for reply in (refused, replies[1]):
        assert (reply.status_code, reply.json()["code"]) == (503, "engine_lost")
    assert int(refused.headers["retry-after"]) >= 1 and "not sent to a third" in replies[1].json()["error"]
    assert scores(replies[0]) == pytest.approx(undisturbed, abs=1e-5)
    eventually(lambda: restarts(two_engines, "engine") == 2)


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


def test_start_error_is_the_last_line_and_the_exit_status(models_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = start(models_folder, "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr.splitlines()[-1]


def start(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a service that is expected to fail. It takes free ports unless the flags name others."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(folder), "--port", "0", "--grpc-port", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)
