"""`seqserve bench` loads a running server and reports the figures."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench
from loadtest.generator.job import Job, Result
from loadtest.generator.scaling import BUSY
from loadtest.report import Level
from service.cli import main
from tests.serving import Server

STAGES = ["parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode"]
JOB = Job("http", "127.0.0.1", 1, "", [b"request"], "answer", [[]], seed=7)


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)


def command(server: Server, models_folder: Path, *words: str) -> list[str]:
    return ["bench", "--url", f"{server.address}/", "--models", str(models_folder), "--seconds", "0.4", *words]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def cells(printed: str, first: str) -> list[list[str]]:
    """Return the cells of a table, without the lines after it. first: the second cell of its head."""
    lines = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    [start] = [number for number, line in enumerate(lines) if line[:2] == ["load", first]]
    return list(itertools.takewhile(lambda line: len(line) == len(lines[start]), lines[start:]))


def test_each_number_of_callers_has_a_line_in_each_table_and_in_the_file(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "words", "--callers", "1,4", "--seconds", "2", "--json", str(file))
    assert main(command(server, models_folder, *words)) == 0
    printed = capsys.readouterr()
    assert "words version 2" in printed.out, "the newest version"
    assert "inputs a request: 1 (texts)" in printed.out
    assert "closed loop, 2 s a level" in printed.out
    loads, stages = cells(printed.out, "answers/s"), cells(printed.out, "parse")
    assert loads[0] == ["load", "answers/s", "p50 ms", "p90 ms", "p99 ms", "failed", "rows/batch", "generators"]
    assert stages[0] == ["load", *STAGES, "sum", "total"]
    assert [line[0] for line in loads[1:]] == [line[0] for line in stages[1:]] == ["1 caller", "4 callers"]
    assert re.search(r"4 callers: \d+/s +p50 [0-9.]+ ms .* 0 failed", printed.err)
    for record, callers in zip(records(file), (1, 4), strict=True):
        assert (record["model"], record["version"], record["loop"], record["callers"]) == ("words", "2", "closed", callers)
        assert record["generators"] >= 1 and 0 < record["generators_busy"] <= 1
        assert record["limited_by_generators"] == (record["generators_busy"] > BUSY)
        assert record["answers"] > 0
        assert record["failures"] == {}
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert record["rows_per_batch"] >= 1
        assert list(record["stages_ms"]) == STAGES
        assert all(ms > 0 for stage, ms in record["stages_ms"].items() if stage != "device_wait"), "it is 0 on a CPU"
        assert record["stages_sum_ms"] == pytest.approx(sum(record["stages_ms"].values()), abs=0.01)
        assert record["total_ms"] > 0


def test_default_is_an_open_loop_at_shares_of_the_largest_rate(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    assert main(command(server, models_folder, "--model", "words", "--seconds", "2", "--json", str(file))) == 0
    assert "the largest rate in a closed loop, then shares of it in an open loop, poisson arrivals" in capsys.readouterr().out
    search, *levels = records(file)
    assert (search["loop"], search["callers"]) == ("closed", bench.SEARCH_CALLERS)
    assert [level["loop"] for level in levels] == ["open"] * len(bench.SHARES)
    shares = [level["rate"] / search["answers_per_second"] for level in levels]
    assert shares == pytest.approx(bench.SHARES, rel=0.01)


def test_rates_run_an_open_loop_on_any_model(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "sensors", "--rates", "50", "--arrivals", "bursty", "--inputs", "2", "--seed", "4")
    assert main(command(server, models_folder, *words, "--generators", "2", "--json", str(file))) == 0
    printed = capsys.readouterr().out
    assert "inputs a request: 2 (rows of 3 numbers), seed 4" in printed
    assert "open loop, bursty arrivals" in printed
    [record] = records(file)
    assert (record["level"], record["rate"], record["generators"]) == ("50/s", 50, 2)


def test_failed_requests_are_reported_and_set_the_status(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.jsonl"
    words = ("--model", "words", "--callers", "2", "--inputs", "65", "--json", str(file))
    assert main(command(server, models_folder, *words)) == 1
    assert re.search(r"2 callers: \d+ failed with status 413 too_large", capsys.readouterr().out)
    assert records(file)[0]["answers"] == 0


def test_search_without_an_answer_ends_the_run(server: Server, models_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(server, models_folder, "--model", "words", "--inputs", "65")) == 1
    printed = capsys.readouterr().out
    assert re.search(r"7 callers: \d+ failed with status 413 too_large", printed)
    assert [line[0] for line in cells(printed, "answers/s")[1:]] == ["7 callers"], "512 sequences at once"


def test_level_limited_by_the_generator_is_measured_again(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One generator is busy, two are not. The next level starts with two."""
    sent: list[list[Job]] = []

    def run_in_processes(jobs: list[Job]) -> Result:
        sent.append(jobs)
        return Result(1.0, 0, 100, array("d", [0.001]).tobytes(), {}, 0.9, [])

    monkeypatch.setattr(bench, "run_in_processes", run_in_processes)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    file = tmp_path / "figures.jsonl"
    assert main(command(server, models_folder, "--model", "words", "--callers", "32,64", "--json", str(file))) == 0
    again = "32 callers: the load generator was the limit, measured again with 2 generator processes"
    assert capsys.readouterr().out.splitlines().count(again) == 1
    assert [[job.callers for job in jobs] for jobs in sent] == [[32], [16, 16], [32, 32]]
    assert [record["generators"] for record in records(file)] == [2, 2]


def test_level_that_stays_limited_says_so(
    server: Server, models_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run_in_processes", lambda jobs: Result(1.0, 0, 9, b"", {}, 0.95 * len(jobs), []))
    assert main(command(server, models_folder, "--model", "words", "--callers", "8", "--generators", "3")) == 0
    printed = capsys.readouterr().out
    assert "8 callers: limited by the load generator: its processes were busy for 95% of the time" in printed
    assert "measured again" not in printed, "the number of processes is fixed"


def test_load_is_divided_among_generators() -> None:
    closed = bench.divided(JOB, Level("5 callers", 5), 2)
    assert [(job.callers, job.rate, job.seed) for job in closed] == [(3, 0, 7), (2, 0, 8)]
    opened = bench.divided(JOB, Level("90/s", 256, 90.0), 3)
    assert [(job.callers, job.rate) for job in opened] == [(86, 30), (85, 30), (85, 30)]
    assert len(bench.divided(JOB, Level("1 caller", 1), 4)) == 1


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
    [
        *(["--callers", "0"], ["--callers", "1,two"], ["--rates", "-5"], ["--seconds", "nan"], ["--inputs", "0"]),
        ["--generators", "0"],
    ],
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
