"""POST /debug/trace over a real socket."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import traces
from tests.serving import Server, answering, eventually, serving

QUESTION = "how far is the sea ?"
WORDS = {"model": "words", "inputs": [QUESTION]}
SENSORS = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 20]}


@pytest.fixture(scope="module")
def traced(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log"), "--debug", "--device", "cpu") as running:
        yield running


def trace(server: Server, **query: object) -> httpx.Response:
    return server.client.post("/debug/trace", params=query)  # type: ignore[arg-type]


def test_where_debug_is_off_it_is_no_route_and_the_setting_is_named(server: Server) -> None:
    answer = trace(server)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")
    assert "SEQSERVE_DEBUG" in answer.json()["error"] and "--debug" in answer.json()["error"]
    assert "/debug/trace" not in server.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    "query, field, part",
    [
        ({"batches": 0}, "batches", "greater than or equal to 1"),
        ({"batches": 1001}, "batches", "turns is 1001"),
        ({"batches": "many"}, "batches", "many"),
        ({"seconds": 0}, "seconds", "greater than 0"),
        ({"seconds": 61}, "seconds", "60"),
        ({"seconds": "nan"}, "seconds", "nan"),
        ({"batch": 5}, "batch", "known are batches, seconds"),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else "",
)
def test_what_cannot_be_asked_for_is_named(traced: Server, query: dict[str, object], field: str, part: str) -> None:
    answer = trace(traced, **query)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_input", field)
    assert part in answer.json()["error"]


def test_so_many_turns_come_back_while_others_are_answered(traced: Server) -> None:
    with answering(traced, WORDS, WORDS, SENSORS):
        answer = trace(traced, batches=20)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["traceEvents"]
    rows = traces.rows(answer.json())
    assert list(traces.processes(answer.json())) == ["engine-0 cpu"]
    whole = [one for one in rows["batches"] if one.args]
    assert [one.args["batch"] for one in whole] == list(range(20))
    assert {(one.args["model"], one.args["version"]) for one in whole} == {("words", "2"), ("sensors", "1")}
    for one in whole:
        stages = [other for other in rows["batches"] if not other.args and one.holds(other)]
        assert [stage.name for stage in stages] == ["stage_in", "compute", "stage_out", "reply"]
    queues = [one for name, slices in rows.items() if name.startswith("queue") for one in slices]
    assert sorted(one.args["batch"] for one in queues) == list(range(20))
    assert rows["operations"]


def test_what_came_in_time_comes_back_when_too_little_came(traced: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trace, traced, batches=1000, seconds=0.5)
        with answering(traced, WORDS):
            time.sleep(0.4)
        answer = waiting.result()
    assert answer.status_code == 200
    assert 1 <= len([one for one in traces.rows(answer.json())["batches"] if one.args]) < 1000


def test_an_engine_that_does_nothing_gives_a_trace_of_nothing(traced: Server) -> None:
    assert traces.rows(trace(traced, seconds=0.1).json()) == {}


def test_a_second_trace_is_refused_and_one_whose_caller_leaves_makes_room(traced: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{traced.address}/debug/trace?batches=1000&seconds=60", timeout=1.0, trust_env=False)
    with ThreadPoolExecutor(1) as pool:
        eventually(lambda: trace(traced, seconds=0.1).status_code == 200, within_seconds=10)
        first = pool.submit(trace, traced, batches=1000, seconds=2)
        second = eventually(lambda: (said := trace(traced, seconds=0.1)).status_code == 503 and said, within_seconds=10)
        assert second.json()["code"] == "overloaded" and "a trace is being recorded" in second.json()["error"]
        assert second.headers["retry-after"] == "1"
        assert first.result().status_code in (200, 503)


def test_the_log_stays_one_object_a_line_and_nothing_was_replaced(traced: Server) -> None:
    assert trace(traced, seconds=0.1).status_code == 200
    for line in traced.log_file.read_text().splitlines():
        assert "event" in json.loads(line)
    assert traced.metric("seqserve_process_restarts_total") == 0


def test_it_is_described_where_it_is_on(traced: Server) -> None:
    described = traced.client.get("/openapi.json").json()["paths"]["/debug/trace"]["post"]
    assert [(one["name"], one["schema"]["default"]) for one in described["parameters"]] == [("batches", 50), ("seconds", 10.0)]


def test_every_engine_is_a_process_of_the_trace(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--debug", "--device", "cpu,cpu") as both:
        with answering(both, WORDS, WORDS, SENSORS, SENSORS):
            answer = trace(both, batches=10)
        found = traces.processes(answer.json())
    assert list(found) == ["engine-0 cpu", "engine-1 cpu"]
    assert [len([one for one in rows["batches"] if one.args]) for rows in found.values()] == [10, 10]
