"""The table marks the fastest, and a run writes one file for each family and device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.bench import __main__ as command
from kernels.bench import report
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.peaks import Peaks
from kernels.bench.report import Measurement
from kernels.bench.timing import Spread
from kernels.bench.workloads import FAMILIES, workloads
from tests.kernels.bench.conftest import CPU, TINY, tiny
from tests.kernels.families import cpu_backends

PEAKS = Peaks(1000.0, {1 << 18: 100.0})


def measurement(backend: str, timing: str, median_us: float) -> Measurement:
    return Measurement(tiny("lstm"), backend, timing, Spread(median_us, median_us - 1, median_us + 1, 20), 1e-7)


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
