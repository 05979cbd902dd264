"""The bench of the kernels with every baseline that is installed, on small workloads, and its goals for the kept results."""

from __future__ import annotations

import pytest

from kernels.bench.baselines import BASELINES
from kernels.bench.convolutions import IDS_FORMS
from kernels.bench.workload import ENCODER, STACKS, Workload
from tests.kernels.bench.test_bench import measured, tiny

LENGTHS = ("equal", "questions")
WORKLOADS = [
    *(tiny(family, lengths=lengths) for family in ("lstm", "gru", "sru", "qrnn") for lengths in LENGTHS),
    *(tiny(family, "folded") for family in ("lstm", "gru")),
    *(tiny("conv", kind, lengths) for kind in ("text-cnn", "dense-conv", *STACKS) for lengths in LENGTHS),
    *(tiny("conv", "text-cnn-ids", lengths, form=form) for form in IDS_FORMS for lengths in LENGTHS),
    *(Workload(family, 3, 7, 5, 6, kind=ENCODER, depth=2, directions=2) for family in ("lstm", "gru")),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_every_baseline_agrees(workload: Workload) -> None:
    """The `sru` package compiles at its first use."""
    findings = measured(workload, *(each for each in BASELINES[workload.family] if each.applies(workload, "cpu")))
    assert not findings.wrong
    assert all(one.error < 1e-5 for one in findings.measurements)
