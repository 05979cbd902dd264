"""The fairness scenario loads a service with two tenants in every case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.scenarios.fairness import ALONE, BESIDE, UNFAIR


@pytest.mark.server
def test_every_case_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--units", "16", "--steps", "8", "--seconds", "0.5", "--rounds", "1", "--share", "0.01", "--noise", "2"]
    assert main(["fairness", *options, "--out", str(tmp_path)]) in (0, 1)  # a busy machine may not answer all requests in time
    [path] = tmp_path.glob("fairness-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["case"] for record in records] == [ALONE, BESIDE, UNFAIR]
    assert all(record["p50_ms"] <= record["p99_ms"] for record in records)
    assert [record["noise/s"] > 0 for record in records] == [False, True, True]
    assert capsys.readouterr().out.count("noisy tenant") == 1
