"""The scenarios of the load test on a new server, each with little load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.requests import KINDS
from loadtest.scenarios.engine import STAGES
from loadtest.scenarios.fairness import ALONE, BESIDE, UNFAIR
from service.access.keys import create
from service.access.scopes import Scope
from tests.certificates import Authority
from tests.serving import serving

USERS = ["OneText", "TenTexts", "TokenIds", "Session", "OpenInference"]


def records(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_capacity_measures_every_kind_in_both_loops(tmp_path: Path) -> None:
    options = ["--generators", "2", "--callers", "2", "--seconds", "2", "--rounds", "1", "--share", "0.3"]
    assert main(["capacity", *options, "--out", str(tmp_path)]) == 0
    measured = records(tmp_path)
    assert [(record["request"], record["loop"]) for record in measured] == [
        (kind, loop) for kind in KINDS for loop in ("closed", "30%")
    ]
    assert all(record["failed"] == 0 < record["answers"] for record in measured)


def test_fairness_measures_every_case(tmp_path: Path) -> None:
    options = ["--units", "16", "--steps", "8", "--seconds", "2", "--rounds", "1", "--share", "0.01", "--noise", "2"]
    assert main(["fairness", *options, "--out", str(tmp_path)]) in (0, 1)  # a busy machine may not answer all requests in time
    assert [record["case"] for record in records(tmp_path)] == [ALONE, BESIDE, UNFAIR]


def test_stages_of_the_engine_add_up(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--models", "question-type-cnn", "--rows", "4", "--batches", "1", "--seconds", "0.02"]
    assert main(["engine", *options, "--out", str(tmp_path)]) == 0
    single, *sizes = records(tmp_path)
    assert single["stages_us"]["total"][0] == pytest.approx(
        sum(single["stages_us"][stage][0] for stage in STAGES[:-1]), abs=0.1
    )
    assert [size["rows"] for size in sizes] == [1, 2, 4]


def figures(printed: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests and failures by kind of user from locust's table."""
    lines = re.findall(r"^(?:POST)? +([A-Z][A-Za-z ]+?) +(\d+) +(\d+)\([\d.]+%\) \|", printed, re.MULTILINE)
    return {name: (int(requests), int(failures)) for name, requests, failures in lines}


def test_locust_reports_failed_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A new server with the embedded models refuses requests with more than five inputs."""
    config = tmp_path / "settings.toml"
    config.write_text("[limits]\nmax_inputs = 5\n")
    words = ["--users", "7", "--seconds", "5", "--out", str(tmp_path), "--", "--device", "cpu", "--config", str(config)]
    assert main(["locust", *words]) == 1
    rows = figures(capfd.readouterr().err)
    assert all(rows[user][0] for user in USERS) and [user for user in USERS if rows[user][1]] == ["TenTexts"]


def test_locust_sends_the_key_over_tls(models_folder: Path, tmp_path: Path) -> None:
    keys, key, authority = tmp_path / "keys.toml", tmp_path / "key", Authority(tmp_path)
    key.write_text(create(keys, "measuring", [Scope.INFER, Scope.SESSION, Scope.METRICS], "measuring") + "\n")
    certificate, private = authority.sign("service")
    flags = ("--keys", str(keys), "--tls-cert", str(certificate), "--tls-key", str(private))
    with serving(models_folder, tmp_path, *flags) as server:
        line = ["locust", "--url", server.address, "--ca", str(authority.certificate), "--users", "3", "--seconds", "3"]
        assert main([*line, "--key-file", str(key), "--out", str(tmp_path / "out")]) == 0
    assert key.read_text().strip() not in "".join(
        file.read_text(errors="ignore") for file in (tmp_path / "out").iterdir() if file.is_file()
    )
