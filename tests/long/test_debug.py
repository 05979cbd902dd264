"""POST /debug/trace on one engine and on two. `make test-all` runs this folder."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests import traces
from tests.frontend.rest.test_debug import SENSORS, WORDS, trace
from tests.serving import Server, answering, asking, eventually, serving


def test_trace_has_a_process_for_every_engine(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--debug", "--device", "cpu,cpu") as both:
        with answering(both, WORDS, WORDS, SENSORS, SENSORS):
            answer = trace(both, batches=10)
        processes = traces.processes(answer.json())
    assert list(processes) == ["engine-0 cpu", "engine-1 cpu"]
    assert [len([event for event in rows["batches"] if event.args]) for rows in processes.values()] == [10, 10]


def both_models(answer: httpx.Response) -> httpx.Response | None:
    """Return a trace that has batches of both models: on a busy machine a client may send nothing for a while."""
    found = {event.args["model"] for event in traces.tracks(answer.json())["batches"] if event.args}
    return answer if found == {"words", "sensors"} else None


def test_trace_has_the_requested_number_of_batches(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--debug", "--device", "cpu") as traced:
        check_trace(traced)


def check_trace(traced: Server) -> None:
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
    assert traces.tracks(trace(traced, seconds=0.1).json()) == {}, "an idle engine"
    assert all("event" in line for line in traced.log())
    assert traced.metric("seqserve_process_restarts_total") == 0
