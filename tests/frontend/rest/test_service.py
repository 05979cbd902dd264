"""POST /infer to the real service: answers, the list of models, statistics, and the times of its stages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.frontend.rest.test_infer import QUESTION
from tests.kernels.families import cpu_backends
from tests.models import LABELS
from tests.serving import Server

COUNTS = {"request_success": 1, "count": 2, "exec_count": 1}
TIMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
STAGES = {
    **dict.fromkeys(("parse", "channel", "reply", "encode", "total"), 1),
    **dict.fromkeys(("queue", "stage_in", "device_wait", "compute", "stage_out"), 2),
}
"""How often each stage of a request with two inputs is counted."""


def test_models_are_listed_with_device_and_backends(server: Server) -> None:
    listed = server.client.get("/models").json()["models"]
    assert [(model["name"], model["version"], model["ready"], model["streams"]) for model in listed] == [
        *(("sensors", "1", True, True), ("words", "1", True, False), ("words", "2", True, False))
    ]
    assert (listed[0]["device"], listed[0]["backends"]) == ("cpu", [f"layers.0: {cpu_backends('lstm')[0]}"])
    assert listed[1]["head"]["labels"] == list(LABELS)
    assert "layers.0: folded table" in listed[1]["backends"]


def test_requests_and_their_stages_are_counted(server: Server) -> None:
    def counts() -> dict[str, float]:
        stages = {stage: server.metric("seqserve_stage_seconds_count", model="words", stage=stage) for stage in STAGES}
        named = {name: server.metric(f"nv_inference_{name}", model="words", version="2") for name in COUNTS}
        failed = server.metric("nv_inference_request_failure", model="words", reason="OTHER")
        return stages | named | {"ok": server.metric("seqserve_requests_total", model="words", outcome="ok"), "failed": failed}

    before = counts()
    assert [server.infer("words", inputs).status_code for inputs in ([QUESTION, "who"], [1])] == [200, 400]
    grown = {name: count - before[name] for name, count in counts().items()}
    assert grown == {**STAGES, "total": 2, **COUNTS, "ok": 1, "failed": 1}
    assert all(server.metric(f"nv_inference_{name}_duration_us", model="words") > 0 for name in TIMES)
    assert server.metric("nv_inference_pending_request_count", model="words") == 0 < server.metric("seqserve_ready")
    assert server.metric("seqserve_kernel_backend_info", model="words", version="1", backend=cpu_backends("lstm")[0]) == 1
    for path, names in (("", ["sensors", "words", "words"]), ("/words", ["words"] * 2), ("/words/versions/2", ["words"])):
        found = server.client.get(f"/v2/models{path}/stats").json()["model_stats"]
        assert [model["name"] for model in found] == names
    [words] = found
    assert 0 < words["inference_stats"]["compute_infer"]["ns"] < words["inference_stats"]["success"]["ns"]
    assert words["last_inference"] > 1_600_000_000_000
    for path in ("/v2/models/nobody/stats", "/v2/models/words/versions/3/stats"):
        assert server.client.get(path).status_code == 404


# Server-Timing names the stages of a request, for a client that asks for it.

ORDER = ["parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total"]
TEXT: dict[str, Any] = {"model": "words", "inputs": [QUESTION]}
LONG = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3000]}
"""Runs in several batches."""
CHUNK = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3], "session": "timed", "end": True}


def timing(server: Server, body: dict[str, Any], prefer: str = "server-timing") -> dict[str, float]:
    answer = server.client.post("/infer", json=body, headers={"prefer": prefer})
    assert answer.headers["preference-applied"] == "server-timing"
    return {name: float(duration) for name, duration in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}


@pytest.mark.parametrize("body", [{**TEXT, "inputs": [QUESTION, "who"]}, LONG, CHUNK], ids=["texts", "long", "chunk"])
def test_stages_of_a_request_add_up(body: dict[str, Any], server: Server) -> None:
    before = server.metric("seqserve_device_busy_seconds_total", engine="0")
    stages = timing(server, body)
    assert list(stages) == ORDER
    total = stages.pop("total")
    assert 0 < stages["compute"] < total and 0 < sum(stages.values()) <= total + 0.01
    busy = server.metric("seqserve_device_busy_seconds_total", engine="0") - before
    assert busy >= stages["compute"] / 1000 - 0.001, "times are rounded"


def test_only_answers_to_clients_that_ask_have_times(server: Server) -> None:
    assert list(timing(server, {**TEXT, "inputs": [""]})) == ["parse", "reply", "encode", "total"]
    for prefer in ("respond-async, Server-Timing", "server-timing; x=1"):
        assert timing(server, TEXT, prefer)["total"] > 0
    others: tuple[dict[str, str], ...] = (
        {},
        {"prefer": "respond-async"},
        {"prefer": "server-timing-other"},
        {"te": "trailers"},
    )
    answers = [server.client.post("/infer", json=TEXT, headers=headers) for headers in others]
    answers.append(server.client.post("/infer", json={**TEXT, "inputs": [1]}, headers={"prefer": "server-timing"}))
    assert not any(answer.headers.keys() & {"server-timing", "preference-applied"} for answer in answers)
