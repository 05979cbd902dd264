"""POST /debug/trace: its parameters. test_trace.py plays the engines, and tests/long/test_debug.py traces a running service."""

from __future__ import annotations

import httpx
import pytest

from service.access.scopes import Scope
from tests.frontend.conftest import Guarded
from tests.frontend.in_process import InProcess
from tests.serving import Server

WORDS = {"model": "words", "inputs": ["how far is the sea ?"]}
SENSORS = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 20]}


def trace(server: Server | InProcess, **query: object) -> httpx.Response:
    return server.client.post("/debug/trace", params=query)  # type: ignore[arg-type]


def test_without_debug_trace_gets_404_and_the_setting(local: InProcess) -> None:
    answer = trace(local)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")
    assert "SEQSERVE_DEBUG" in answer.json()["error"] and "--debug" in answer.json()["error"]
    assert "/debug/trace" not in local.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("query", [{"batches": value} for value in (0, 1001, "many")] + [{"seconds": 61}, {"batch": 5}])
def test_invalid_parameter_is_named(guarded: Guarded, query: dict[str, object]) -> None:
    answer = guarded.send("POST", "/debug/trace", guarded.scoped[Scope.DEBUG], params=query)
    assert (answer.status_code, answer.json()["field"]) == (400, next(iter(query)))
