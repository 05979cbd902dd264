"""`seqserve bench` and every kind of load on a running server: a smoke test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from loadtest import bench, requests
from loadtest.generator.loops import run
from loadtest.requests import KINDS, Clients
from service.cli import main
from tests.serving import Server

STAGES = ["parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode"]


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)


def command(server: Server, models_folder: Path, *words: str) -> list[str]:
    return ["bench", "--url", f"{server.address}/", "--models", str(models_folder), "--seconds", "0.4", *words]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_levels_are_printed_and_written(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, opened = tmp_path / "closed.jsonl", tmp_path / "open.jsonl"
    assert main(command(server, models_folder, "--model", "words", "--callers", "4", "--json", str(closed))) == 0
    printed = capsys.readouterr().out
    assert "words version 2" in printed and "4 callers" in printed
    [record] = records(closed)
    assert (record["loop"], record["callers"], record["failures"]) == ("closed", 4, {})
    assert record["answers"] > 0 < record["p50_ms"] <= record["p99_ms"] and list(record["stages_ms"]) == STAGES
    words = ("--model", "sensors", "--rates", "50", "--arrivals", "bursty", "--inputs", "2", "--seed", "4")
    assert main(command(server, models_folder, *words, "--json", str(opened))) == 0
    assert "inputs a request: 2 (rows of 3 numbers), seed 4\nopen loop, bursty arrivals" in capsys.readouterr().out
    assert records(opened)[0]["rate"] == 50


def test_failed_requests_set_the_status(server: Server, models_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(server, models_folder, "--model", "words", "--inputs", "65")) == 1
    assert "failed with status 413 too_large" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_client_gets_answers(
    kind: str, server: Server, models_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "QUESTIONS", "words")
    monkeypatch.setattr(requests, "SENSOR", "sensors")
    monkeypatch.setattr(requests, "REQUESTS", 20)
    addresses: Any = SimpleNamespace(url=server.address, grpc=server.grpc)
    job = KINDS[kind](Clients(server.address, models_folder)).job(addresses, callers=2, seconds=0.2)
    answered: set[bool] = set()
    for _ in range(100):  # a busy machine may answer nothing in a short time
        result = uvloop.run(run(job))
        assert not result.failures
        answered.add(result.answers > 0)
        if result.answers:
            break
    assert True in answered
    for number in range(requests.SESSIONS if kind == "chunk" else 0):
        server.client.delete(f"/sessions/load-{number}/state")


@pytest.mark.parametrize("words", ["--callers 1,two", "--seconds nan", "--callers 1 --rates 5"])
def test_invalid_options_exit_with_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words.split()])
    assert end.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


def test_missing_server_model_and_setting_are_named(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--model", "unknown"]) == 1
    assert main(["bench", "--url", server.address, "--model", "unknown"]) == 1
    assert main(command(server, models_folder, "--model", "words", "--trace", str(tmp_path / "trace.json"))) == 1
    printed = capsys.readouterr().err
    assert "--url" in printed and "serves no model unknown" in printed and "SEQSERVE_DEBUG" in printed
