"""The reference computes a few rows, and the gates of an SRU or a QRNN may be computed before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.bench import agreement
from kernels.bench.agreement import expected_answer
from kernels.bench.case import random_case
from kernels.bench.convolutions import IDS_FORMS
from kernels.bench.workload import FORMS, VOCABULARY, Workload
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


@pytest.mark.parametrize("family, blocks", [("sru", 4), ("qrnn", 3)])
def test_folded_layer_has_token_ids_and_a_table(family: str, blocks: int) -> None:
    case = random_case(replace(tiny(family, "folded", rows=64), inputs=11), CPU)
    (weights,) = case.weights
    assert weights.input is None
    assert case.x.data.dtype == torch.int32 and set(case.x.data.tolist()) == set(range(11))
    if family == "sru":
        assert weights.table.shape == (11, blocks * 6)
    else:
        assert weights.tables.shape == (2, 12, blocks * 6) and not weights.tables[:, 0].any()


def test_folded_text_cnn_equals_the_embedded_one() -> None:
    embedded, folded = (random_case(tiny("conv", "text-cnn-ids", form=form), CPU) for form in IDS_FORMS)
    assert embedded.x.data.tolist() == folded.x.data.tolist() and embedded.x.data.dtype == torch.int32
    assert len({id(layer.embedding) for layer in embedded.weights}) == 1
    assert [layer.tables.shape for layer in folded.weights] == [(width, 1 + VOCABULARY, 2) for width in (3, 4, 5)]
    torch.testing.assert_close(embedded.encoder("framework")(), folded.encoder("framework")(), rtol=1e-5, atol=1e-5)
