"""Requests while the device fails, hangs or runs out of memory. Each test starts a server with a planted fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import planted
from tests.serving import Server, asking, eventually, serving

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "question-type-cnn"
QUESTION = "Who wrote Hamlet ?"
GOOD = {"model": MODEL, "inputs": [QUESTION], "deadline_ms": 60_000}
READY_SECONDS = 20.0
BUSY_SECONDS = 1.0
Serve = Callable[[str], Any]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    @contextmanager
    def with_fault(fault: str) -> Iterator[Server]:
        planted.plant(fault, monkeypatch)
        with serving(ROOT / "models", tmp_path, "--device", "cuda:0") as server:
            yield server

    return with_fault


def ask(server: Server, inputs: list[Any]) -> httpx.Response:
    return httpx.post(f"{server.address}/infer", json=GOOD | {"inputs": inputs}, timeout=60, trust_env=False)


def poison() -> list[int]:
    return list(range(planted.STEPS))


def assert_right_or_lost(answers: list[httpx.Response], expected: Any) -> None:
    for answer in answers:
        if answer.status_code == 200:
            [output] = answer.json()["outputs"]
            assert output["label"] == expected["label"]
            assert output["scores"] == pytest.approx(expected["scores"], abs=1e-3)
        else:
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")


@pytest.mark.parametrize("fault, reason", [("sticky", "device_lost"), ("endless", "hung")])
def test_engine_with_a_failed_or_hung_device_is_replaced(fault: str, reason: str, serve: Serve) -> None:
    with serve(fault) as server:
        [expected] = ask(server, [QUESTION]).json()["outputs"]
        with asking(server, *[GOOD] * 4) as answers:
            time.sleep(BUSY_SECONDS)
            refused = ask(server, [poison()])
            died = time.monotonic()
            assert (refused.status_code, refused.json()["code"]) == (503, "engine_lost"), "the request ended two engines"
            eventually(server.ready, READY_SECONDS)
            assert time.monotonic() - died < READY_SECONDS
            eventually(lambda: ask(server, [QUESTION]).status_code == 200, 5)
            time.sleep(BUSY_SECONDS)
        assert_right_or_lost(answers, expected)
        assert answers[-1].status_code == 200
        assert server.metric("seqserve_process_restarts_total", process="engine", reason=reason) == 2
        assert server.metric("seqserve_process_restarts_total") == 2


def test_request_without_device_memory_is_refused_alone(serve: Serve) -> None:
    with serve("memory") as server:
        [expected] = ask(server, [QUESTION]).json()["outputs"]
        with asking(server, *[GOOD] * 4) as answers:
            for _ in range(10):
                refused = ask(server, [poison()])
                assert (refused.status_code, refused.json()["code"]) == (503, "out_of_memory")
                assert int(refused.headers["retry-after"]) >= 1
        assert {answer.status_code for answer in answers} == {200}
        assert_right_or_lost(answers, expected)
        assert server.metric("seqserve_process_restarts_total") == 0
        assert server.metric("seqserve_refused_total", reason="out_of_memory") == 10
