"""Requests while the device fails, hangs or runs out of memory. Each test starts a server with a planted fault."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
SERVERS, POISONS, ENGINES_OF_A_POISON = 5, 5, 2
"""Servers on one GPU, requests to each of them that end engines, and the engines that each of these requests ends."""
QUESTIONS = [QUESTION, "Where is Ayers Rock ?", "What does NASA mean ?", "How far is it from Denver to Aspen ?"]
"""Each has another label."""
PAUSE_SECONDS = 0.02
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
    return server.client.post("/infer", json=GOOD | {"inputs": inputs}, timeout=90)


def poison() -> list[int]:
    return list(range(planted.STEPS))


def assert_right_or_lost(answers: list[httpx.Response], expected: Any) -> None:
    for answer in answers:
        if answer.status_code == 200:
            [output] = answer.json()["outputs"]
            assert output["label"] == expected["label"], "a wrong answer"
            assert output["scores"] == pytest.approx(expected["scores"], abs=1e-3), "a wrong answer"
        else:
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")


@contextmanager
def checked_load(server: Server) -> Iterator[Counter[int]]:
    """Send all questions until the block ends, and check that each answer is right or `engine_lost`. Yields the count of each status."""
    expected = {question: output for question in QUESTIONS for output in ask(server, [question]).json()["outputs"]}
    assert len({output["label"] for output in expected.values()}) == len(QUESTIONS), "a mixed-up answer would be noticed"
    statuses, ended = Counter[int](), threading.Event()

    def ask_again_and_again(question: str) -> None:
        while not ended.wait(PAUSE_SECONDS):
            answer = ask(server, [question])
            assert_right_or_lost([answer], expected[question])
            statuses[answer.status_code] += 1

    with ThreadPoolExecutor(len(QUESTIONS)) as callers:
        asked = [callers.submit(ask_again_and_again, question) for question in QUESTIONS]
        try:
            yield statuses
        finally:
            ended.set()
    for one in asked:
        one.result()


def end_engines(server: Server) -> int:
    """Send requests that end engines, each after good answers. Returns the number of device errors."""

    def restarts() -> float:
        return server.metric("seqserve_process_restarts_total")

    with checked_load(server) as statuses:
        for number in range(1, POISONS + 1):
            time.sleep(BUSY_SECONDS)
            refused = ask(server, [poison()])
            assert (refused.status_code, refused.json()["code"]) == (503, "engine_lost")
            eventually(lambda: server.ready() and ask(server, [QUESTION]).status_code == 200)
            good = statuses[200]
            eventually(lambda good=good: statuses[200] > good + len(QUESTIONS))  # type: ignore[misc]
            eventually(lambda number=number: restarts() == ENGINES_OF_A_POISON * number)  # type: ignore[misc]
    lost = server.metric("seqserve_process_restarts_total", process="engine", reason="device_lost")
    assert lost == restarts() == ENGINES_OF_A_POISON * POISONS
    assert server.client.get("/models").json()["unavailable"] == []
    return int(lost)


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


def test_fifty_device_errors_end_engines_and_send_no_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several servers share the GPU: an error of the device ends the engine that made it, and no other."""
    planted.plant("sticky", monkeypatch)
    models = one_model(tmp_path)

    def errors_of(number: int) -> int:
        scratch = tmp_path / str(number)
        scratch.mkdir()
        with serving(models, scratch, "--device", "cuda:0") as server:
            return end_engines(server)

    with ThreadPoolExecutor(SERVERS) as pool:
        assert sum(pool.map(errors_of, range(SERVERS))) == ENGINES_OF_A_POISON * SERVERS * POISONS


def one_model(tmp_path: Path) -> Path:
    """Return a folder with the model alone: an engine that starts again has nothing else to load."""
    folder = tmp_path / "models"
    shutil.copytree(ROOT / "models" / MODEL, folder / MODEL)
    return folder


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
