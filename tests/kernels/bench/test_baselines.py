"""Baselines agree with their expected answers, and run where a goal or the figure needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline, TimedCall
from kernels.bench.baselines.comparison import convolution, device_copy, lstm, one_product, square_product
from kernels.bench.case import random_case
from kernels.bench.workload import FORMS, Workload
from kernels.bench.workloads import workloads
from tests.kernels.bench.conftest import CPU, measured, tiny

EVERY_STEP = tiny("sru", "every-step", lengths="equal")


@pytest.mark.parametrize(
    "workload, baseline",
    [
        *((tiny(family, form=form), Baseline("product", one_product)) for family in FORMS for form in FORMS[family]),
        *((EVERY_STEP, Baseline(f"width {width}", convolution(width))) for width in (2, 3)),
        *((EVERY_STEP, Baseline(f"width {width}, channels last", convolution(width, channels_last=True))) for width in (2, 3)),
        (EVERY_STEP, Baseline("lstm", lstm)),
        (tiny("sru"), Baseline("lstm", lstm)),
    ],
    ids=str,
)
def test_each_agrees_with_its_expected_answer(workload: Workload, baseline: Baseline) -> None:
    findings = measured(workload, baseline)
    assert not findings.wrong
    assert findings.measurements[-1].backend == baseline.name and findings.measurements[-1].error < 1e-5


def test_copy_is_timed_without_an_encoder() -> None:
    findings = measured(tiny("sru", "copy", lengths="equal"), Baseline("copy", device_copy))
    assert [(one.backend, one.error) for one in findings.measurements] == [("copy", 0.0)]


def test_square_product_is_timed_without_an_encoder() -> None:
    square = Workload("conv", 1, 12, 12, 12, kind="product")
    (measurement,) = measured(square, Baseline("one product", square_product)).measurements
    assert measurement.backend == "one product" and measurement.error < 1e-6
    call = square_product(random_case(square, CPU))
    assert call.expected is not None and call.expected.shape == (12, 12)


@pytest.mark.parametrize("family, form, columns", [("sru", "v1", 6), ("qrnn", "window 1", 6), ("qrnn", "window 2", 12)])
def test_one_product_has_the_columns_of_its_window(family: str, form: str, columns: int) -> None:
    case = random_case(tiny(family, form=form), CPU)
    call = one_product(case)
    assert call.expected is not None and call.expected.shape == (sum(case.lengths), 18)
    wide = replace(case.weights[0], input=torch.ones_like(case.weights[0].input))
    sums = one_product(replace(case, weights=(wide,))).run()[:, 0]
    torch.testing.assert_close(sums, case.x.data.sum(1) * columns / 6)


def test_library_runs_once_over_token_ids() -> None:
    ids = [workload for workload in workloads("conv", "cuda", quick=False) if workload.kind == "text-cnn-ids"]
    forms = [workload.form for workload in ids for baseline in BASELINES["conv"] if baseline.applies(workload, "cuda")]
    assert len(ids) == 2 * 7 and forms == ["embedded"] * 7


def test_missing_expected_answer_is_reported() -> None:
    (line,) = measured(
        tiny("sru", "copy", lengths="equal"), Baseline("idle", lambda _: TimedCall(lambda: torch.zeros(1)))
    ).wrong
    assert line.startswith("idle on sru copy v2 3 x 7, 6 -> 6, float32: AssertionError: a workload without an encoder")
