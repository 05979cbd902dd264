"""The `sru` package as a baseline: its first use compiles it. `make test-all` runs this folder."""

from __future__ import annotations

import pytest

from kernels.bench.baselines import BASELINES
from kernels.bench.baselines.baseline import Baseline
from kernels.bench.baselines.comparison import first_sru_package
from kernels.bench.workload import FORMS
from tests.kernels.bench.conftest import measured, tiny


@pytest.mark.parametrize("form", FORMS["sru"])
def test_sru_package_runs_both_forms(form: str) -> None:
    findings = measured(tiny("sru", form=form), next(each for each in BASELINES["sru"] if each.name == "sru package"))
    assert not findings.wrong
    if not findings.skipped:
        assert findings.measurements[-1].backend == "sru package" and findings.measurements[-1].error < 1e-5


def test_sru_package_runs_v1_for_a_qrnn() -> None:
    findings = measured(tiny("qrnn"), Baseline("sru package v1", first_sru_package))
    assert not findings.wrong
    assert findings.skipped or findings.measurements[-1].error < 1e-5
