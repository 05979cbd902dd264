"""The reference computes a few rows, and the gates of an SRU or a QRNN may be computed before it."""

from __future__ import annotations

import pytest
import torch

from kernels.bench import agreement
from kernels.bench.agreement import expected_answer
from kernels.bench.case import random_case
from kernels.bench.workload import FORMS, Workload
from tests.kernels.bench.conftest import CPU, FORMED, tiny


@pytest.mark.parametrize("workload", [*FORMED, *(tiny(family) for family in FORMS)], ids=str)
def test_precomputed_gates_give_the_answers_of_the_reference(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(workload, CPU)
    from_gates = expected_answer(case)
    if workload.kind == "folded":
        rows = case.encoder("reference")()[from_gates.at].double()
        torch.testing.assert_close(from_gates.values, rows, rtol=1e-5, atol=1e-5)
        return
    monkeypatch.setattr(agreement, "GATES", {})
    torch.testing.assert_close(from_gates.values, expected_answer(case).values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "rows, steps, compared",
    [
        (5, 64, [0, 2, 4]),
        (5, 1365, [0, 2, 4]),
        (5, 1366, [0, 4]),
        (5, 4096, [4]),
        (5, 5000, [4]),
        (2, 64, [0, 1]),
        (1, 64, [0]),
    ],
)
def test_fewer_long_rows_are_compared(rows: int, steps: int, compared: list[int]) -> None:
    workload = Workload("qrnn", rows, steps, 1, 1, form="window 1")
    expected = expected_answer(random_case(workload, CPU))
    assert expected.at.tolist() == compared and expected.shape == (rows, 1)
