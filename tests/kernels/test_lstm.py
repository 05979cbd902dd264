"""The reference of the LSTM is torch.nn.LSTM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.contract import ContractError, LSTMState, LSTMWeights
from tests.kernels.families import Form
from tests.kernels.inputs import assert_encodes_alike, encoding, rows, widened


@pytest.mark.parametrize("backward", [False, True])
def test_the_reference_is_torch_nn_lstm_in_float64(backward: bool) -> None:
    form = Form("lstm")
    x, weights, state = widened(form.given([9, 1, 14], 5, 3))
    turned = x.reversed() if backward else x
    peer = torch_lstm(weights)
    initial = zip(rows(turned), state.hidden.split(1), state.cell.split(1), strict=True)
    answers = [peer(data, (hidden, cell)) for data, hidden, cell in initial]
    after = LSTMState(*(torch.cat([states[which] for _, states in answers]) for which in (0, 1)))
    encoded = form.run(turned, weights, state, backend="reference")
    assert_encodes_alike(encoded, encoding([steps for steps, _ in answers], after), steps=14, dtype=torch.float64)


def torch_lstm(weights: LSTMWeights) -> torch.nn.LSTM:
    """torch.nn.LSTM keeps its weights transposed, in the gate order i f g o, and has two biases that are added."""
    assert weights.input is not None and weights.bias is not None
    peer = torch.nn.LSTM(weights.input.shape[0], weights.hidden, dtype=torch.float64).requires_grad_(False)
    peer.load_state_dict(
        {
            "weight_ih_l0": weights.input.T,
            "weight_hh_l0": weights.recurrent.T,
            "bias_ih_l0": weights.bias * 0.25,
            "bias_hh_l0": weights.bias * 0.75,
        }
    )
    return peer


@pytest.mark.parametrize("backend", ["framework", "reference"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_state_in_slots_is_read_and_written_in_place(backend: str, index: torch.dtype) -> None:
    form = Form("lstm")
    x, weights, state = form.given([7, 0, 3], 5, 4)
    slots = torch.tensor([3, 0, 4], dtype=index)
    slabs = LSTMState(torch.full((6, 5), 9.0), torch.full((6, 5), 9.0), slots)
    slabs.hidden[slots.long()], slabs.cell[slots.long()] = state.hidden, state.cell
    expected = form.run(x, weights, state, backend=backend)
    encoded = form.run(x, weights, slabs, backend=backend)
    assert encoded.state is slabs
    for slab, new in ((slabs.hidden, expected.state.hidden), (slabs.cell, expected.state.cell)):
        assert torch.equal(slab[slots.long()], new)
        assert (slab[[1, 2, 5]] == 9).all(), "other rows' places"
    assert_encodes_alike(replace(encoded, state=expected.state), expected, steps=0)


def test_slots_have_the_shape_of_the_rows() -> None:
    x, weights, state = Form("lstm").given([7, 0, 3], 5, 4)
    with pytest.raises(ContractError, match=r"state.slots has the shape \(2,\), expected \(3,\)"):
        Form("lstm").run(x, weights, replace(state, slots=torch.tensor([0, 1])))
    with pytest.raises(ContractError, match=r"state.hidden has the shape \(3, 4\), expected \(3, 5\)"):
        Form("lstm").run(x, weights, replace(state, hidden=torch.zeros(3, 4), slots=torch.tensor([0, 1, 2])))
