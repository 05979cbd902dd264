"""Records are complete, the table marks the fastest, and a run writes one file for each family and device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.bench import __main__ as command
from kernels.bench import questions, report
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.peaks import Peaks
from kernels.bench.report import FMA_SHARE, MEMORY, READ_SHARE, SHARE, Measurement, Setting
from kernels.bench.tables import write
from kernels.bench.timing import Spread
from kernels.bench.workload import Workload
from kernels.bench.workloads import FAMILIES, workloads
from tests.kernels.bench.conftest import CPU, ENCODERS, FORMED, RECURRENCE, TINY, measured, tiny
from tests.kernels.families import cpu_backends

TEXTS = {"family", "workload", "want", "backend", "device", "dtype", "lengths", "timing", "date"}
COUNTS = {"rows", "steps", "tokens", "input", "hidden", "layers", "directions", "threads", "repetitions"}
FIGURES = {"median_us", "p10_us", "p90_us", "error"}

PEAKS = Peaks(1000.0, {1 << 18: 100.0})
SETTING = Setting("Abacus, 2 cores", "2026-01-02", {"torch": "2"}, threads=1)


def measurement(backend: str, timing: str, median_us: float) -> Measurement:
    return Measurement(tiny("lstm"), backend, timing, Spread(median_us, median_us - 1, median_us + 1, 20), 1e-7)


@pytest.mark.parametrize("workload", [*TINY, *FORMED, *ENCODERS, RECURRENCE], ids=str)
def test_every_record_has_all_fields(workload: Workload, tmp_path: Path) -> None:
    write(tmp_path / "new" / "file.jsonl", [one.record(SETTING) for one in measured(workload).measurements])
    record, *_ = map(json.loads, (tmp_path / "new" / "file.jsonl").read_text().splitlines())
    assert record.keys() == TEXTS | COUNTS | FIGURES | {"form", "versions"}
    assert record["form"] == workload.form
    assert all(isinstance(record[name], str) and record[name] for name in TEXTS)
    assert all(isinstance(record[name], int) and record[name] > 0 for name in COUNTS)
    assert all(isinstance(record[name], float) and math.isfinite(record[name]) for name in FIGURES)
    assert record["steps"] <= record["tokens"] <= record["steps"] * record["rows"]


def test_record_of_a_gpu_has_no_threads() -> None:
    assert "threads" not in measurement("fast", "kernel", 2.0).record(Setting("H200", "2026-01-02", {}, threads=None))


def test_record_of_a_cpu_has_its_peaks() -> None:
    record = measurement("fast", "eager", 2.0).record(replace(SETTING, peaks=PEAKS))
    assert record["peaks"] == {"multiply_adds_per_us": 1000.0, "read_bytes_per_us": {1 << 18: 100.0}}


@pytest.mark.parametrize(
    "threads, name", [(None, "gru-abacus-2core"), (1, "gru-abacus-2core"), (2, "gru-abacus-2core-2-threads")]
)
def test_results_of_several_threads_have_their_own_name(threads: int | None, name: str) -> None:
    assert replace(SETTING, threads=threads).file_name("gru") == name


def test_table_marks_the_fastest_of_each_timing() -> None:
    rows = [
        measurement("first", "eager", 20.0),
        measurement("first", "kernel", 3.0),
        measurement("second", "eager", 999.7),
        measurement("third", "kernel", 2.0),
    ]
    heading, eager, kernel = report.table(rows).splitlines()
    assert heading.split() == ["workload", "timing", "first", "second", "third"]
    assert eager.split()[-6:] == ["eager", "*20", "(19-21)", "1000", "(999-1001)", "-"]
    assert kernel.split()[-6:] == ["kernel", "3", "(2-4)", "-", "*2", "(1-3)"]


def test_extra_values_have_tables_and_are_in_the_record() -> None:
    rows = [
        replace(measurement("first", "kernel", 3.0), extra={MEMORY: 3.0, SHARE: 0.5}),
        replace(measurement("first", "eager", 20.0), extra={MEMORY: 3.0, SHARE: 0.1}),
        replace(measurement("second", "eager", 30.0), extra={SHARE: 0.25}),
        measurement("third", "kernel", 2.0),
    ]
    of_memory, of_share = ([line.split() for line in part.splitlines()] for part in report.extras(rows).split("\n\n"))
    assert of_memory == [["memory", "growth", "first"], [*str(tiny("lstm")).split(), "3"]]
    assert of_share[0][-2:] == ["first", "second"] and of_share[1][-2:] == ["0.5", "0.25"]
    assert rows[0].record(SETTING)[MEMORY] == 3.0 and SHARE not in rows[3].record(SETTING)
    assert report.extras(rows[3:]) == ""


def test_record_of_an_encoder_has_its_levels() -> None:
    record = replace(measurement("first", "eager", 1.0), workload=ENCODERS[0]).record(SETTING)
    assert (record["layers"], record["directions"]) == (2, 2)


@pytest.mark.parametrize(
    "name, short",
    [
        ("NVIDIA H200", "h200"),
        ("AMD EPYC, 2 cores", "epyc-2core"),
        ("AMD EPYC 9654 96-Core Processor, 4 cores", "epyc-9654-4core"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz, 1 cores", "xeon-e5-2680-v4-1core"),
    ],
)
def test_device_has_a_short_name_for_files(name: str, short: str) -> None:
    assert report.slug(name) == short


@pytest.mark.parametrize("rows, mean, longest", [(1, 10, 10), (8, 10, 17), (32, 10.2, 26)])
def test_few_question_lengths_are_typical(rows: int, mean: float, longest: int) -> None:
    lengths = questions.lengths(rows)
    assert len(lengths) == rows and max(lengths) <= longest
    assert sum(lengths) / rows == pytest.approx(mean, abs=0.5)
    assert lengths == questions.lengths(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_run_is_smaller(family: str, device: str) -> None:
    quick, whole = (workloads(family, device, quick) for quick in (True, False))
    assert 0 < len(quick) < len(whole) == len(set(whole))
    assert {workload.family for workload in whole} == {family}


@pytest.fixture
def few_workloads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Baseline], None]:
    """Limit the command to one tiny workload for each family, and one baseline. The peaks are known."""

    def set_up(baseline: Baseline) -> None:
        monkeypatch.setattr(command, "workloads", lambda family, *_: [work for work in TINY if work.family == family][:1])
        monkeypatch.setattr(command, "BASELINES", dict.fromkeys(FAMILIES, (baseline,)))
        monkeypatch.setattr(command, "measured_peaks", lambda *_: PEAKS)

    return set_up


RIGHT = Baseline("twin", lambda case: TimedCall(case.encoder("framework")))
WRONG = Baseline("broken", lambda case: TimedCall(lambda: case.encoder("framework")() + 1))


def test_each_family_writes_a_file(
    few_workloads: Callable[[Baseline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_workloads(RIGHT)
    assert command.main(["all", "--quick", "--out", str(tmp_path)]) == 0
    short = report.slug(report.device_name(CPU))
    assert {path.name for path in tmp_path.iterdir()} == {f"{family}-{short}.jsonl" for family in FAMILIES}
    for path in tmp_path.iterdir():
        family = path.name.partition("-")[0]
        assert [json.loads(line)["backend"] for line in path.read_text().splitlines()] == [*cpu_backends(family), "twin"]
    printed = capsys.readouterr()
    assert "lstm on" in printed.out and "written to" in printed.out
    assert "1/1 lstm layer" in printed.err


def test_wrong_baseline_sets_exit_status_1(
    few_workloads: Callable[[Baseline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_workloads(WRONG)
    assert command.main(["lstm", "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG: broken on lstm" in capsys.readouterr().out
    assert "broken" not in next(tmp_path.iterdir()).read_text()


def test_shares_of_the_peaks_are_printed_and_written(
    few_workloads: Callable[[Baseline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_workloads(RIGHT)
    assert command.main(["lstm", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert str(PEAKS) in printed and "share of" in printed
    (path,) = tmp_path.iterdir()
    for record in map(json.loads, path.read_text().splitlines()):
        assert FMA_SHARE in record or READ_SHARE in record
        assert record["peaks"]["read_bytes_per_us"] == {str(1 << 18): 100.0}


def test_run_with_two_threads_has_its_own_file_and_no_goals(
    few_workloads: Callable[[Baseline], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_workloads(RIGHT)
    monkeypatch.setattr(command, "workloads", lambda *_: [])  # two threads would slow each other down on a busy machine
    monkeypatch.setattr("kernels.bench.goals.table", lambda goals, *_: f"{len(goals)} goals" if goals else "")
    for threads in ("1", "2"):
        assert command.main(["gru", "--quick", "--threads", threads, "--out", str(tmp_path)]) == 0
    name = f"gru-{report.slug(report.device_name(CPU))}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.jsonl", f"{name}-goals.txt", f"{name}-2-threads.jsonl"}


def test_goals_are_printed_and_written(
    few_workloads: Callable[[Baseline], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few_workloads(RIGHT)
    monkeypatch.setattr("kernels.bench.goals.table", lambda _, rows, backends: f"{len(rows)} rows, {backends[-2:]}")
    assert command.main(["lstm", "--quick", "--out", str(tmp_path)]) == 0
    setting, _, line = (tmp_path / f"lstm-{report.slug(report.device_name(CPU))}-goals.txt").read_text().splitlines()
    rows = len(cpu_backends("lstm")) + 1
    assert line == f"{rows} rows, ['framework', 'reference']" and line in capsys.readouterr().out
    assert report.device_name(CPU) in setting


def test_quick_run_writes_nothing_by_default(
    few_workloads: Callable[[Baseline], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_workloads(RIGHT)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    assert command.main(["gru", "--quick"]) == 0
    assert not (tmp_path / "results").exists()


def test_missing_device_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["lstm", "--device", "toaster"])
    assert "argument --device: toaster" in capsys.readouterr().err
