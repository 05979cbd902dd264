"""Tests of the LSTM's reference against torch.nn.LSTM, and of its state slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.ragged import ContractError
from tests.kernels.families import Form, cpu_backends
from tests.kernels.inputs import as_float64, assert_encodings_close, encoding, rows


@pytest.mark.parametrize("backward", [False, True])
def test_reference_matches_torch_nn_lstm(backward: bool) -> None:
    form = Form("lstm")
    x, weights, state = as_float64(form.arguments([9, 1, 14], 5, 3))
    ordered = x.reversed() if backward else x
    baseline = torch_lstm(weights)
    initial = zip(rows(ordered), state.hidden.split(1), state.cell.split(1), strict=True)
    results = [baseline(data, (hidden, cell)) for data, hidden, cell in initial]
    after = LSTMState(*(torch.cat([states[which] for _, states in results]) for which in (0, 1)))
    encoded = form.run(ordered, weights, state, backend="reference")
    assert_encodings_close(encoded, encoding([steps for steps, _ in results], after), steps=14, dtype=torch.float64)


def torch_lstm(weights: LSTMWeights) -> torch.nn.LSTM:
    """Return torch.nn.LSTM with these weights. It stores them transposed, in the gate order i f g o, and adds two biases."""
    assert weights.input is not None and weights.bias is not None
    baseline = torch.nn.LSTM(weights.input.shape[0], weights.hidden, dtype=torch.float64).requires_grad_(False)
    baseline.load_state_dict(
        {
            "weight_ih_l0": weights.input.T,
            "weight_hh_l0": weights.recurrent.T,
            "bias_ih_l0": weights.bias * 0.25,
            "bias_hh_l0": weights.bias * 0.75,
        }
    )
    return baseline


@pytest.mark.parametrize("backend", [*cpu_backends("lstm"), "reference"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_state_in_slots_is_read_and_written_in_place(backend: str, index: torch.dtype) -> None:
    form = Form("lstm")
    x, weights, state = form.arguments([7, 0, 3], 5, 4)
    slots = torch.tensor([3, 0, 4], dtype=index)
    caches = LSTMState(torch.full((6, 5), 9.0), torch.full((6, 5), 9.0), slots)
    caches.hidden[slots.long()], caches.cell[slots.long()] = state.hidden, state.cell
    expected = form.run(x, weights, state, backend=backend)
    encoded = form.run(x, weights, caches, backend=backend)
    assert encoded.state is caches
    for cache, new in ((caches.hidden, expected.state.hidden), (caches.cell, expected.state.cell)):
        assert torch.equal(cache[slots.long()], new)
        assert (cache[[1, 2, 5]] == 9).all(), "slots of no row"
    assert_encodings_close(replace(encoded, state=expected.state), expected, steps=0)


def test_slots_need_one_entry_per_row() -> None:
    x, weights, state = Form("lstm").arguments([7, 0, 3], 5, 4)
    with pytest.raises(ContractError, match=r"state.slots has the shape \(2,\), expected \(3,\)"):
        Form("lstm").run(x, weights, replace(state, slots=torch.tensor([0, 1])))
    with pytest.raises(ContractError, match=r"state.hidden has the shape \(3, 4\), expected \(3, 5\)"):
        Form("lstm").run(x, weights, replace(state, hidden=torch.zeros(3, 4), slots=torch.tensor([0, 1, 2])))
