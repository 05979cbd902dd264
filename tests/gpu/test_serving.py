"""The service with its engine on a GPU: answers, sessions and traces with the work of the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import traces
from tests.serving import Server, answering, serving
from tests.traces import DrawnSlice

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
TEXTS = ["question-type-cnn", "question-type-lstm", "question-type-sru"]
BACKENDS = dict(zip(TEXTS, ("fused", "adaptive", "fused"), strict=True)) | {"sensor-forecast": "adaptive"}
QUESTIONS = [
    "How far is it from Denver to Aspen ?",
    "Who wrote Hamlet ?",
    "What is an atom ?",
    "Where is Ayers Rock ?",
    "What does NASA mean ?",
]
BATCHES, SLOTS = 60, 4
SLACK = 200_000
"""Tolerance for the profiler's clock, in nanoseconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the embedded models on a GPU with debug endpoints and few state slots."""
    with serving(MODELS, tmp_path_factory.mktemp("log"), "--device", "cuda:0", "--debug", state_slots=str(SLOTS)) as running:
        yield running


@pytest.fixture(scope="module", params=["first", "second"])
def tracks(request: pytest.FixtureRequest, server: Server) -> dict[str, list[DrawnSlice]]:
    """The tracks of an engine's first trace, which starts the profiler, and of its second."""
    plain: list[dict[str, Any]] = [{"model": model, "inputs": QUESTIONS[:3]} for model in TEXTS]
    steps = {"model": "question-type-lstm", "inputs": QUESTIONS[:3], "return": ["sequence"]}
    with answering(server, *plain, *plain, steps, steps, steps):  # a busy host may let a caller rest
        answer = server.client.post("/debug/trace", params={"batches": BATCHES, "seconds": 20}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert list(traces.processes(answer.json())) == ["engine-0 cuda:0"]
    return traces.tracks(answer.json())


def test_models_have_the_answers_of_a_cpu(server: Server, tmp_path: Path) -> None:
    """By the kernels of a GPU."""
    served = {model["name"]: model for model in server.client.get("/models").json()["models"]}
    for name, backend in BACKENDS.items():
        assert served[name]["device"] == "cuda:0" and backend in " ".join(served[name]["backends"])
    with serving(MODELS, tmp_path, "--device", "cpu") as on_cpu:
        for model in TEXTS:
            outputs, expected = (each.infer(model, QUESTIONS).json()["outputs"] for each in (server, on_cpu))
            assert [output["label"] for output in outputs] == [output["label"] for output in expected]
            for output, right in zip(outputs, expected, strict=True):
                assert output["scores"] == pytest.approx(right["scores"], abs=5e-3), "float16 products"


def test_sessions_continue_from_slots_and_from_the_host(server: Server) -> None:
    chance = random.Random(0)
    streams = [[[round(chance.gauss(0, 1), 3) for _ in range(3)] for _ in range(60)] for _ in range(3 * SLOTS)]
    infer = partial(server.infer, "sensor-forecast")
    whole = [infer([stream]).json()["outputs"][0]["value"] for stream in streams]
    for begin, end in ((0, 1), (1, 20), (20, 60)):
        answers = [infer([stream[begin:end]], session=f"s{at}").json() for at, stream in enumerate(streams)]
    assert [answer["session"]["steps"] for answer in answers] == [60] * len(streams)
    for answer, expected in zip(answers, whole, strict=True):
        assert answer["outputs"][0]["value"] == pytest.approx(expected, abs=2e-2), "float16"
    assert server.metric("seqserve_session_moves_total", to="host") > 0
    assert server.metric("seqserve_batches_total", model="sensor-forecast", by="launches") == 0


def slices_of(tracks: dict[str, list[DrawnSlice]], *names: str) -> list[DrawnSlice]:
    """Return the slices of all tracks with these prefixes."""
    return [drawn for name, slices in tracks.items() if name.startswith(names) for drawn in slices]


def assert_within(slices: list[DrawnSlice], outer: list[DrawnSlice]) -> None:
    """Assert that each slice lies within one of `outer`. A failure tells the distance to the nearest one in nanoseconds."""
    lost = [drawn for drawn in slices if not any(around.holds(drawn, SLACK) for around in outer)]
    beyond = [(drawn.name, min(max(one.begin - drawn.begin, drawn.end - one.end) for one in outer)) for drawn in lost]
    assert not beyond


def test_trace_has_the_stages_and_the_device_work_of_every_batch(tracks: dict[str, list[DrawnSlice]], server: Server) -> None:
    stages, device = slices_of(tracks, "batches"), tracks["device"]
    batches = [drawn for drawn in stages if drawn.args]
    assert sorted(batch.args["batch"] for batch in batches) == list(range(BATCHES))
    assert {batch.args["model"] for batch in batches} == set(TEXTS)
    assert {batch.args["by"] for batch in batches} == {"graph", "launches"}
    for stage in ("stage_in", "launch", "stage_out", "reply"):
        assert sum(drawn.name == stage for drawn in stages) == BATCHES
    launches = [drawn for drawn in slices_of(tracks, "launches") if "Launch" in drawn.name]
    # The profiler does not see the driver launch a graph.
    assert len(launches) >= sum(drawn.args.get("by") == "launches" for drawn in stages) > 0
    assert_within(launches, [drawn for drawn in stages if drawn.name == "launch"])
    assert [drawn.args["batch"] for drawn in device] == list(range(BATCHES))
    for work in (slices_of(tracks, kind) for kind in ("copies", "kernels")):
        assert len(work) >= BATCHES
        assert_within(work, device)
        assert all(any(batch.holds(drawn, SLACK) for drawn in work) for batch in device)
    assert not server.events("child ended")
    assert all(server.infer(model, QUESTIONS).status_code == 200 for model in TEXTS), "it serves after a trace"
