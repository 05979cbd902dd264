"""Requests while the device fails, hangs or runs out of memory. Each test starts servers with a planted fault."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import planted
from tests.serving import Server, asking, eventually, serving

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "question-type-cnn"
QUESTIONS = ["Who wrote Hamlet ?", "Where is Ayers Rock ?", "What does NASA mean ?", "How far is it from Denver to Aspen ?"]
"""Each has another label."""
GOOD = {"model": MODEL, "inputs": QUESTIONS[:1], "deadline_ms": 60_000}
POISON = list(range(planted.STEPS))
SERVERS, POISONS, ENGINES_OF_A_POISON = 2, 3, 2
"""Servers on one GPU, requests to each of them that end engines, and the engines that each of these requests ends."""
PAUSE_SECONDS = 0.02
Serve = Callable[[str], AbstractContextManager[Server]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts a server with a fault. It has one model: an engine that starts again has nothing else to load."""
    shutil.copytree(ROOT / "models" / MODEL, tmp_path / "models" / MODEL)

    def serve(fault: str) -> AbstractContextManager[Server]:
        planted.plant(fault, monkeypatch)
        return serving(tmp_path / "models", tmp_path, "--device", "cuda:0")

    return serve


def ask(server: Server, input: Any) -> httpx.Response:
    return server.client.post("/infer", json=GOOD | {"inputs": [input]}, timeout=90)


def check_lost(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_lost")


def check(answer: httpx.Response, expected: Any) -> None:
    """Check that an answer is right or `engine_lost`."""
    if answer.status_code != 200:
        check_lost(answer)
        return
    [output] = answer.json()["outputs"]
    assert output["label"] == expected["label"], "a wrong answer"
    assert output["scores"] == pytest.approx(expected["scores"], abs=1e-3), "a wrong answer"


@contextmanager
def checked_load(server: Server) -> Iterator[Counter[int]]:
    """Send all questions until the block ends, and check the answers. Yields the count of each status."""
    expected = {question: ask(server, question).json()["outputs"][0] for question in QUESTIONS}
    assert len({output["label"] for output in expected.values()}) == len(QUESTIONS), "a mixed-up answer would be noticed"
    statuses, ended = Counter[int](), threading.Event()

    def ask_again_and_again(question: str) -> None:
        while not ended.wait(PAUSE_SECONDS):
            answer = ask(server, question)
            check(answer, expected[question])
            statuses[answer.status_code] += 1

    with ThreadPoolExecutor(len(QUESTIONS)) as callers:
        asked = [callers.submit(ask_again_and_again, question) for question in QUESTIONS]
        try:
            yield statuses
        finally:
            ended.set()
    for one in asked:
        one.result()


def end_engines(server: Server, poisons: int) -> int:
    """Send requests that end two engines each, between good answers. Returns the number of engines that ended."""

    def restarts() -> float:
        return server.metric("seqserve_process_restarts_total", process="engine")

    with checked_load(server) as statuses:
        for number in range(1, poisons + 1):
            answered = statuses[200]
            eventually(lambda answered=answered: statuses[200] > answered + len(QUESTIONS))  # type: ignore[misc]
            check_lost(ask(server, POISON))
            eventually(lambda number=number: restarts() == ENGINES_OF_A_POISON * number)  # type: ignore[misc]
            eventually(lambda: server.ready() and ask(server, QUESTIONS[0]).status_code == 200)
        answered = statuses[200]
        eventually(lambda: statuses[200] > answered + len(QUESTIONS))
    assert server.metric("seqserve_process_restarts_total") == restarts()
    assert server.client.get("/models").json()["unavailable"] == []
    return int(restarts())


def test_device_errors_end_engines_and_send_no_wrong_answer(serve: Serve) -> None:
    """Several servers share the GPU: an error of the device ends the engine that made it, and no other."""
    with ThreadPoolExecutor(SERVERS) as pool, ExitStack() as stack:
        servers = [stack.enter_context(serve("sticky")) for _ in range(SERVERS)]
        assert list(pool.map(end_engines, servers, [POISONS] * SERVERS)) == [ENGINES_OF_A_POISON * POISONS] * SERVERS
        for server in servers:
            lost = server.metric("seqserve_process_restarts_total", reason="device_lost")
            assert lost == ENGINES_OF_A_POISON * POISONS


def test_engine_with_a_hung_device_is_replaced(serve: Serve) -> None:
    with serve("endless") as server:
        assert end_engines(server, 1) == ENGINES_OF_A_POISON
        assert server.metric("seqserve_process_restarts_total", reason="hung") == ENGINES_OF_A_POISON


def test_request_without_device_memory_is_refused_alone(serve: Serve) -> None:
    with serve("memory") as server:
        [expected] = ask(server, QUESTIONS[0]).json()["outputs"]
        with asking(server, *[GOOD] * 4) as answers:
            for _ in range(10):
                refused = ask(server, POISON)
                assert (refused.status_code, refused.json()["code"]) == (503, "out_of_memory")
                assert int(refused.headers["retry-after"]) >= 1
        assert {answer.status_code for answer in answers} == {200}
        for answer in answers:
            check(answer, expected)
        assert server.metric("seqserve_process_restarts_total") == 0
        assert server.metric("seqserve_refused_total", reason="out_of_memory") == 10
