"""/metrics always answers soon, whichever other process stands still. Runs only when the folder is named: `make test-long`."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.serving import Server, eventually, serving

LIMIT_SECONDS = 0.3
SCRAPES = 10
CONNECTIONS = 16
"""With two frontends, each accepts some of these connections."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the supervisor may have replaced it meanwhile
            os.kill(pid, signal.SIGCONT)


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
