"""A request that ends engines while two frontends of a running service have other requests. `make test-all` runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests import models, planted
from tests.planted import Gate
from tests.serving import Server, client_ports, eventually, serving

PATIENT_SECONDS = 600
"""A deadline later than two restarts of an engine on a busy machine."""
PATIENT = {"max_deadline_ms": str(1000 * PATIENT_SECONDS)}
STEP = [0.1, 0.2, 0.3]
MARKED = {"model": "sensors", "inputs": [[STEP] * planted.STEPS], "deadline_ms": 1000 * PATIENT_SECONDS}
SLOW = MARKED | {"inputs": [[STEP] * 30_000]}
"""Computed in several batches: none is answered before the engine ends."""
BESIDE = 3
"""Requests of each frontend besides the request that ends engines."""


def clients_of(server: Server, frontend: str, count: int, stack: ExitStack) -> list[httpx.Client]:
    """Return clients whose connections one frontend serves, closed with the stack."""
    clients: list[httpx.Client] = []
    while len(clients) < count:
        client = stack.enter_context(httpx.Client(base_url=server.address, timeout=PATIENT_SECONDS, trust_env=False))
        port = client.get("/healthz").extensions["network_stream"].get_extra_info("client_addr")[1]
        if port in client_ports(server.pid(frontend)):
            eventually(lambda client=client: client.get("/readyz").status_code == 200)  # type: ignore[misc]
            clients.append(client)
    return clients


def arrived(server: Server) -> float:
    """Return how many requests have arrived at an engine."""
    return server.metric("seqserve_stage_seconds_count", model="sensors", stage="channel")


def test_request_that_ends_engines_harms_no_request_of_another_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of both frontends are suspects after the first end: no batch ends before the engine has them."""
    models.sensors(tmp_path / "models")
    ends = tmp_path / "ends"
    ends.touch()
    monkeypatch.setenv("ENDS", str(ends))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    planted.plant("ends,gated-device", monkeypatch)
    gate = Gate(tmp_path / "gate")
    with serving(tmp_path / "models", tmp_path, frontends="2", idle_seconds="3600", **PATIENT) as server, ExitStack() as stack:
        deadly, *own = clients_of(server, "frontend-0", BESIDE + 1, stack)
        beside = [*own, *clients_of(server, "frontend-1", BESIDE, stack)]
        callers = stack.enter_context(ThreadPoolExecutor(len(beside) + 1))
        before = arrived(server)
        gate.let(0)
        calls = [callers.submit(client.post, "/infer", json=SLOW) for client in beside]
        eventually(lambda: arrived(server) == before + len(beside))
        ends.write_text("launching\n" * 3)
        call = callers.submit(deadly.post, "/infer", json=MARKED)
        eventually(lambda: arrived(server) == before + len(beside) + 1)
        gate.open()
        refused = call.result()
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_lost")
        replies = [call.result() for call in calls]
        assert [reply.status_code for reply in replies] == [200] * len(beside), [reply.text[:200] for reply in replies]
        assert len([event for event in server.events("child ended") if event["child"].startswith("engine")]) == 2
        assert ends.read_text() == "launching\n", "a third engine would have ended"
        assert server.metric("seqserve_rerun_total") == len(beside) + 1
