"""A model is never half ready: if a capture of its CUDA graphs fails, it is served launch by launch, or it is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models, planted
from tests.planted import HARMED_MODEL
from tests.reloading import TEXT, load, unload
from tests.serving import Server, answering, eventually, serving

TWIN = {"model": "words", "inputs": [TEXT], "deadline_ms": 60_000}
TEXTS = [TEXT, "who", "is the sea far ?", "who was the first ?"]


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


def check_not_loaded(server: Server) -> None:
    """Check that version 2 is refused, and that version 1 is served on."""
    refusal = load(server, HARMED_MODEL, status=400)
    assert refusal["code"] == "invalid_model"
    assert "cannot be served: ValueError: a planted error" in refusal["error"]
    index = server.client.post("/v2/repository/index").json()
    indexed = {row["version"]: row for row in index if row["name"] == HARMED_MODEL}
    assert (indexed["1"]["state"], indexed["2"]["state"]) == ("READY", "UNAVAILABLE")
    assert indexed["2"]["reason"] == refusal["error"]
    check_served(server, version="1", by="graph")


def test_model_with_a_failed_capture_is_never_half_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures fail at the start, and at loads while clients use a model with the same weights. Later loads capture their graphs."""
    root, capture = tmp_path / "models", tmp_path / "capture"
    models.words(root, HARMED_MODEL)
    models.words(root)
    capture.write_text("synchronizes")
    monkeypatch.setenv("CAPTURE", str(capture))
    planted.plant("failed-capture", monkeypatch)
    with serving(root, tmp_path, "--device", "cuda:0") as server, answering(server, TWIN):
        check_served(server, version="1", by="launches")
        for how, by in (("", "graph"), ("invalid", "launches"), ("synchronizes", "launches"), ("", "graph")):
            capture.write_text(how)
            unload(server, HARMED_MODEL)
            load(server, HARMED_MODEL)
            check_served(server, version="1", by=by)
            if by == "launches":
                models.words(root, f"after-{how}")
                load(server, f"after-{how}")
                assert server.metric("seqserve_graphs", model=f"after-{how}") > 0
        missing = [event for event in server.events("some batches run without a graph") if event["model"] == HARMED_MODEL]
        without = [event for event in missing if not event["graphs"]]  # on a busy GPU, others leave out the last graphs
        assert len(without) == 3
        for event in without:
            assert event["reason"].startswith("the capture of a batch of ") and " failed: CUDA error" in event["reason"]
        first = scores(server, HARMED_MODEL)
        models.words(root, HARMED_MODEL, version=2, seed=1)
        capture.write_text("raises")
        for _ in range(2):
            check_not_loaded(server)
        assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == 2
        assert [event["version"] for event in server.events("not loaded")] == ["2", "2"]
        capture.write_text("")
        load(server, HARMED_MODEL)
        models.words(root, version=2, seed=1)
        load(server, "words")
        check_served(server, version="2", by="graph")
        assert scores(server, HARMED_MODEL) != first
        assert server.metric("seqserve_process_restarts_total") == 0
        assert not server.events("bug")
