"""Health checks and /metrics answer soon, whichever other process hangs and however many requests arrive.

Runs only when the folder is named: `make test-all`.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from loadtest.generator.job import Job
from loadtest.generator.process import run_in_process
from loadtest.target import Target
from tests.long.health_checks import LIMITS_SECONDS, Checks
from tests.serving import Server, eventually, serving, stopped

LIMIT_SECONDS = 0.3
SCRAPES = 10
CONNECTIONS = 16
"""With two frontends, each accepts some of these connections."""


def scrape(client: httpx.Client) -> float:
    """Return the seconds of one scrape."""
    before = time.monotonic()
    assert client.get("/metrics").status_code == 200
    return time.monotonic() - before


def connection_to_a_live_frontend(server: Server, clients: list[httpx.Client]) -> httpx.Client:
    for client in clients:
        try:
            client.get("/healthz", timeout=1.0)
        except httpx.TimeoutException:
            continue
        return client
    raise AssertionError("every connection belongs to the stopped frontend")


@pytest.mark.parametrize("names", [["engine-0"], ["frontend-1"], ["engine-0", "frontend-1"]], ids=" and ".join)
def test_metrics_answer_within_300_ms_while_processes_are_stopped(
    models_folder: Path, tmp_path: Path, names: list[str]
) -> None:
    with serving(models_folder, tmp_path, "--frontends", "2") as server, ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=server.address, timeout=30, trust_env=False)) for _ in range(CONNECTIONS)
        ]
        for client in clients:
            assert client.post("/infer", json={"model": "words", "inputs": ["how far ?"]}).status_code == 200
        before = server.metric("seqserve_requests_accepted_total")
        assert before == CONNECTIONS
        with ExitStack() as stop:
            for name in names:
                stop.enter_context(stopped(server.pid(name)))
            client = connection_to_a_live_frontend(server, clients)
            seconds = [scrape(client) for _ in range(SCRAPES)]
            assert statistics.median(seconds) < LIMIT_SECONDS, seconds
            assert f"seqserve_requests_accepted_total {before}" in client.get("/metrics").text
        eventually(server.ready, 60)


def test_metrics_answer_within_300_ms_while_the_supervisor_is_stopped(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path) as server:
        scrape(server.client)
        with stopped(server.process.pid):
            seconds = [scrape(server.client) for _ in range(SCRAPES)]
        assert statistics.median(seconds) < LIMIT_SECONDS, seconds


# Overload.

CALLERS = 1000
OVERLOAD = 20
OVERLOAD_SECONDS = 20.0
WARM_UP_SECONDS = 2.0


def checks_during_overload(server: Server) -> Checks:
    """Send OVERLOAD times as many requests as the service answers, over CALLERS connections, and checks to the health port."""
    parts = urlsplit(server.address)
    body = json.dumps({"model": "words", "inputs": ["how far is the sea ?"]}).encode()
    requests = [Target.of(server.address, "/infer").request(body)]
    job = Job("http", str(parts.hostname), int(parts.port or 0), "", requests, "answer", [[]], callers=64, seconds=2, warm_up=1)
    answered = run_in_process(job).answers / job.seconds
    job.callers, job.warm_up, job.seconds = CALLERS, WARM_UP_SECONDS, OVERLOAD_SECONDS
    offered = 0.0
    # A busy machine may have hidden the capacity of the service.
    while offered < OVERLOAD * answered:
        job.rate = offered = OVERLOAD * answered
        checks, answered = checked(server, job)
    return checks


def checked(server: Server, job: Job) -> tuple[Checks, float]:
    """Run a load. Returns the checks meanwhile, and the answers per second."""
    checks = Checks()
    with ThreadPoolExecutor(1) as pool:
        overload = pool.submit(run_in_process, job)
        checking = threading.Timer(WARM_UP_SECONDS, checks.run, [server.health])
        checking.start()
        try:
            result = overload.result()
        finally:
            checks.end()
            checking.join()
    answered = result.answers / result.seconds
    print(f"\n{job.rate:.0f} requests/s are due and {answered:.0f} answered; {checks}")
    return checks, answered


def test_health_port_answers_in_time_during_overload(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(models_folder, tmp_path, "--health-port", "0", frontends="2") as server, capsys.disabled():
        checks = checks_during_overload(server)
    assert set(checks.seconds) == set(LIMITS_SECONDS) and not checks.late()
