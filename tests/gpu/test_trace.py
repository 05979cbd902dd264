"""Traces of batches on a GPU, with the work of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.serving import Server, answering, serving
from tests.traces import DrawnSlice

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ["question-type-cnn", "question-type-lstm", "question-type-sru"]
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who wrote Hamlet ?", "What is an atom ?"]
BATCHES = 60
SLACK = 200_000
"""Tolerance for the profiler's clock, in nanoseconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the embedded models on a GPU with debug endpoints."""
    with serving(ROOT / "models", tmp_path_factory.mktemp("log"), "--device", "cuda:0", "--debug") as running:
        yield running


@pytest.fixture(scope="module", params=["first", "second"])
def tracks(request: pytest.FixtureRequest, server: Server) -> dict[str, list[DrawnSlice]]:
    """The tracks of an engine's first trace, which starts the profiler, and of its second."""
    plain: list[dict[str, Any]] = [{"model": model, "inputs": QUESTIONS} for model in MODELS]
    steps = {"model": "question-type-lstm", "inputs": QUESTIONS, "return": ["sequence"]}
    with answering(server, *plain, *plain, steps):
        answer = server.client.post("/debug/trace", params={"batches": BATCHES, "seconds": 20}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert list(traces.processes(answer.json())) == ["engine-0 cuda:0"]
    return traces.tracks(answer.json())


def slices_of(tracks: dict[str, list[DrawnSlice]], *names: str) -> list[DrawnSlice]:
    """Return the slices of all tracks with these prefixes."""
    return [drawn for name, slices in tracks.items() if name.startswith(names) for drawn in slices]


def outside(slices: list[DrawnSlice], outer: list[DrawnSlice]) -> list[str]:
    """Return the slices that lie within none of `outer`, with the distance to the nearest one in microseconds."""
    return [
        f"{inner.name}: {min(_beyond(inner, around) for around in outer) / 1000:.0f} us"
        for inner in slices
        if not any(around.holds(inner, SLACK) for around in outer)
    ]


def _beyond(inner: DrawnSlice, outer: DrawnSlice) -> int:
    """Return by how much a slice begins before `outer` or ends after it, in nanoseconds."""
    return max(outer.begin - inner.begin, inner.end - outer.end)


def test_every_batch_has_its_stages_and_device_time(tracks: dict[str, list[DrawnSlice]]) -> None:
    batches = [drawn for drawn in slices_of(tracks, "batches") if drawn.args]
    assert sorted(batch.args["batch"] for batch in batches) == list(range(BATCHES))
    assert {batch.args["model"] for batch in batches} == set(MODELS)
    assert {batch.args["by"] for batch in batches} == {"graph", "launches"}
    for stage in ("stage_in", "launch", "stage_out", "reply"):
        assert sum(drawn.name == stage for drawn in slices_of(tracks, "batches")) == BATCHES
    assert [drawn.args["batch"] for drawn in tracks["device"]] == list(range(BATCHES))


def test_launches_lie_within_the_launch_stage(tracks: dict[str, list[DrawnSlice]]) -> None:
    calls = slices_of(tracks, "launches")
    launches = [drawn for drawn in calls if "Launch" in drawn.name]
    # The profiler does not see the driver launch a graph.
    without_a_graph = [drawn for drawn in slices_of(tracks, "batches") if drawn.args.get("by") == "launches"]
    assert len(launches) >= len(without_a_graph) > 0, Counter(drawn.name for drawn in calls)
    assert not outside(launches, [drawn for drawn in slices_of(tracks, "batches") if drawn.name == "launch"])


@pytest.mark.parametrize("kind", ["copies", "kernels"])
def test_device_work_lies_within_its_batches(tracks: dict[str, list[DrawnSlice]], kind: str) -> None:
    work = slices_of(tracks, kind)
    assert len(work) >= BATCHES
    assert not outside(work, tracks["device"])
    for batch in tracks["device"]:
        assert any(batch.holds(drawn, SLACK) for drawn in work)


def test_log_stays_one_object_per_line(server: Server, tracks: dict[str, list[DrawnSlice]]) -> None:
    assert not server.events("child ended")


def test_engine_serves_normally_after_a_trace(server: Server, tracks: dict[str, list[DrawnSlice]]) -> None:
    for model in MODELS:
        assert server.infer(model, QUESTIONS).status_code == 200
    assert server.metric("seqserve_process_restarts_total") == 0
