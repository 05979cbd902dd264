"""POST /debug/trace: its parameters. test_trace.py plays the engines, and tests/long/test_debug.py traces a running service."""

from __future__ import annotations

import httpx
import pytest

from service.access.scopes import Scope
from tests.frontend.conftest import Guarded
from tests.frontend.in_process import InProcess
from tests.serving import Server

QUESTION = "how far is the sea ?"
WORDS = {"model": "words", "inputs": [QUESTION]}
SENSORS = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 20]}


def trace(server: Server | InProcess, **query: object) -> httpx.Response:
    return server.client.post("/debug/trace", params=query)  # type: ignore[arg-type]


def test_without_debug_trace_gets_404_and_the_setting(local: InProcess) -> None:
    answer = trace(local)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")
    assert "SEQSERVE_DEBUG" in answer.json()["error"] and "--debug" in answer.json()["error"]
    assert "/debug/trace" not in local.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    "query, field, part",
    [
        ({"batches": 0}, "batches", "greater than or equal to 1"),
        ({"batches": 1001}, "batches", "batches is 1001"),
        ({"batches": "many"}, "batches", "many"),
        ({"seconds": 0}, "seconds", "greater than 0"),
        ({"seconds": 61}, "seconds", "60"),
        ({"seconds": "nan"}, "seconds", "nan"),
        ({"batch": 5}, "batch", "known parameters are batches, seconds"),
    ],
)
def test_invalid_parameter_is_named(guarded: Guarded, query: dict[str, object], field: str, part: str) -> None:
    answer = guarded.send("POST", "/debug/trace", guarded.scoped[Scope.DEBUG], params=query)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_input", field)
    assert part in answer.json()["error"]
