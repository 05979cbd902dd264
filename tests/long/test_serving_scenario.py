"""The scenario measures this service, and reports skipped servers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import servers
from loadtest.__main__ import main
from loadtest.comparison import contenders
from loadtest.comparison.contenders import SEQSERVE, TRITON
from loadtest.comparison.models import CNN
from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result
from loadtest.generator.loops import WRONG
from loadtest.scenarios import serving


@pytest.fixture(autouse=True)
def _own_cores() -> Iterator[None]:
    """The scenario limits its process to two cores."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.server
def test_every_endpoint_of_every_server_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contenders, "ENVIRONMENT", tmp_path / "none")
    monkeypatch.setattr(serving, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(serving, "REQUESTS", 20)
    out = tmp_path / "out"
    names = ["--servers", SEQSERVE, TRITON, "--models", CNN, "--logs", str(tmp_path / "logs")]
    load = ["--callers", "2", "--rates", "20", "--seconds", "0.2", "--rounds", "1"]
    assert main(["serving", *names, *load, "--out", str(out)]) == 0
    [path] = out.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    levels = [(record["server"], record["endpoint"], record.get("callers"), record.get("rate")) for record in records]
    loads = [(2, None), (None, 20)]
    assert levels == [(SEQSERVE, name, *load) for name in ("/infer", "OIP binary", "gRPC") for load in loads]
    for record in records:
        assert record["model"] == CNN
        assert record["failed"] == 0 < record["generators_us"] <= 1e6 and {"machine", "date", "versions"} <= record.keys()
        assert record["cpu_us"] >= 0.99 * (record["frontends_us"] + record["engine_us"]) > 0
    printed = capsys.readouterr().out
    assert f"{TRITON} was skipped: not installed" in printed and "rate over Triton's constant answer" in printed


@pytest.mark.parametrize(
    ("answers", "failure", "reason"), [(5, {WRONG: 1}, "other scores"), (0, {"status 503": 3}, "status 503")]
)
def test_server_that_answers_wrongly_or_not_at_all_is_not_timed(
    answers: int, failure: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "START_SECONDS", 0.0)
    monkeypatch.setattr(serving, "run_in_process", lambda _: Result(1.0, 0, answers, b"", failure, 0.0, []))
    server = contenders.SERVERS[0]
    with pytest.raises(CannotMeasure, match=reason):
        serving._check(Job("http", "", 0, "", [], "scores", []), server, server.endpoints[0])
