"""`seqserve bench`: a smoke test on a running server. `tests/long/test_load_scenarios.py` has whole scenarios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench
from service.cli import main
from tests.serving import Server


def test_levels_are_printed_and_written(
    server: Server, models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.0)
    words = ["bench", "--url", f"{server.address}/", "--models", str(models_folder), "--model", "words", "--callers", "2"]
    assert main([*words, "--seconds", "0.2", "--json", str(tmp_path / "records")]) == 0
    assert "words version 2" in capsys.readouterr().out
    [record] = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert (record["loop"], record["callers"], record["failures"]) == ("closed", 2, {})
