"""`seqserve bench`: a line for each level, in the tables and in the file, and a status that shows failed requests."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench
from loadtest.generator.job import Job, Result
from loadtest.generator.scaling import BUSY
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


def test_each_number_of_callers_has_a_line_in_each_table_and_in_the_file(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "words", "--callers", "1,4", "--seconds", "2", "--json", str(file))
    assert main(command(server, models_folder, *words)) == 0
    printed = capsys.readouterr()
    assert "words version 2" in printed.out and "inputs a request: 1 (texts)" in printed.out
    lines = [re.split(r" {2,}", line.strip()) for line in printed.out.splitlines()]
    heads = [line for line in lines if line[0] == "load"]
    assert heads == [
        ["load", "answers/s", "p50 ms", "p90 ms", "p99 ms", "failed", "rows/batch", "generators"],
        ["load", *STAGES, "sum", "total"],
    ]
    assert [line[0] for line in lines if line[0].endswith(("caller", "callers"))] == ["1 caller", "4 callers"] * 2
    assert re.search(r"4 callers: \d+/s +p50 [0-9.]+ ms .* 0 failed", printed.err)
    for record, callers in zip(records(file), (1, 4), strict=True):
        assert (record["model"], record["version"], record["loop"], record["callers"]) == ("words", "2", "closed", callers)
        assert record["limited_by_generators"] == (record["generators_busy"] > BUSY)
        assert record["answers"] > 0 and record["failures"] == {} and record["rows_per_batch"] >= 1
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert list(record["stages_ms"]) == STAGES
        assert all(ms > 0 for stage, ms in record["stages_ms"].items() if stage != "device_wait"), "it is 0 on a CPU"
        assert record["stages_sum_ms"] == pytest.approx(sum(record["stages_ms"].values()), abs=0.01)


def test_default_is_an_open_loop_at_shares_of_the_largest_rate(server: Server, models_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    assert main(command(server, models_folder, "--model", "words", "--seconds", "2", "--json", str(file))) == 0
    search, *levels = records(file)
    assert (search["loop"], search["callers"]) == ("closed", bench.SEARCH_CALLERS)
    assert [level["rate"] / search["answers_per_second"] for level in levels] == pytest.approx(bench.SHARES, rel=0.01)


def test_rates_run_an_open_loop_on_any_model(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "sensors", "--rates", "50", "--arrivals", "bursty", "--inputs", "2", "--seed", "4")
    assert main(command(server, models_folder, *words, "--generators", "2", "--json", str(file))) == 0
    assert "inputs a request: 2 (rows of 3 numbers), seed 4\nopen loop, bursty arrivals" in capsys.readouterr().out
    [record] = records(file)
    assert (record["level"], record["rate"], record["generators"]) == ("50/s", 50, 2)


def test_failed_requests_end_the_search_and_set_the_status(
    server: Server, models_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(server, models_folder, "--model", "words", "--inputs", "65")) == 1
    printed = capsys.readouterr().out
    assert re.search(r"7 callers: \d+ failed with status 413 too_large", printed), "512 sequences at once"
    assert "25%" not in printed


def test_level_limited_by_the_generator_is_measured_again(
    server: Server, models_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generator is busy, two are not. The next level starts with two."""
    sent: list[list[Job]] = []

    def run_in_processes(jobs: list[Job]) -> Result:
        sent.append(jobs)
        return Result(1.0, 0, 100, array("d", [0.001]).tobytes(), {}, 0.9, [])

    monkeypatch.setattr(bench, "run_in_processes", run_in_processes)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert main(command(server, models_folder, "--model", "words", "--callers", "32,64")) == 0
    again = "32 callers: the load generator was the limit, measured again with 2 generator processes"
    assert capsys.readouterr().out.splitlines().count(again) == 1
    assert [[job.callers for job in jobs] for jobs in sent] == [[32], [16, 16], [32, 32]]
    assert main(command(server, models_folder, "--model", "words", "--callers", "8", "--generators", "1")) == 0
    printed = capsys.readouterr().out
    assert "8 callers: limited by the load generator: its processes were busy for 90% of the time" in printed
    assert "measured again" not in printed, "the number of processes is fixed"


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9", "--url"), ("localhost:8000", "localhost:8000"), (None, "serves no model unknown")],
)
def test_wrong_address_or_model_is_named(
    url: str | None, reason: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", url or server.address, "--model", "unknown"]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--callers 1,two", "--rates -5", "--seconds nan", "--generators 0", "--callers 1 --rates 5"])
def test_invalid_options_exit_with_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words.split()])
    assert end.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


def test_trace_without_debug_is_reported_before_any_load(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert main(command(server, models_folder, "--model", "words", "--trace", str(file))) == 1
    printed = capsys.readouterr()
    assert "--debug" in printed.err and "SEQSERVE_DEBUG" in printed.err and server.address in printed.err
    assert printed.out == "" and not file.exists()
