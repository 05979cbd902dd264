"""The bench checks answers before it times them, and its figures are those of known samples: a smoke test.

`tests/long/test_kernel_bench.py` runs every baseline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kernels.bench import __main__ as command
from kernels.bench import goals, report
from kernels.bench.baselines.baseline import Baseline, TimedCall, optional_package
from kernels.bench.case import BenchCase
from kernels.bench.goals import on_cuda
from kernels.bench.measure import Bench, Findings
from kernels.bench.peaks import Peaks
from kernels.bench.report import Measurement
from kernels.bench.timing import AT_LEAST, WARM_UP, Spread, repeated, spread
from kernels.bench.work import ReadArray, multiplications, weights_read
from kernels.bench.workload import EMBEDDED, FORMS, Workload
from kernels.bench.workloads import FAMILIES
from tests.kernels.families import cpu_backends

CPU = torch.device("cpu")
PRODUCT = Workload("conv", 1, 10, 10, 10, kind="product")


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    """Restore torch's settings, which the bench changes for the whole process."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def tiny(family: str, kind: str = "layer", lengths: str = "questions", rows: int = 3, form: str | None = None) -> Workload:
    """Return a workload whose hidden size is a multiple of three filter widths."""
    usual = FORMS[family][-1] if family in FORMS else {"dense-conv": "width 5", "text-cnn-ids": EMBEDDED}.get(kind, "")
    return Workload(family, rows, 7, 6, 6, lengths=lengths, kind=kind, form=usual if form is None else form)


TOKENS = sum(tiny("lstm").row_lengths())


def measured(workload: Workload, *baselines: Baseline) -> Findings:
    return Bench(CPU, baselines, budget_s=0.0, progress=lambda _: None).measured([workload])


def breaking(case: BenchCase) -> TimedCall:
    raise RuntimeError("no such instruction")


def missing(case: BenchCase) -> TimedCall:
    optional_package("a_missing_package", "install a_package")
    raise AssertionError("it was found")


def test_faults_of_a_baseline_are_reported_and_do_not_stop_the_others() -> None:
    wrong = Baseline("stubborn", lambda _: TimedCall(lambda: torch.zeros(3, 6)))
    findings = measured(tiny("lstm"), wrong, Baseline("brittle", breaking), Baseline("absent", missing))
    assert [one.backend for one in findings.measurements] == cpu_backends("lstm")
    assert findings.wrong[0].startswith(f"stubborn on {tiny('lstm')}: the answer has an error of")
    assert findings.wrong[1:] == [f"brittle on {tiny('lstm')}: RuntimeError: no such instruction"]
    assert list(findings.skipped) == [
        "absent is skipped: install a_package (ModuleNotFoundError: No module named 'a_missing_package')"
    ]


@pytest.mark.parametrize("wrong_by", [0, 1])
def test_command_writes_right_measurements_and_returns_1_for_wrong_ones(
    wrong_by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Baseline("twin", lambda case: TimedCall(lambda: case.encoder("framework")() + wrong_by))
    kinds = {"conv": "dense-conv"}
    monkeypatch.setattr(command, "workloads", lambda family, *_: [tiny(family, kinds.get(family, "layer"), "equal")])
    monkeypatch.setattr(command, "BASELINES", dict.fromkeys(FAMILIES, (twin,)))
    monkeypatch.setattr(command, "measured_peaks", lambda *_: Peaks(1000.0, {1 << 18: 100.0}))
    assert command.main(["all", "--quick", "--out", str(tmp_path)]) == wrong_by
    assert ("WRONG: twin on lstm" in capsys.readouterr().out) == bool(wrong_by)
    short = report.slug(report.device_name(CPU))
    for family in FAMILIES:
        lines = (tmp_path / f"{family}-{short}.jsonl").read_text().splitlines()
        assert [json.loads(line)["backend"] for line in lines] == [*cpu_backends(family), *(["twin"] if not wrong_by else [])]


def test_median_and_deciles_leave_out_the_warm_up() -> None:
    assert spread([us / 1e6 for us in range(1, 102)]) == Spread(median_us=51.0, p10_us=11.0, p90_us=91.0, repetitions=101)
    seconds = iter([1.0] * WARM_UP + [2e-6] * AT_LEAST)
    assert repeated(lambda: next(seconds), 0.0) == Spread(2.0, 2.0, 2.0, AT_LEAST)


def timed(workload: Workload, backend: str, median_us: float, timing: str = "kernel") -> Measurement:
    return Measurement(workload, backend, timing, Spread(median_us, median_us - 1, median_us + 1, 20), 0.0)


def test_table_marks_the_fastest_of_each_timing() -> None:
    layer = tiny("lstm")
    rows = [timed(layer, "first", 20.0, "eager"), timed(layer, "first", 3.0), timed(layer, "third", 2.0)]
    heading, eager, kernel = report.table(rows).splitlines()
    assert heading.split() == ["workload", "timing", "first", "third"]
    assert eager.split()[-4:] == ["eager", "*20", "(19-21)", "-"]
    assert kernel.split()[-5:] == ["kernel", "3", "(2-4)", "*2", "(1-3)"]


@pytest.mark.parametrize("baseline_us, verdict", [(14_000.0, "140 quick >= 140 met"), (13_900.0, "139 quick >= 140 missed")])
def test_goal_is_judged_by_the_first_backend(baseline_us: float, verdict: str) -> None:
    layer = Workload("lstm", 1, 64, 512, 512, dtype="float16")
    times = {"thorough": 50.0, "quick": 100.0, "reference": 10.0, "torch by gate": baseline_us}
    measurements: Sequence[Measurement] = [timed(layer, name, median_us, "eager") for name, median_us in times.items()]
    shown = goals.table(on_cuda.GOALS, measurements, ("cpu", "quick", "thorough", "reference")).splitlines()
    assert [" ".join(line.split()) for line in shown if "torch by gate" in line] == [
        f"torch by gate, eager, hidden 512, 1 x 64 {verdict}"
    ]


@pytest.mark.parametrize(
    "workload, multiplied, read",
    [
        (PRODUCT, 1000, [(400, 1)]),
        (tiny("conv", "tcn", "equal"), 8 * 3 * 7 * 3 * 6 * 6, [(8 * 3 * 6 * 6 * 4, 1)]),
        (tiny("gru", lengths="equal"), 21 * 3 * 6 * (6 + 6), [(3 * 6 * 6 * 4, 7), (3 * 6 * 6 * 4, 1)]),
        # Two blocks of gates decide the cell; the third is needed where the answer is.
        (tiny("sru"), (2 * TOKENS + 3) * 6 * 6, [(3 * 6 * 6 * 4, 1)]),
        (tiny("qrnn", lengths="equal"), (2 * 21 + 3) * 6 * 12, [(3 * 6 * 12 * 4, 1)]),
    ],
    ids=str,
)
def test_least_work_is_counted_without_padding(workload: Workload, multiplied: int, read: list[tuple[int, int]]) -> None:
    assert multiplications(workload) == multiplied
    assert weights_read(workload) == [ReadArray(*array) for array in read]
