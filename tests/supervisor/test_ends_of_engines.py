"""Engines end at named points on the way of a request. Every accepted request is answered, except a request that ends two engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import planted
from tests.serving import Server, SharedServer, answering, eventually, nearly_equal

STEP = [0.1, 0.2, 0.3]
PATIENT_SECONDS = 600
"""A deadline later than two restarts of an engine on a busy machine."""
MARKED = {"model": "sensors", "inputs": [[STEP] * planted.STEPS], "deadline_ms": 1000 * PATIENT_SECONDS}
OTHER = MARKED | {"inputs": [[STEP] * 5]}
SLOW = MARKED | {"inputs": [[STEP] * 30_000]}
PATIENT = {"max_deadline_ms": str(1000 * PATIENT_SECONDS)}
"""Settings of the service."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with the points at which engines end."""
    file = tmp_path_factory.mktemp("ends") / "ends"
    file.touch()
    with pytest.MonkeyPatch.context() as patch:
        planted.plant("ends", patch)
        patch.setenv("ENDS", str(file))
        yield file


@pytest.fixture(scope="module")
def shared(models_folder: Path, ends: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with closing(SharedServer(models_folder, tmp_path_factory.mktemp("log"), **PATIENT)) as shared:
        yield shared


@pytest.fixture(scope="module")
def shared_two_engines(models_folder: Path, ends: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with closing(SharedServer(models_folder, tmp_path_factory.mktemp("log"), "--device", "cpu,cpu", **PATIENT)) as shared:
        yield shared


def ask(server: Server, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.address}/infer", json=body, timeout=PATIENT_SECONDS, trust_env=False)


def parsed(server: Server) -> float:
    """Return how many requests have been handed over to an engine, or are about to be."""
    return server.metric("seqserve_stage_seconds_count", model="sensors", stage="parse")


def ended(server: Server) -> int:
    return len([event for event in server.events("child ended") if event["child"].startswith("engine")])


@pytest.mark.parametrize("point", planted.POINTS)
def test_every_request_is_answered_once(point: str, shared_two_engines: SharedServer, ends: Path) -> None:
    """Two engines serve other requests meanwhile."""
    with shared_two_engines.lent() as server:
        undisturbed, before = ask(server, MARKED).json()["outputs"], ended(server)
        answered = server.metric("seqserve_requests_total", outcome="ok")
        ends.write_text(f"{point}\n")
        with answering(server, OTHER, OTHER):
            reply = ask(server, MARKED)
            eventually(lambda: ended(server) == before + 1)
        assert reply.status_code == 200, reply.text
        assert nearly_equal(reply.json()["outputs"], undisturbed)
        assert not ends.read_text()
        assert server.metric("seqserve_requests_total", outcome="ok") > answered
        assert server.metric("seqserve_requests_total", outcome="engine_lost") == 0


def test_request_that_ends_two_engines_is_refused_and_those_beside_it_are_answered(shared: SharedServer, ends: Path) -> None:
    with shared.lent() as server, ThreadPoolExecutor() as callers:
        before, parsed_before = ended(server), parsed(server)
        beside = [callers.submit(ask, server, SLOW) for _ in range(3)]
        eventually(lambda: parsed(server) == parsed_before + len(beside))
        ends.write_text("launching\n" * 3)
        refused = ask(server, MARKED)
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_lost")
        assert "not sent to a third" in refused.json()["error"]
        replies = [reply.result() for reply in beside]
        assert [reply.status_code for reply in replies] == [200] * len(beside), replies[0].text
        assert ended(server) == before + 2
        assert ends.read_text() == "launching\n", "a third engine would have ended"
        ends.write_text("")
