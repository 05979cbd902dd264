"""What happens to requests when a process ends, hangs or is told to stop. Each test has a server of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.ipc.heartbeat import PATIENCE_SECONDS
from tests import models
from tests.serving import Server, alive, asking, eventually, serving
from tests.steady import open_files

QUICK = [[[0.1, 0.2, 0.3]] * 5]
CALL = {"model": "sensors", "inputs": QUICK}
SLOW = [[[0.1, 0.2, 0.3]] * 30_000]


@pytest.fixture
def own(models_folder: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(models_folder, tmp_path, lame_duck_seconds="1.5") as running:
        yield running


@pytest.fixture
def two_engines(models_folder: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(models_folder, tmp_path, "--device", "cpu,cpu") as running:
        yield running


def ask(server: Server, inputs: list[Any], **options: Any) -> httpx.Response:
    """A request on a connection of its own."""
    body = {"model": "sensors", "inputs": inputs, "deadline_ms": 60_000, **options}
    return httpx.post(f"{server.address}/infer", json=body, timeout=60, trust_env=False)


def scores(answer: httpx.Response) -> dict[str, float]:
    """Of one sequence; where it was cut shows in the last digit."""
    found: dict[str, float] = answer.json()["outputs"][0]["scores"]
    return found


def in_flight(server: Server, inputs: list[Any], pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A request that the engine is busy with by now."""
    parsed = server.metric("seqserve_stage_seconds_count", model="sensors", stage="parse")
    future = pool.submit(ask, server, inputs)
    eventually(lambda: server.metric("seqserve_stage_seconds_count", model="sensors", stage="parse") > parsed, 10)
    time.sleep(0.1)  # from the front's hands into the turn
    return future


def worked_seconds(pid: int) -> float:
    """Processor time that a process has had."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_request_in_flight_survives_the_death_of_the_engine(own: Server) -> None:
    undisturbed = scores(ask(own, SLOW))
    with ThreadPoolExecutor() as pool:
        running = in_flight(own, SLOW, pool)
        os.kill(own.pid("engine-0"), signal.SIGKILL)
        assert scores(running.result(60)) == pytest.approx(undisturbed, abs=1e-5)
    assert own.metric("seqserve_rerun_total") == 1
    assert own.metric("seqserve_process_restarts_total", process="engine") == 1


def test_while_the_engine_is_replaced_requests_get_503_and_it_is_ready_again_within_10_seconds(own: Server) -> None:
    os.kill(own.pid("engine-0"), signal.SIGKILL)
    eventually(lambda: not own.ready(), 1)
    refused = ask(own, QUICK)
    assert refused.status_code == 503
    assert refused.json()["code"] == "engine_lost"
    assert int(refused.headers["retry-after"]) >= 1
    assert own.client.get("/healthz").status_code == 200
    eventually(own.ready, 10)
    assert ask(own, QUICK).status_code == 200


def test_a_request_whose_deadline_passes_while_the_engine_is_replaced_gets_503(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, own, SLOW, deadline_ms=1_000)
        eventually(lambda: own.metric("seqserve_requests_in_flight") == 1, 10)
        os.kill(own.pid("engine-0"), signal.SIGKILL)
        answer = running.result(10)
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")


def test_a_request_that_two_engines_died_with_is_not_run_a_third_time(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        running = in_flight(own, [SLOW[0] * 4], pool)
        first = own.pid("engine-0")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: own.metric("seqserve_rerun_total") == 1, 20)
        os.kill(own.pid("engine-0"), signal.SIGKILL)
        answer = running.result(10)
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")
    eventually(own.ready, 15)


def test_a_stopped_engine_is_noticed_and_replaced(own: Server) -> None:
    stopped = own.pid("engine-0")
    os.kill(stopped, signal.SIGSTOP)
    answer = ask(own, QUICK, deadline_ms=20_000)
    assert answer.status_code == 200
    assert not alive(stopped)
    assert own.metric("seqserve_process_restarts_total", process="engine", reason="hung") == 1


def test_a_long_turn_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """Of a model whose sequences cannot be cut."""
    models.sensors(tmp_path / "models", bidirectional=True)
    with serving(tmp_path / "models", tmp_path) as own:
        before = own.pid("engine-0")
        start = time.monotonic()
        assert ask(own, [SLOW[0] * 3]).status_code == 200
        assert time.monotonic() - start > PATIENCE_SECONDS, "too quick to tell a hang from a long turn"
        assert own.pid("engine-0") == before


def test_a_killed_front_is_replaced(own: Server) -> None:
    answered = own.metric("seqserve_requests_total")
    assert ask(own, QUICK).status_code == 200
    killed = own.pid("frontend-0")
    assert own.metric("seqserve_requests_total") == answered + 1
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: own.pid("frontend-0") != killed, 5)
    eventually(own.ready, 10)
    assert ask(own, QUICK).status_code == 200
    assert own.metric("seqserve_requests_total") == answered + 2, "what a dead process counted is kept"


def test_what_a_killed_front_had_asked_for_is_not_computed_in_vain(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        asked = [in_flight(own, [SLOW[0] * 4], pool) for _ in range(3)]
        os.kill(own.pid("frontend-0"), signal.SIGKILL)
        for future in asked:
            with pytest.raises(httpx.TransportError):
                future.result(10)
    eventually(own.ready, 10)
    assert ask(own, QUICK).status_code == 200
    assert own.metric("seqserve_sequences_total", model="sensors") == 1
    assert own.metric("seqserve_tokens_total", model="sensors") < 4 * len(SLOW[0]), "of three times as many"


def test_a_short_request_does_not_wait_for_long_ones(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        long = [in_flight(own, [SLOW[0] * 4], pool) for _ in range(2)]
        waited = sorted(ask(own, QUICK).elapsed.total_seconds() for _ in range(9))
        assert not any(one.done() for one in long)
        assert waited[4] < 0.1
        assert {one.result(60).status_code for one in long} == {200}


def test_the_other_processes_end_with_the_supervisor(own: Server) -> None:
    children = [own.pid("engine-0"), own.pid("frontend-0")]
    os.kill(own.process.pid, signal.SIGKILL)
    own.process.wait()
    eventually(lambda: not any(alive(pid) for pid in children), 2)


def test_a_stopped_engine_too_ends_with_the_supervisor(own: Server) -> None:
    engine = own.pid("engine-0")
    os.kill(engine, signal.SIGSTOP)
    os.kill(own.process.pid, signal.SIGKILL)
    own.process.wait()
    eventually(lambda: not alive(engine), 2)


def test_sigterm_drains_and_nothing_is_lost(own: Server) -> None:
    """Callers keep asking until the port is closed: whatever was accepted is answered with 200."""
    lost: list[str] = []
    answered = []
    stopping = threading.Event()

    def keep_asking() -> None:
        with httpx.Client(base_url=own.address, timeout=30, trust_env=False) as client:
            while True:
                try:
                    answer = client.post("/infer", json={"model": "sensors", "inputs": QUICK})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as fault:
                    # When the lame-duck time is over the port closes; what the kernel had not handed over is reset.
                    if not stopping.is_set():
                        lost.append(repr(fault))
                    return
                answered.append(answer.status_code)

    with ThreadPoolExecutor() as pool:
        slow = in_flight(own, SLOW, pool)
        askers = [pool.submit(keep_asking) for _ in range(4)]
        eventually(lambda: len(answered) > 20, 10)
        own.process.terminate()
        eventually(lambda: own.client.get("/readyz").status_code == 503, 1)
        assert ask(own, QUICK).status_code == 200, "a lame duck still serves"
        stopping.set()
        assert slow.result(30).status_code == 200
        for asker in askers:
            asker.result(30)
    assert own.process.wait(30) == 0
    assert lost == []
    assert set(answered) == {200}
    assert not any(alive(event["pid"]) for event in own.events("started"))


def test_an_interrupt_ends_the_service_at_once(own: Server) -> None:
    start = time.monotonic()
    assert own.stop(signal.SIGINT) == 0
    assert time.monotonic() - start < 5


def test_several_fronts_feed_one_engine(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--frontends", "2") as own:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(own, QUICK).status_code, range(40)))
        assert set(answers) == {200}
        assert own.metric("seqserve_requests_total", outcome="ok") == 40
        os.kill(own.pid("frontend-1"), signal.SIGKILL)
        assert ask(own, QUICK).status_code == 200


def test_connections_spread_over_all_fronts(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--frontends", "2") as own, ExitStack() as held:
        before = open_files(own)
        for _ in range(32):
            caller = held.enter_context(httpx.Client(base_url=own.address, trust_env=False))
            assert caller.post("/infer", json=CALL).status_code == 200
        after = open_files(own)
        assert all(after[name] >= before[name] + 4 for name in ("frontend-0", "frontend-1")), (before, after)


def test_engines_start_before_the_service_says_that_it_is_ready_and_share_the_work(two_engines: Server) -> None:
    loaded = {event["process"] for event in two_engines.events("loaded")}
    assert loaded == {"engine-0", "engine-1"}
    assert {one["device"] for one in two_engines.client.get("/models").json()["models"]} == {"cpu, cpu"}
    engines = [two_engines.pid(name) for name in sorted(loaded)]
    before = [worked_seconds(pid) for pid in engines]
    with ThreadPoolExecutor(4) as pool:
        assert {answer.status_code for answer in pool.map(lambda _: ask(two_engines, SLOW), range(4))} == {200}
    worked = [worked_seconds(pid) - then for pid, then in zip(engines, before, strict=True)]
    assert min(worked) > 0.25 * sum(worked), "half of it each, more or less"
    for place in ("0", "1"):
        assert two_engines.metric("seqserve_backlog_seconds", engine=place) < 0.01, "all is done"
    assert two_engines.metric("seqserve_max_batch_sequences") == 64, "of a turn, and not of all engines together"


def test_the_death_of_one_of_two_engines_loses_no_request_and_nobody_is_refused(two_engines: Server) -> None:
    undisturbed, loaded = scores(ask(two_engines, SLOW)), len(two_engines.events("loaded"))

    def replaced() -> bool:
        """The service has to be ready whenever this is asked."""
        assert two_engines.ready()
        assert two_engines.metric("seqserve_ready") == 1
        return len(two_engines.events("loaded")) == loaded * 3 / 2

    with asking(two_engines, *[CALL] * 3) as answered, ThreadPoolExecutor() as pool:
        slow = [in_flight(two_engines, SLOW, pool) for _ in range(2)]
        so_far, other = len(answered), two_engines.pid("engine-0")
        os.kill(two_engines.pid("engine-1"), signal.SIGKILL)
        eventually(replaced, 20)
        assert [scores(one.result(60)) for one in slow] == [pytest.approx(undisturbed, abs=1e-5)] * 2
    assert {answer.status_code for answer in answered} == {200}
    assert len(answered) > so_far + 20
    assert two_engines.metric("seqserve_rerun_total") >= 1
    assert two_engines.metric("seqserve_process_restarts_total", process="engine") == 1
    assert two_engines.pid("engine-0") == other


def test_what_a_stopped_engine_has_waits_for_its_end_and_nothing_else_does(two_engines: Server) -> None:
    stopped = two_engines.pid("engine-1")
    with asking(two_engines, *[CALL] * 4) as answered:
        eventually(lambda: len(answered) > 20, 10)
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: not alive(stopped), 10)
    assert {answer.status_code for answer in answered} == {200}
    waited = [answer for answer in answered if answer.elapsed.total_seconds() > PATIENCE_SECONDS / 2]
    assert len(waited) <= 4, "one for each caller, at most"
    assert two_engines.metric("seqserve_process_restarts_total", process="engine", reason="hung") == 1


def test_a_new_front_meets_all_engines(two_engines: Server) -> None:
    killed = two_engines.pid("frontend-0")
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: two_engines.pid("frontend-0") != killed, 5)
    eventually(two_engines.ready, 10)
    eventually(lambda: two_engines.client.get("/models").json()["models"][0]["device"] == "cpu, cpu", 5)
    assert ask(two_engines, QUICK).status_code == 200


def test_two_servers_run_side_by_side(own: Server, models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path) as other:
        assert own.address != other.address
        assert ask(own, QUICK).json() == ask(other, QUICK).json()


def test_a_port_that_is_taken_stops_the_start_and_names_the_way_out(own: Server, models_folder: Path) -> None:
    port = own.address.rpartition(":")[2]
    ended = start(models_folder, "--port", port)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "--port" in ended.stderr


def test_a_broken_model_stops_the_start_and_is_named(tmp_path: Path) -> None:
    models.words(tmp_path)
    weights = tmp_path / "words" / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ended = start(tmp_path, "--port", "0")
    assert ended.returncode == 1
    assert "weights.safetensors" in ended.stderr.splitlines()[-1]


def test_a_setting_with_a_typo_stops_the_start(models_folder: Path) -> None:
    ended = start(models_folder, "--port", "0", SEQSERVE_FRONTEND="2")
    assert ended.returncode == 2
    assert "SEQSERVE_FRONTEND" in ended.stderr
    assert "did you mean frontends" in ended.stderr


def test_a_device_that_is_not_there_stops_the_start(models_folder: Path) -> None:
    ended = start(models_folder, "--port", "0", "--device", "cuda:99")
    assert ended.returncode == 1
    assert "cuda:99" in ended.stderr.splitlines()[-1]


def start(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)
