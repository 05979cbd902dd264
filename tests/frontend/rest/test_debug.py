"""POST /debug/trace over a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import traces
from tests.serving import Server, answering, asking, eventually, serving

QUESTION = "how far is the sea ?"
WORDS = {"model": "words", "inputs": [QUESTION]}
SENSORS = {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 20]}


@pytest.fixture(scope="module")
def traced(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log"), "--debug", "--device", "cpu") as running:
        yield running


def trace(server: Server, **query: object) -> httpx.Response:
    return server.client.post("/debug/trace", params=query)  # type: ignore[arg-type]


def test_without_debug_trace_gets_404_and_the_setting(server: Server) -> None:
    answer = trace(server)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")
    assert "SEQSERVE_DEBUG" in answer.json()["error"] and "--debug" in answer.json()["error"]
    assert "/debug/trace" not in server.client.get("/openapi.json").json()["paths"]


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
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_parameter_is_named(traced: Server, query: dict[str, object], field: str, part: str) -> None:
    answer = trace(traced, **query)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_input", field)
    assert part in answer.json()["error"]


def both_models(answer: httpx.Response) -> httpx.Response | None:
    """Return a trace that has batches of both models: on a busy machine a client may send nothing for a while."""
    found = {event.args["model"] for event in traces.tracks(answer.json())["batches"] if event.args}
    return answer if found == {"words", "sensors"} else None


def test_trace_has_the_requested_number_of_batches(traced: Server) -> None:
    with asking(traced, WORDS, WORDS, SENSORS) as answered:
        eventually(lambda: {reply.json()["model"] for reply in answered} == {"words", "sensors"})
        answer = eventually(lambda: both_models(trace(traced, batches=20)))
    assert {reply.status_code for reply in answered} == {200}
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["traceEvents"]
    rows = traces.tracks(answer.json())
    assert list(traces.processes(answer.json())) == ["engine-0 cpu"]
    batches = [event for event in rows["batches"] if event.args]
    assert [batch.args["batch"] for batch in batches] == list(range(20))
    assert {(batch.args["model"], batch.args["version"]) for batch in batches} == {("words", "2"), ("sensors", "1")}
    for batch in batches:
        stages = [event for event in rows["batches"] if not event.args and batch.holds(event)]
        assert [stage.name for stage in stages] == ["stage_in", "compute", "stage_out", "reply"]
    queues = [event for name, events in rows.items() if name.startswith("queue") for event in events]
    assert sorted(event.args["batch"] for event in queues) == list(range(20))
    assert rows["operations"]


def test_trace_ends_after_the_requested_seconds(traced: Server) -> None:
    def batches(seconds: float) -> int:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(trace, traced, batches=1000, seconds=seconds)
            with answering(traced, WORDS):
                time.sleep(0.4)
            answer = waiting.result()
        assert answer.status_code == 200
        return len([event for event in traces.tracks(answer.json()).get("batches", []) if event.args])

    # A busy machine may run nothing in a short time.
    assert next(count for count in map(batches, (0.5, 5.0, 20.0)) if count) < 1000


def test_idle_engine_gives_an_empty_trace(traced: Server) -> None:
    assert traces.tracks(trace(traced, seconds=0.1).json()) == {}


def test_second_trace_is_refused_until_the_first_client_disconnects(traced: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{traced.address}/debug/trace?batches=1000&seconds=60", timeout=1.0, trust_env=False)
    with ThreadPoolExecutor(1) as pool:
        eventually(lambda: trace(traced, seconds=0.1).status_code == 200, within_seconds=10)
        first = pool.submit(trace, traced, batches=1000, seconds=2)

        def refused() -> httpx.Response | None:
            """Return the refusal of a second trace, None while the first has not begun. The second may also begin before the first."""
            nonlocal first
            if first.done():
                first = pool.submit(trace, traced, batches=1000, seconds=2)
            reply = trace(traced, seconds=0.1)
            return reply if reply.status_code == 503 else None

        second = eventually(refused, within_seconds=10)
        assert second.json()["code"] == "overloaded" and "a trace is being recorded" in second.json()["error"]
        assert second.headers["retry-after"] == "1"
        assert first.result().status_code in (200, 503)


def test_trace_keeps_the_log_valid_and_restarts_no_process(traced: Server) -> None:
    assert trace(traced, seconds=0.1).status_code == 200
    assert all("event" in line for line in traced.log())
    assert traced.metric("seqserve_process_restarts_total") == 0


def test_openapi_describes_the_route_with_debug(traced: Server) -> None:
    described = traced.client.get("/openapi.json").json()["paths"]["/debug/trace"]["post"]
    assert [(parameter["name"], parameter["schema"]["default"]) for parameter in described["parameters"]] == [
        ("batches", 50),
        ("seconds", 10.0),
    ]
