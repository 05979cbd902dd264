"""A model that ends every engine becomes unavailable with its reason, and the other models are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from service.supervisor.trials import MAX_ENDS
from tests import models, planted
from tests.planted import DEADLY_MODEL
from tests.reloading import TEXT, load
from tests.serving import Server, answering, asking, eventually, serving

OTHER = {"model": "words", "inputs": [TEXT], "deadline_ms": 60_000}
DEADLY = {"model": DEADLY_MODEL, "inputs": [TEXT], "deadline_ms": 60_000}
REASON = f"{MAX_ENDS} engines in a row ended while they loaded this version or ran its first batch"


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells which work with the model ends an engine; empty, so the model is harmless."""
    file = tmp_path / "deadly"
    file.touch()
    monkeypatch.setenv("DEADLY", str(file))
    planted.plant("deadly", monkeypatch)
    return file


@contextmanager
def started(tmp_path: Path, *flags: str, **variables: str) -> Iterator[Server]:
    root = tmp_path / "models"
    models.words(root, DEADLY_MODEL)
    models.words(root)
    with serving(root, tmp_path, *flags, **variables) as server:
        yield server


def ends(server: Server) -> list[list[str]]:
    """Return the trials of each engine that ended."""
    return [event.get("on_trial", []) for event in server.events("child ended") if event["child"].startswith("engine")]


def reason(server: Server) -> str:
    """Return why the model is unavailable, empty while it is served."""
    listed = httpx.get(f"{server.address}/models", timeout=60, trust_env=False).json()
    return "".join(entry["reason"] for entry in listed["unavailable"] if entry["name"] == DEADLY_MODEL)


def check_becomes_unavailable(server: Server) -> None:
    """Send requests for the model until it is unavailable, and check that it has ended no more engines than are allowed."""
    with asking(server, DEADLY) as replies:
        eventually(lambda: reason(server) or len(ends(server)) > MAX_ENDS)
    assert reason(server) == REASON, f"still served after {len(ends(server))} ends of engines"
    assert all(reply.status_code == 503 for reply in replies)
    assert ends(server) == [[f"{DEADLY_MODEL}/1"]] * MAX_ENDS


def check_listed(server: Server) -> None:
    refused = server.infer(DEADLY_MODEL, [TEXT])
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert f"{DEADLY_MODEL} version 1 cannot be served: {REASON}" in refused.json()["error"]
    [indexed] = [row for row in server.client.post("/v2/repository/index").json() if row["name"] == DEADLY_MODEL]
    assert (indexed["state"], indexed["reason"]) == ("UNAVAILABLE", REASON)
    assert any(event["model"] == DEADLY_MODEL and event["reason"] == REASON for event in server.events("not served"))
    assert server.metric("seqserve_model_changes_total", outcome="invalid_model") == 1


def test_model_that_ends_engines_becomes_unavailable_and_the_other_is_served(tmp_path: Path, deadly: Path) -> None:
    """Of two engines and two frontends, no request for the other model fails. After its repair the model is loaded again."""
    with started(tmp_path, "--device", "cpu,cpu", "--frontends", "2") as server:
        deadly.write_text("batch")
        with answering(server, OTHER, OTHER):
            check_becomes_unavailable(server)
        check_listed(server)
        eventually(server.ready)
        deadly.write_text("")
        load(server, DEADLY_MODEL)
        assert not reason(server)
        assert server.infer(DEADLY_MODEL, [TEXT]).status_code == 200
        assert len(ends(server)) == MAX_ENDS
        assert server.metric("seqserve_requests_total", model="words", outcome="engine_lost") == 0


def test_model_whose_load_ends_engines_is_not_loaded(tmp_path: Path, deadly: Path) -> None:
    """The load fails with the first end. The version that was served before is served on."""
    with started(tmp_path, "--device", "cpu,cpu") as server:
        deadly.write_text("load")
        models.words(tmp_path / "models", DEADLY_MODEL, version=2)
        failed = load(server, DEADLY_MODEL, status=503)
        assert "ended while it loaded deadly version 2" in failed["error"]
        deadly.write_text("")
        eventually(lambda: server.ready() and server.infer(DEADLY_MODEL, [TEXT]).status_code == 200)
        assert server.infer(DEADLY_MODEL, [TEXT]).json()["version"] == "1"
        assert ends(server) == [[f"{DEADLY_MODEL}/2"]] * 2, "each engine ended once"


def test_start_leaves_out_a_model_that_ends_engines(tmp_path: Path, deadly: Path) -> None:
    deadly.write_text("load")
    with started(tmp_path, strict="0") as server:
        assert server.infer("words", [TEXT]).status_code == 200
        check_listed(server)
        assert ends(server) == [[f"{DEADLY_MODEL}/1"]] * MAX_ENDS
