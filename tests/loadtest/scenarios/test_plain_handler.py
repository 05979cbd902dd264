"""The plain-handler scenario loads both servers alternately, and compares them within each round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import servers
from loadtest.__main__ import main
from loadtest.discovery import CannotMeasure
from loadtest.scenarios import plain_handler
from loadtest.scenarios.plain_handler import PLAIN, SERVICE
from loadtest.servers import ServerProcess
from loadtest.traffic import Traffic

MODEL = "question-type-cnn"


def test_service_and_plain_handler_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL).symlink_to(servers.MODELS / MODEL)
    monkeypatch.setattr(servers, "seqserve", lambda: ("-m", "service", "serve", "--models", str(tmp_path / "models")))
    out, options = tmp_path / "out", ["--callers", "1", "2", "--seconds", "0.1", "--rounds", "2"]
    assert main(["plain-handler", MODEL, *options, "--out", str(out)]) == 0
    [path] = out.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [(record["callers"], record["round"], record["server"]) for record in records]
    assert cases == [(callers, round, server) for callers in (1, 2) for round in (0, 1) for server in (SERVICE, PLAIN)]
    for record in records:
        assert record["failed"] == 0 < record["answers"]
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert {"machine", "date", "versions"} <= record.keys()
    assert sum(record["cpu_ms"] for record in records) > 0, "the clock of a process may be coarser than a trial"
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(("1", "2"))]
    assert [line[:2] for line in lines] == [
        ["1", SERVICE],
        ["1", PLAIN],
        ["1", SERVICE],
        ["2", SERVICE],
        ["2", PLAIN],
        ["2", SERVICE],
    ]


def test_nothing_is_timed_when_the_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"ours": [{"near": 0.5}], "same": [{"near": 0.5 + 1e-3}], "other": [{"near": 0.6}]}
    monkeypatch.setattr(plain_handler, "_scores", lambda server, _: scores[server.url])
    ours, same, other = (ServerProcess(url, "", None) for url in scores)  # type: ignore[arg-type] # not started
    model = {"name": "small", "version": "1", "min_steps": 1, "input": {"kind": "ids", "max_steps": 9, "vocabulary": 5}}
    plain_handler._check_agreement(ours, same, Traffic(model))
    with pytest.raises(CannotMeasure, match="different scores"):
        plain_handler._check_agreement(ours, other, Traffic(model))
