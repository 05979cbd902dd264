"""`seqserve bench --trace` records batches of its last level. `make test-all` runs this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import bench
from service.cli import main
from tests import traces
from tests.serving import Server, serving


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)


@pytest.fixture(scope="module")
def traced(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models_folder, tmp_path_factory.mktemp("log"), debug="1") as running:
        yield running


def command(server: Server, models_folder: Path, file: Path, *words: str) -> list[str]:
    shared = ["bench", "--url", server.address, "--models", str(models_folder), "--model", "words", "--seconds", "1"]
    return [*shared, "--trace", str(file), *words]


def test_trace_has_batches_of_the_last_level(traced: Server, models_folder: Path, tmp_path: Path) -> None:
    assert main(command(traced, models_folder, tmp_path / "trace.json", "--callers", "1,4")) == 0
    batches = [event for event in traces.tracks(json.loads((tmp_path / "trace.json").read_text()))["batches"] if event.args]
    assert {event.args["model"] for event in batches} == {"words"}
    assert 1 < len(batches) <= 100


def test_unwritable_file_is_named(
    traced: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(traced, models_folder, tmp_path / "nowhere" / "trace.json", "--callers", "1")) == 1
    assert "nowhere" in capsys.readouterr().err
