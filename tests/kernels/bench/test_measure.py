"""The bench checks answers, then times them, and reports baselines that are wrong or missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.bench import timing
from kernels.bench.agreement import tolerance
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall, optional_package
from kernels.bench.case import BenchCase
from kernels.bench.measure import Findings
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import ENCODERS, RECURRENCE, TINY, measured, tiny
from tests.kernels.families import cpu_backends

OPTIONAL = {"onnxruntime", "sru package", "direct loops", "embedding, onnxruntime", "embedding, sru package"}


def timed_backends(findings: Findings) -> list[str]:
    return [measurement.backend for measurement in findings.measurements]


def always(answer: Tensor) -> Baseline:
    return Baseline("stubborn", lambda _: TimedCall(lambda: answer))


def breaking(case: BenchCase) -> TimedCall:
    raise RuntimeError("no such instruction")


def missing(case: BenchCase) -> TimedCall:
    optional_package("a_missing_package", "install a_package")
    raise AssertionError("it was found")


@pytest.mark.parametrize("workload", [*TINY, *ENCODERS, *(tiny(family, "folded") for family in ("lstm", "gru"))], ids=str)
def test_every_backend_and_torch_baseline_agrees(workload: Workload) -> None:
    baselines = [each for each in BASELINES[workload.family] if each.name not in OPTIONAL and each.applies(workload, "cpu")]
    findings = measured(workload, *baselines)
    assert not findings.wrong and not findings.skipped
    assert timed_backends(findings) == [*cpu_backends(workload.family), *(baseline.name for baseline in baselines)]
    for measurement in findings.measurements:
        spread = measurement.spread
        assert measurement.timing == "eager"
        assert 0 <= measurement.error < 1e-5
        assert 0 < spread.p10_us <= spread.median_us <= spread.p90_us < 1e6
        assert spread.repetitions >= timing.AT_LEAST


@pytest.mark.parametrize(
    "answer, message",
    [
        (torch.zeros(3, 6), "the answer has an error of"),
        (torch.full((3, 6), torch.nan), "the answer is not finite"),
        (torch.zeros(3, 5), r"the answer has the shape (3, 5), expected (3, 6)"),
    ],
    ids=["wrong", "not a number", "of another shape"],
)
def test_disagreeing_baseline_is_reported_and_not_timed(answer: Tensor, message: str) -> None:
    findings = measured(tiny("lstm"), always(answer))
    assert timed_backends(findings) == cpu_backends("lstm")
    (line,) = findings.wrong
    assert line.startswith(f"stubborn on {tiny('lstm')}: {message}")


def test_failing_baseline_does_not_stop_the_others() -> None:
    findings = measured(tiny("sru"), Baseline("brittle", breaking), *BASELINES["sru"][:1])
    assert timed_backends(findings) == [*cpu_backends("sru"), "torch by step"]
    assert findings.wrong == [f"brittle on {tiny('sru')}: RuntimeError: no such instruction"]


def test_missing_baseline_is_skipped_with_instructions() -> None:
    findings = measured(tiny("qrnn"), Baseline("absent", missing))
    assert not findings.wrong
    assert list(findings.skipped) == [
        "absent is skipped: install a_package (ModuleNotFoundError: No module named 'a_missing_package')"
    ]


@pytest.mark.parametrize(
    "workload, baseline",
    [
        (tiny("qrnn"), Baseline("elsewhere", breaking, devices=("cuda",))),
        (tiny("qrnn"), Baseline("for large ones", breaking, condition=lambda workload: workload.hidden > 6)),
        (RECURRENCE, Baseline("a whole layer", breaking)),
        (tiny("sru", "folded"), Baseline("a whole layer", breaking)),
    ],
    ids=["for another device", "for other workloads", "gate inputs", "token ids"],
)
def test_baseline_runs_only_where_it_applies(workload: Workload, baseline: Baseline) -> None:
    findings = measured(workload, baseline)
    assert timed_backends(findings) == cpu_backends(workload.family)
    assert not findings.wrong and not findings.skipped


@pytest.mark.parametrize("dtype, tight", [(torch.float32, 2e-5), (torch.float16, 4e-2)], ids=str)
def test_tolerance_grows_with_steps_and_terms(dtype: torch.dtype, tight: float) -> None:
    assert tolerance(dtype, 1, 16) < tolerance(dtype, 64, 16) < tolerance(dtype, 64, 2048) < tight
