"""A model is never half ready: if a capture of its CUDA graphs fails, it is served launch by launch, or it is not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import models, planted
from tests.planted import HARMED_MODEL
from tests.reloading import TEXT, load, unload
from tests.serving import Server, answering, eventually, serving

TWIN = {"model": "words", "inputs": [TEXT], "deadline_ms": 60_000}
TEXTS = [TEXT, "who", "is the sea far ?", "who was the first ?"]


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells how captures of the harmed model fail; empty, so they do not."""
    file = tmp_path / "capture"
    file.touch()
    monkeypatch.setenv("CAPTURE", str(file))
    planted.plant("failed-capture", monkeypatch)
    return file


@contextmanager
def started(tmp_path: Path) -> Iterator[Server]:
    """Serve the harmed model and its twin, which has the same weights, while clients use the twin."""
    root = tmp_path / "models"
    models.words(root, HARMED_MODEL)
    models.words(root)
    with serving(root, tmp_path, "--device", "cuda:0") as server, answering(server, TWIN):
        yield server
        assert server.metric("seqserve_process_restarts_total") == 0
        assert not server.events("bug")


def batches(server: Server, version: str, by: str) -> float:
    return server.metric("seqserve_batches_total", model=HARMED_MODEL, version=version, by=by)


def scores(server: Server, model: str) -> list[dict[str, float]]:
    answer = server.infer(model, TEXTS, deadline_ms=60_000)
    assert answer.status_code == 200, answer.text
    return [output["scores"] for output in answer.json()["outputs"]]


def check_served(server: Server, *, version: str, by: str) -> None:
    """Check that the harmed model answers as its twin does, in batches that run `by` graph or launches, and that all reports agree.

    version: the newest of both that is served.
    """
    other = "launches" if by == "graph" else "graph"
    assert server.ready()
    assert server.client.get(f"/v2/models/{HARMED_MODEL}/ready").status_code == 200
    listed = {(entry["name"], entry["version"]) for entry in server.client.get("/models").json()["models"]}
    assert max(listed_version for name, listed_version in listed if name == HARMED_MODEL) == version
    assert server.metric("seqserve_graphs", model="words") > 0
    assert (server.metric("seqserve_graphs", model=HARMED_MODEL, version=version) > 0) == (by == "graph")
    before, others = batches(server, version, by), batches(server, version, other)
    for harmed, expected in zip(scores(server, HARMED_MODEL), scores(server, "words"), strict=True):
        assert harmed == pytest.approx(expected, abs=1e-4)
    eventually(lambda: batches(server, version, by) > before)
    assert batches(server, version, other) == others


def reload(server: Server) -> None:
    unload(server, HARMED_MODEL)
    load(server, HARMED_MODEL)


def reasons(server: Server) -> list[str]:
    """Return why batches of the harmed model run without a graph, once for each load."""
    return [event["reason"] for event in server.events("some batches run without a graph") if event["model"] == HARMED_MODEL]


@pytest.mark.parametrize("how", ["synchronizes", "invalid"])
def test_model_with_an_illegal_capture_runs_launch_by_launch(how: str, capture: Path, tmp_path: Path) -> None:
    """At the start, and at a load while another model is served. Each later load of any model captures its graphs."""
    capture.write_text(how)
    with started(tmp_path) as server:
        check_served(server, version="1", by="launches")
        capture.write_text("")
        reload(server)
        check_served(server, version="1", by="graph")
        capture.write_text(how)
        reload(server)
        check_served(server, version="1", by="launches")
        models.words(tmp_path / "models", "other")
        load(server, "other")
        assert server.metric("seqserve_graphs", model="other") > 0
        capture.write_text("")
        reload(server)
        check_served(server, version="1", by="graph")
        assert len(reasons(server)) == 2
    for reason in reasons(server):
        assert reason.startswith("the capture of a batch of ") and " failed: CUDA error" in reason


def test_model_whose_capture_raises_is_not_loaded(capture: Path, tmp_path: Path) -> None:
    """The version before is served on, by its graphs. The same version loads once its capture works."""
    with started(tmp_path) as server:
        first = scores(server, HARMED_MODEL)
        models.words(tmp_path / "models", HARMED_MODEL, version=2, seed=1)
        capture.write_text("raises")
        for _ in range(2):
            refusal = load(server, HARMED_MODEL, status=400)
            assert refusal["code"] == "invalid_model"
            assert "cannot be served: ValueError: a planted error" in refusal["error"]
            indexed = {row["version"]: row for row in index(server)}
            assert (indexed["1"]["state"], indexed["2"]["state"]) == ("READY", "UNAVAILABLE")
            assert indexed["2"]["reason"] == refusal["error"]
            check_served(server, version="1", by="graph")
        assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == 2
        assert [event["version"] for event in server.events("not loaded")] == ["2", "2"]
        capture.write_text("")
        load(server, HARMED_MODEL)
        models.words(tmp_path / "models", version=2, seed=1)
        load(server, "words")
        check_served(server, version="2", by="graph")
        assert scores(server, HARMED_MODEL) != first


def index(server: Server) -> list[dict[str, str]]:
    """Return the rows of the harmed model in the repository index."""
    rows: list[dict[str, str]] = server.client.post("/v2/repository/index").json()
    return [row for row in rows if row["name"] == HARMED_MODEL]
