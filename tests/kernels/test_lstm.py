"""The reference of the LSTM is torch.nn.LSTM."""

from __future__ import annotations

import pytest
import torch

from kernels.contract import LSTMState, LSTMWeights
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
