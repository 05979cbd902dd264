"""Server-Timing names the stages of a request, for a client that asks for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.serving import Server

STAGES = ["parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total"]
TEXT = {"model": "words", "inputs": ["how far is the sea ?"]}
SEVERAL = {"model": "words", "inputs": ["how far", "is the sea ?", "who"]}
LONG = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3000]}
"""Runs in several batches."""
CHUNK = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 3], "session": "timed", "end": True}


def timing(server: Server, body: dict[str, Any], prefer: str = "server-timing") -> dict[str, float]:
    answer = server.client.post("/infer", json=body, headers={"prefer": prefer})
    assert answer.status_code == 200, answer.text
    assert answer.headers["preference-applied"] == "server-timing"
    return {name: float(duration) for name, duration in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}


@pytest.mark.parametrize("body", [TEXT, SEVERAL, LONG, CHUNK], ids=["text", "several", "long", "chunk"])
def test_stages_of_a_request_add_up(body: dict[str, Any], server: Server) -> None:
    stages = timing(server, body)
    assert list(stages) == STAGES
    total = stages.pop("total")
    assert 0 < stages["compute"] < total and 0 < sum(stages.values()) <= total + 0.01


@pytest.mark.parametrize("prefer", ["server-timing", "respond-async, Server-Timing", "server-timing; x=1"])
def test_preference_may_stand_among_others(prefer: str, server: Server) -> None:
    assert timing(server, TEXT, prefer)["total"] > 0


@pytest.mark.parametrize("headers", [{}, {"prefer": "respond-async"}, {"prefer": "server-timing-other"}, {"te": "trailers"}])
def test_others_get_no_header(headers: dict[str, str], server: Server) -> None:
    answer = server.client.post("/infer", json=TEXT, headers=headers)
    assert "server-timing" not in answer.headers and "preference-applied" not in answer.headers
    refused = server.client.post("/infer", json={**TEXT, "inputs": [1]}, headers={"prefer": "server-timing"})
    assert refused.status_code == 400 and "server-timing" not in refused.headers


def test_request_without_steps_has_the_stages_that_it_passed(server: Server) -> None:
    stages = timing(server, {"model": "words", "inputs": [""]})
    assert list(stages) == ["parse", "reply", "encode", "total"]


def test_time_of_an_engine_is_counted(server: Server) -> None:
    before = server.metric("seqserve_device_busy_seconds_total", engine="0")
    compute = timing(server, LONG)["compute"] / 1000
    assert server.metric("seqserve_device_busy_seconds_total", engine="0") - before >= compute - 0.001, "times are rounded"
