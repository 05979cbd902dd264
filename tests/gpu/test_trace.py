"""A trace of turns on a GPU, and what the device did in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.serving import Server, answering, serving
from tests.traces import Slice

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ["question-type-cnn", "question-type-lstm", "question-type-sru"]
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who wrote Hamlet ?", "What is an atom ?"]
TURNS = 60
SLACK = 200_000
"""Nanoseconds by which the profiler's clock may be wrong."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded models on a GPU, with debug on."""
    with serving(ROOT / "models", tmp_path_factory.mktemp("log"), "--device", "cuda:0", "--debug") as running:
        yield running


@pytest.fixture(scope="module", params=["first", "second"])
def rows(request: pytest.FixtureRequest, server: Server) -> dict[str, list[Slice]]:
    """The rows of the first trace of an engine, which starts the profiler, and of one after it."""
    plain: list[dict[str, Any]] = [{"model": model, "inputs": QUESTIONS} for model in MODELS]
    steps = {"model": "question-type-lstm", "inputs": QUESTIONS, "return": ["sequence"]}
    with answering(server, *plain, *plain, steps):
        answer = server.client.post("/debug/trace", params={"batches": TURNS, "seconds": 20}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert list(traces.processes(answer.json())) == ["engine-0 cuda:0"]
    return traces.rows(answer.json())


def of(rows: dict[str, list[Slice]], *names: str) -> list[Slice]:
    """All slices of the rows whose names begin so."""
    return [one for name, slices in rows.items() if name.startswith(names) for one in slices]


def held(slices: list[Slice], by: list[Slice]) -> float:
    """The share of slices that lie within another."""
    return sum(any(one.holds(other, SLACK) for one in by) for other in slices) / len(slices)


def test_every_turn_is_there_with_its_stages_and_its_time_on_the_device(rows: dict[str, list[Slice]]) -> None:
    batches = [one for one in of(rows, "batches") if one.args]
    assert sorted(one.args["batch"] for one in batches) == list(range(TURNS))
    assert {one.args["model"] for one in batches} == set(MODELS)
    assert {one.args["by"] for one in batches} == {"graph", "launches"}
    for stage in ("stage_in", "launch", "stage_out", "reply"):
        assert sum(one.name == stage for one in of(rows, "batches")) == TURNS
    assert [one.args["batch"] for one in rows["device"]] == list(range(TURNS))


def test_launches_lie_where_their_turns_were_launched(rows: dict[str, list[Slice]]) -> None:
    launches = [one for one in of(rows, "launches") if "Launch" in one.name]
    assert len(launches) >= TURNS
    assert held(launches, [one for one in of(rows, "batches") if one.name == "launch"]) == 1


@pytest.mark.parametrize("what", ["copies", "kernels"])
def test_what_the_device_did_lies_within_the_turns_that_it_had(rows: dict[str, list[Slice]], what: str) -> None:
    work = of(rows, what)
    assert len(work) >= TURNS
    assert held(work, rows["device"]) == 1
    for batch in rows["device"]:
        assert any(batch.holds(one, SLACK) for one in work)


def test_the_log_stays_one_object_a_line(server: Server, rows: dict[str, list[Slice]]) -> None:
    assert not server.events("child ended")


def test_turns_are_as_before_once_nothing_is_traced(server: Server, rows: dict[str, list[Slice]]) -> None:
    for model in MODELS:
        assert server.infer(model, QUESTIONS).status_code == 200
    assert server.metric("seqserve_process_restarts_total") == 0
