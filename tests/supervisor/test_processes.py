"""Requests survive when a process ends, hangs or shuts down. Tests that end a process share a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.ipc.heartbeat import PATIENCE_SECONDS
from service.settings import BODY_CEILING_BYTES, Settings
from tests import models
from tests.serving import Server, SharedServer, alive, asking, eventually, serving, worked_seconds
from tests.steady import open_files

QUICK = [[[0.1, 0.2, 0.3]] * 5]
CALL = {"model": "sensors", "inputs": QUICK}
SLOW = [[[0.1, 0.2, 0.3]] * 30_000]
LONG_DEADLINES = {"max_deadline_ms": "300000"}
"""A busy machine takes longer than the default allows."""


@pytest.fixture(scope="module")
def shared(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with closing(
        SharedServer(models_folder, tmp_path_factory.mktemp("log"), lame_duck_seconds="10", **LONG_DEADLINES)
    ) as shared:
        yield shared


@pytest.fixture(scope="module")
def shared_two_engines(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with closing(
        SharedServer(models_folder, tmp_path_factory.mktemp("log"), "--device", "cpu,cpu", **LONG_DEADLINES)
    ) as shared:
        yield shared


@pytest.fixture
def own(shared: SharedServer) -> Iterator[Server]:
    """An idle server, which the test may end."""
    with shared.lent() as server:
        yield server


@pytest.fixture
def two_engines(shared_two_engines: SharedServer) -> Iterator[Server]:
    """An idle server with two engines, which the test may end."""
    with shared_two_engines.lent() as server:
        yield server


def ask(server: Server, inputs: list[Any], **options: Any) -> httpx.Response:
    """Send a request on a new connection."""
    body = {"model": "sensors", "inputs": inputs, "deadline_ms": 300_000, **options}
    return httpx.post(f"{server.address}/infer", json=body, timeout=330, trust_env=False)


def scores(response: httpx.Response) -> dict[str, float]:
    """Return the scores of one sequence; the last digits depend on where it was cut into chunks."""
    outputs: list[dict[str, dict[str, float]]] = response.json()["outputs"]
    return outputs[0]["scores"]


def in_flight(server: Server, inputs: list[Any], pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Send a request and return when the engine computes it."""
    parsed_before = server.metric("seqserve_stage_seconds_count", model="sensors", stage="parse")
    future = pool.submit(ask, server, inputs)
    eventually(lambda: server.metric("seqserve_stage_seconds_count", model="sensors", stage="parse") > parsed_before, 10)
    time.sleep(0.1)  # from the frontend into a batch
    return future


def in_flight_together(server: Server, inputs: list[Any], pool: ThreadPoolExecutor, count: int) -> list[Future[httpx.Response]]:
    """Send several requests and return when the service has accepted all of them."""
    futures = [pool.submit(ask, server, inputs) for _ in range(count)]
    eventually(lambda: server.metric("seqserve_requests_in_flight") == count, 60)
    return futures


def restarts(server: Server, process: str, **reason: str) -> float:
    return server.metric("seqserve_process_restarts_total", process=process, **reason)


def test_request_that_ended_two_engines_is_not_run_again(own: Server) -> None:
    rerun = own.metric("seqserve_rerun_total")
    with ThreadPoolExecutor() as pool:
        running = in_flight(own, [SLOW[0] * 4], pool)
        first = own.pid("engine-0")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: own.metric("seqserve_rerun_total") == rerun + 1, 20)
        os.kill(own.pid("engine-0"), signal.SIGKILL)
        answer = running.result(60)
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")
    eventually(own.ready, 60)


def test_request_in_flight_survives_the_end_of_its_engine(own: Server) -> None:
    undisturbed = scores(ask(own, SLOW))
    rerun, restarted = own.metric("seqserve_rerun_total"), restarts(own, "engine")
    with ThreadPoolExecutor() as pool:
        running = in_flight(own, SLOW, pool)
        os.kill(own.pid("engine-0"), signal.SIGKILL)
        assert scores(running.result(60)) == pytest.approx(undisturbed, abs=1e-5)
    assert own.metric("seqserve_rerun_total") == rerun + 1
    eventually(lambda: restarts(own, "engine") == restarted + 1, 60)


def test_requests_get_503_while_the_only_engine_restarts(own: Server) -> None:
    os.kill(own.pid("engine-0"), signal.SIGKILL)
    eventually(lambda: not own.ready(), 10)
    refused = ask(own, QUICK)
    assert refused.status_code == 503
    assert refused.json()["code"] == "engine_lost"
    assert int(refused.headers["retry-after"]) >= 1
    assert own.client.get("/healthz").status_code == 200
    eventually(own.ready, 60)
    assert ask(own, QUICK).status_code == 200


def test_deadline_that_passes_while_the_engine_restarts_gives_503(own: Server) -> None:
    killed = own.pid("engine-0")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, own, SLOW, deadline_ms=5_000)
        eventually(lambda: own.metric("seqserve_requests_in_flight") == 1, 10)
        os.kill(killed, signal.SIGKILL)
        successor = eventually(lambda: (newest := own.pid("engine-0")) != killed and newest)
        os.kill(successor, signal.SIGSTOP)
        answer = running.result(60)
        os.kill(successor, signal.SIGCONT)
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")


def test_stopped_engine_is_noticed_and_replaced(own: Server) -> None:
    stopped, hung = own.pid("engine-0"), restarts(own, "engine", reason="hung")
    os.kill(stopped, signal.SIGSTOP)
    answer = ask(own, QUICK)
    assert answer.status_code == 200
    assert not alive(stopped)
    eventually(lambda: restarts(own, "engine", reason="hung") == hung + 1, 60)


def test_long_batch_does_not_count_as_hung(tmp_path: Path) -> None:
    """The model's sequences cannot be cut into chunks."""
    models.sensors(tmp_path / "models", bidirectional=True, max_steps=100 * len(SLOW[0]))
    with serving(tmp_path / "models", tmp_path, max_body_bytes=str(BODY_CEILING_BYTES), **LONG_DEADLINES) as own:
        before, times, seconds = own.pid("engine-0"), 2, 0.0
        while seconds <= PATIENCE_SECONDS:
            start = time.monotonic()
            assert ask(own, [SLOW[0] * times]).status_code == 200
            seconds, times = time.monotonic() - start, times * 2
        assert own.pid("engine-0") == before


def test_killed_frontend_is_replaced(own: Server) -> None:
    answered = own.metric("seqserve_requests_total")
    assert ask(own, QUICK).status_code == 200
    killed = own.pid("frontend-0")
    assert own.metric("seqserve_requests_total") == answered + 1
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: own.pid("frontend-0") != killed, 60)
    eventually(own.ready, 60)
    assert ask(own, QUICK).status_code == 200
    assert own.metric("seqserve_requests_total") == answered + 2, "the totals of a dead process are kept"


def test_requests_of_a_killed_frontend_are_cancelled(own: Server) -> None:
    sequences, tokens = (own.metric(f"seqserve_{name}_total", model="sensors") for name in ("sequences", "tokens"))
    with ThreadPoolExecutor() as pool:
        requests = in_flight_together(own, [SLOW[0] * 4], pool, 3)
        os.kill(own.pid("frontend-0"), signal.SIGKILL)
        failed = [future for future in requests if isinstance(future.exception(60), httpx.TransportError)]
    assert failed, "the first requests may have been answered"
    eventually(own.ready, 60)
    assert ask(own, QUICK).status_code == 200
    answered = len(requests) - len(failed)
    assert own.metric("seqserve_sequences_total", model="sensors") == sequences + answered + 1
    computed = own.metric("seqserve_tokens_total", model="sensors") - tokens
    assert computed < (answered + 1) * 4 * len(SLOW[0]), "of three requests with as many each"


def test_short_request_does_not_wait_for_long_ones(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        long = in_flight_together(own, [SLOW[0] * 3], pool, 2)
        short_seconds = sorted(ask(own, QUICK).elapsed.total_seconds() for _ in range(9))
        responses = [request.result(120) for request in long]
        assert {response.status_code for response in responses} == {200}
        assert short_seconds[4] < 0.5 * min(response.elapsed.total_seconds() for response in responses)


def test_two_servers_run_side_by_side(server: Server, own: Server) -> None:
    assert server.address != own.address
    assert server.infer("sensors", QUICK).json() == own.infer("sensors", QUICK).json()


def ended_despite_signals(server: Server) -> bool:
    """Send SIGTERM to a service that ends. Returns whether it has ended."""
    server.process.terminate()
    return server.process.poll() is not None


def test_sigterm_loses_no_request(own: Server) -> None:
    """Clients send requests until the port is closed: every accepted request is answered with 200."""
    lost: list[str] = []
    answered = []
    stopping = threading.Event()

    def send_requests() -> None:
        with httpx.Client(base_url=own.address, timeout=30, trust_env=False) as client:
            while True:
                try:
                    answer = client.post("/infer", json={"model": "sensors", "inputs": QUICK})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                    # The port closes after the lame-duck time; the kernel resets connections that no frontend has accepted.
                    if not stopping.is_set():
                        lost.append(repr(error))
                    return
                answered.append(answer.status_code)

    with ThreadPoolExecutor() as pool:
        slow = in_flight(own, SLOW, pool)
        clients = [pool.submit(send_requests) for _ in range(4)]
        eventually(lambda: len(answered) > 20, 10)
        own.process.terminate()
        eventually(lambda: own.client.get("/readyz").status_code == 503, 10)
        assert ask(own, QUICK).status_code == 200, "during the lame-duck time the service still answers"
        stopping.set()
        assert slow.result(30).status_code == 200
        for client in clients:
            client.result(30)
    eventually(lambda: ended_despite_signals(own))
    assert own.process.returncode == 0
    assert lost == []
    assert set(answered) == {200}
    assert not any(alive(event["pid"]) for event in own.events("started"))


def test_frontends_share_the_connections_and_one_engine(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--frontends", "2", **LONG_DEADLINES) as own:
        with ExitStack() as held:
            before = open_files(own)
            for _ in range(32):
                client = held.enter_context(httpx.Client(base_url=own.address, trust_env=False))
                assert client.post("/infer", json=CALL).status_code == 200
            after = open_files(own)
            assert all(after[name] >= before[name] + 4 for name in ("frontend-0", "frontend-1")), (before, after)
        assert own.metric("seqserve_requests_total", outcome="ok") == 32
        os.kill(own.pid("frontend-1"), signal.SIGKILL)
        assert ask(own, QUICK).status_code == 200
        start = time.monotonic()
        assert own.stop(signal.SIGINT) == 0
        assert time.monotonic() - start < Settings().drain_seconds, "an interrupt does not wait for the drain"


def test_two_engines_load_before_ready_and_share_the_work(two_engines: Server) -> None:
    loaded = {event["process"] for event in two_engines.events("loaded")}
    assert loaded == {"engine-0", "engine-1"}
    assert {model["device"] for model in two_engines.client.get("/models").json()["models"]} == {"cpu, cpu"}
    engines = [two_engines.pid(name) for name in sorted(loaded)]
    before = [worked_seconds(pid) for pid in engines]
    with ThreadPoolExecutor(4) as pool:
        assert {answer.status_code for answer in pool.map(lambda _: ask(two_engines, SLOW), range(4))} == {200}
    worked = [worked_seconds(pid) - then for pid, then in zip(engines, before, strict=True)]
    assert min(worked) > 0.25 * sum(worked), "about half of it each"
    for place in ("0", "1"):
        assert two_engines.metric("seqserve_backlog_seconds", engine=place) < 0.01, "no work is left"
    assert two_engines.metric("seqserve_max_batch_sequences") == 64, "the limit of one batch, not the sum over engines"


def test_end_of_one_of_two_engines_loses_and_refuses_no_request(two_engines: Server) -> None:
    undisturbed, log_bytes = scores(ask(two_engines, SLOW)), two_engines.log_bytes
    models, restarted = len(two_engines.client.get("/models").json()["models"]), restarts(two_engines, "engine")

    def replaced() -> bool:
        """Whether the engine has been replaced; the service is ready all the time."""
        assert two_engines.ready()
        assert two_engines.metric("seqserve_ready") == 1
        return len(two_engines.events("loaded", since=log_bytes)) == models

    with ThreadPoolExecutor() as pool, ExitStack() as clients:
        slow = [in_flight(two_engines, SLOW, pool) for _ in range(2)]
        answered = clients.enter_context(asking(two_engines, *[CALL] * 3))
        so_far, other = len(answered), two_engines.pid("engine-0")
        os.kill(two_engines.pid("engine-1"), signal.SIGKILL)
        eventually(replaced, 60)
        assert [scores(request.result(60)) for request in slow] == [pytest.approx(undisturbed, abs=1e-5)] * 2
    assert {answer.status_code for answer in answered} == {200}
    assert len(answered) > so_far + 20
    assert two_engines.metric("seqserve_rerun_total") >= 1
    eventually(lambda: restarts(two_engines, "engine") == restarted + 1, 60)
    assert two_engines.pid("engine-0") == other


def test_stopped_engine_delays_only_its_own_requests(two_engines: Server) -> None:
    stopped, hung = two_engines.pid("engine-1"), restarts(two_engines, "engine", reason="hung")
    with asking(two_engines, *[CALL] * 4) as answered:
        eventually(lambda: len(answered) > 20, 10)
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: not alive(stopped), 60)
    assert {answer.status_code for answer in answered} == {200}
    waited = [answer for answer in answered if answer.elapsed.total_seconds() > PATIENCE_SECONDS / 2]
    assert len(waited) <= 4, "at most one for each client"
    eventually(lambda: restarts(two_engines, "engine", reason="hung") == hung + 1, 60)


def test_new_frontend_connects_to_all_engines(two_engines: Server) -> None:
    killed = two_engines.pid("frontend-0")
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: two_engines.pid("frontend-0") != killed, 60)
    eventually(two_engines.ready, 60)
    eventually(lambda: two_engines.client.get("/models").json()["models"][0]["device"] == "cpu, cpu", 60)
    assert ask(two_engines, QUICK).status_code == 200


def test_all_processes_end_with_the_supervisor(two_engines: Server) -> None:
    """One of the engines is stopped."""
    children = [two_engines.pid(name) for name in ("engine-0", "engine-1", "frontend-0")]
    os.kill(children[1], signal.SIGSTOP)
    os.kill(two_engines.process.pid, signal.SIGKILL)
    two_engines.process.wait()
    eventually(lambda: not any(alive(pid) for pid in children), 30)


def test_port_in_use_stops_the_start(server: Server, models_folder: Path) -> None:
    port = server.address.rpartition(":")[2]
    ended = start(models_folder, "--port", port)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "--port" in ended.stderr


def test_broken_model_stops_the_start(tmp_path: Path) -> None:
    models.words(tmp_path)
    weights = tmp_path / "words" / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ended = start(tmp_path)
    assert ended.returncode == 1
    assert "weights.safetensors" in ended.stderr.splitlines()[-1]


def test_misspelt_setting_stops_the_start(models_folder: Path) -> None:
    ended = start(models_folder, SEQSERVE_FRONTEND="2")
    assert ended.returncode == 2
    assert "SEQSERVE_FRONTEND" in ended.stderr
    assert "did you mean frontends" in ended.stderr


def test_missing_device_stops_the_start(models_folder: Path) -> None:
    ended = start(models_folder, "--device", "cuda:99")
    assert ended.returncode == 1
    assert "cuda:99" in ended.stderr.splitlines()[-1]


def start(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a service that is expected to fail. It takes free ports unless the flags name others."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(folder), "--port", "0", "--grpc-port", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)
