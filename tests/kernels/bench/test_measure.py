"""The bench checks answers, then times them, and reports baselines that are wrong or missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.bench import timing
from kernels.bench.agreement import ExpectedAnswer, expected_answer, tolerance
from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall, optional_package
from kernels.bench.baselines.discrete import lstm_gates
from kernels.bench.baselines.packages import onnx_runtime, sru_package
from kernels.bench.case import BenchCase, random_case
from kernels.bench.measure import Findings
from kernels.bench.workload import FORMS, INT8, Workload
from tests.kernels.bench.conftest import CPU, ENCODERS, FORMED, RECURRENCE, TINY, measured, tiny
from tests.kernels.families import cpu_backends

OPTIONAL = {"onnxruntime", "sru package", "direct loops"}
OPTIONAL_OVER_IDS = {"embedding, onnxruntime"}


def timed_backends(findings: Findings) -> list[str]:
    return [measurement.backend for measurement in findings.measurements]


def always(answer: Tensor) -> Baseline:
    return Baseline("stubborn", lambda _: TimedCall(lambda: answer))


def breaking(case: BenchCase) -> TimedCall:
    raise RuntimeError("no such instruction")


def missing(case: BenchCase) -> TimedCall:
    optional_package("a_missing_package", "install a_package")
    raise AssertionError("it was found")


@pytest.mark.parametrize("workload", TINY, ids=str)
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


@pytest.mark.parametrize("family", ["lstm", "gru", *FORMS])
def test_only_the_loops_of_a_cpu_are_timed_in_int8(family: str) -> None:
    findings = measured(replace(tiny(family), dtype=INT8), always(torch.zeros(1)))
    assert not findings.wrong
    assert timed_backends(findings) == [name for name in cpu_backends(family) if name == "cpu"]
    assert "framework refuses: has no int8 products" in findings.refused
    assert all(measurement.error > 1e-5 for measurement in findings.measurements), "rows are rounded"


@pytest.mark.parametrize("workload", FORMED, ids=str)
def test_every_form_agrees(workload: Workload) -> None:
    findings = measured(workload)
    assert not findings.wrong
    assert timed_backends(findings) == cpu_backends(workload.family)
    assert all(measurement.error < 1e-5 for measurement in findings.measurements)


@pytest.mark.parametrize("workload", ENCODERS, ids=str)
def test_encoders_agree_with_layers_of_torch(workload: Workload) -> None:
    baselines = [each for each in BASELINES[workload.family] if each.applies(workload, "cpu")]
    findings = measured(workload, *baselines)
    assert not findings.wrong
    assert timed_backends(findings) == [*cpu_backends(workload.family), "torch padded", "torch packed"]
    assert all(measurement.error < 1e-5 for measurement in findings.measurements)


@pytest.mark.parametrize("workload", [workload for workload in ENCODERS if workload.directions == 2], ids=str)
def test_encoder_with_exchanged_directions_disagrees(workload: Workload) -> None:
    def exchanged(case: BenchCase) -> TimedCall:
        return TimedCall(replace(case, weights=tuple(level[::-1] for level in case.weights)).encoder("framework"))

    findings = measured(workload, Baseline("exchanged", exchanged, encoders=True))
    assert len(findings.wrong) == 1 and findings.wrong[0].startswith("exchanged on")


@pytest.mark.parametrize("workload", [workload for workload in TINY if workload.family in ("lstm", "gru")], ids=str)
def test_onnx_runtime_agrees(workload: Workload) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    findings = measured(workload, Baseline("onnxruntime", onnx_runtime))
    assert not findings.wrong
    assert findings.measurements[-1].backend == "onnxruntime"


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.parametrize("lengths", ["equal", "questions"])
def test_libraries_agree_over_token_ids(family: str, lengths: str) -> None:
    baselines = [each for each in BASELINES[family] if each.over_ids]
    findings = measured(tiny(family, "folded", lengths), *baselines)
    names = [f"embedding, {library}" for library in ("torch padded", "torch packed", "onnxruntime")]
    assert [each.name for each in baselines] == names and not findings.wrong
    timed = [name for name in timed_backends(findings) if name not in OPTIONAL_OVER_IDS]
    assert timed == [*cpu_backends(family), *names[:2]]
    assert all(measurement.error < 1e-5 for measurement in findings.measurements)


@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_baselines_run_bfloat16_where_they_support_it(family: str) -> None:
    half = replace(tiny(family), dtype="bfloat16")
    findings = measured(half, *(each for each in BASELINES[family] if each.applies(half, "cpu")))
    assert not findings.wrong
    assert {"torch padded", "torch packed"} <= {*timed_backends(findings)}
    assert "onnxruntime" not in timed_backends(findings)


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


@pytest.mark.parametrize("slack, agrees", [(1.0, False), (2.0, True)])
def test_baseline_may_have_slack(slack: float, agrees: bool) -> None:
    expected = expected_answer(random_case(tiny("lstm"), CPU))

    def inexact(case: BenchCase) -> TimedCall:
        answer = case.encoder("reference")() + 1.5 * expected.tolerance
        return TimedCall(lambda: answer)

    findings = measured(tiny("lstm"), Baseline("inexact", inexact, slack=slack))
    assert ("inexact" in timed_backends(findings)) is agrees
    assert len(findings.wrong) == (0 if agrees else 1)


def test_failing_baseline_does_not_stop_the_others() -> None:
    findings = measured(tiny("sru"), Baseline("brittle", breaking), *BASELINES["sru"][:1])
    assert timed_backends(findings) == [*cpu_backends("sru"), "torch by step"]
    assert findings.wrong == [f"brittle on {tiny('sru')}: RuntimeError: no such instruction"]


def test_baseline_may_have_its_own_expected_answer() -> None:
    ours = measured(tiny("sru"), Baseline("twin", lambda case: TimedCall(case.encoder("framework"))))
    elsewhere = ExpectedAnswer(torch.tensor([0]), torch.full((1, 6), 9.0), shape=(3, 6), tolerance=1e-3)
    findings = measured(
        tiny("sru"),
        Baseline("other function", lambda _: TimedCall(lambda: torch.full((3, 6), 9.0), expected=elsewhere)),
        Baseline("our function", lambda case: TimedCall(case.encoder("framework"), expected=elsewhere)),
    )
    assert timed_backends(ours) == [*cpu_backends("sru"), "twin"]
    assert timed_backends(findings) == [*cpu_backends("sru"), "other function"]
    assert findings.wrong[0].startswith("our function on sru layer v2 3 questions, 6 -> 6, float32: the answer has an error of")


def test_missing_baseline_is_skipped_with_instructions() -> None:
    findings = measured(tiny("qrnn"), Baseline("absent", missing))
    assert not findings.wrong
    assert list(findings.skipped) == [
        "absent is skipped: install a_package (ModuleNotFoundError: No module named 'a_missing_package')"
    ]


@pytest.mark.parametrize("lengths", ["equal", "questions"])
def test_lstm_by_gate_agrees(lengths: str) -> None:
    findings = measured(tiny("lstm", lengths=lengths), Baseline("torch by gate", lstm_gates))
    assert not findings.wrong
    assert findings.measurements[-1].backend == "torch by gate" and findings.measurements[-1].error < 1e-5


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


@pytest.mark.parametrize(
    "build, workload, install", [(onnx_runtime, tiny("lstm"), "onnxruntime"), (sru_package, tiny("sru"), "sru")]
)
def test_missing_package_has_instructions(
    build: Any, workload: Workload, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(package: str) -> None:
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr("kernels.bench.baselines.baseline.import_module", not_installed)
    (line,) = measured(workload, Baseline("optional", build)).skipped
    assert line.startswith("optional is skipped: install") and install in line


@pytest.mark.parametrize("dtype, tight", [(torch.float32, 2e-5), (torch.float16, 4e-2)], ids=str)
def test_tolerance_grows_with_steps_and_terms(dtype: torch.dtype, tight: float) -> None:
    assert tolerance(dtype, 1, 16) < tolerance(dtype, 64, 16) < tolerance(dtype, 64, 2048) < tight
