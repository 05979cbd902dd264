"""`make loadtest`: users of every kind, and a status that shows failed requests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.serving import Server

KINDS = ["OneText", "TenTexts", "TokenIds", "Session", "OpenInference"]


def figures(printed: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests and failures by kind of user from locust's table."""
    lines = re.findall(r"^(?:POST)? +([A-Z][A-Za-z ]+?) +(\d+) +(\d+)\([\d.]+%\) \|", printed, re.MULTILINE)
    return {name: (int(requests), int(failures)) for name, requests, failures in lines}


def test_every_kind_of_user_gets_answers_without_failures(
    server: Server, models_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sessions, open_sessions = server.metric("seqserve_sessions_ended_total", reason="ended"), server.metric("seqserve_sessions")
    out = tmp_path / "deep" / "out"
    words = ("--models", str(models_folder), "--users", "8", "--seconds", "3", "--out", str(out))
    assert main(["locust", "--url", f"{server.address}/", *words]) == 0
    printed = capfd.readouterr()
    assert "8 users for 3 s" in printed.out and "words 2" in printed.out
    rows = figures(printed.err)
    assert not any(failures for _, failures in rows.values())
    assert all(rows[kind] > (0, 0) for kind in KINDS)
    assert "<html" in (out / "locust.html").read_text()
    assert server.metric("seqserve_sessions_ended_total", reason="ended") > sessions
    assert server.metric("seqserve_sessions") <= open_sessions, "each user ends its session"


def test_failed_request_is_reported_with_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A new server with the embedded models refuses requests with more than five inputs."""
    config = tmp_path / "settings.toml"
    config.write_text("[limits]\nmax_inputs = 5\n")
    words = ["--users", "7", "--seconds", "3", "--out", str(tmp_path), "--", "--device", "cpu", "--config", str(config)]
    assert main(["locust", *words]) == 1
    printed = capfd.readouterr()
    assert "question-type-cnn 1, question-type-lstm 1, question-type-sru 1, sensor-forecast 1" in printed.out
    assert "TenTexts: 413 too_large" in printed.err
    rows = figures(printed.err)
    assert [kind for kind in KINDS if rows[kind][1]] == ["TenTexts"]
    assert '"ended"' in (tmp_path / "server.log").read_text()


def test_missing_server_is_reported_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "http://127.0.0.1:9/models does not answer like seqserve" in capsys.readouterr().err


def test_failed_server_start_names_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--out", str(tmp_path), "--", "--frontends", "none"]) == 2
    assert "server.log" in capsys.readouterr().err
    assert "--frontends is 'none'" in (tmp_path / "server.log").read_text()
