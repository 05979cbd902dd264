"""`seqserve bench` loads a running server and reports the figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench
from service.cli import main
from tests.serving import Server

STAGES = {"parse", "queue", "stage_in", "compute", "stage_out", "encode", "total"}


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)


def command(server: Server, models_folder: Path, *words: str) -> list[str]:
    return ["bench", "--url", f"{server.address}/", "--models", str(models_folder), "--seconds", "0.4", *words]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_level_has_a_line_in_the_table_and_in_the_file(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    assert main(command(server, models_folder, "--model", "words", "--callers", "1,4", "--json", str(file))) == 0
    printed = capsys.readouterr()
    assert "words version 2" in printed.out, "the newest version"
    assert "inputs a request: 1 (texts)" in printed.out
    head, *lines = (line.split() for line in printed.out.splitlines()[-3:])
    assert head[:4] == ["callers", "answers/s", "p50", "ms"]
    assert [line[0] for line in lines] == ["1", "4"]
    assert re.search(r"4 +\d of 0.4 s +\d+ answers +\d+/s +p50 [0-9.]+ ms .* 0 failed", printed.err)
    for record, callers in zip(records(file), ("1", "4"), strict=True):
        assert (record["model"], record["version"], record["level"]) == ("words", "2", callers)
        assert record["answers"] > 0
        assert record["failures"] == {}
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert record["rows_per_batch"] >= 1
        assert set(record["stages_ms"]) == STAGES
        assert all(milliseconds > 0 for milliseconds in record["stages_ms"].values())


def test_rates_run_an_open_loop_on_any_model(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "sensors", "--rates", "50", "--arrivals", "bursty", "--inputs", "2", "--seed", "4")
    assert main(command(server, models_folder, *words, "--json", str(file))) == 0
    printed = capsys.readouterr().out
    assert "inputs a request: 2 (rows of 3 numbers), seed 4" in printed
    assert "open loop, bursty arrivals" in printed
    assert [record["level"] for record in records(file)] == ["50/s"]


def test_failed_requests_are_reported_and_set_the_status(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "words", "--callers", "2", "--inputs", "65", "--json", str(file))
    assert main(command(server, models_folder, *words)) == 1
    assert re.search(r"2: \d+ failed with 413 too_large", capsys.readouterr().out)
    assert records(file)[0]["answers"] == 0


def test_missing_server_is_reported_with_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9"]) == 1
    printed = capsys.readouterr().err
    assert "http://127.0.0.1:9" in printed
    assert "--url" in printed


def test_malformed_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "localhost:8000"]) == 1
    assert "localhost:8000" in capsys.readouterr().err


def test_unknown_model_is_reported_with_the_served_ones(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", server.address, "--model", "unknown"]) == 1
    printed = capsys.readouterr().err
    assert "serves no model unknown" in printed
    assert "sensors" in printed


@pytest.mark.parametrize(
    "words",
    [["--callers", "0"], ["--callers", "1,two"], ["--rates", "-5"], ["--seconds", "nan"], ["--inputs", "0"]],
    ids=" ".join,
)
def test_invalid_number_exits_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert words[0] in printed
    assert words[1].rpartition(",")[2] in printed


def test_callers_and_rates_are_exclusive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--callers", "1", "--rates", "5"])
    assert "not allowed with" in capsys.readouterr().err


def test_trace_without_debug_is_reported_before_any_load(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert main(command(server, models_folder, "--model", "words", "--trace", str(file))) == 1
    printed = capsys.readouterr()
    assert "--debug" in printed.err and "SEQSERVE_DEBUG" in printed.err and server.address in printed.err
    assert printed.out == ""
    assert not file.exists()
