"""Baselines that compute another function than ours agree with their own expected answers."""

from __future__ import annotations

import pytest

from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import convolution, lstm, one_product
from kernels.bench.workload import FORMS, Workload
from tests.kernels.bench.conftest import measured, tiny

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
