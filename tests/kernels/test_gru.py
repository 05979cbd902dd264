"""Tests of the GRU's reference against torch.nn.GRU (reset after the product) and the formula of Cho et al. (reset before)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gru.types import GRUState, GRUWeights
from tests.kernels.families import Form
from tests.kernels.inputs import as_float64, assert_encodings_close, encoding, rows


@pytest.mark.parametrize("backward", [False, True])
def test_reference_matches_torch_nn_gru(backward: bool) -> None:
    form = Form("gru", reset="after")
    x, weights, state = as_float64(form.arguments([9, 1, 14], 5, 3))
    ordered = x.reversed() if backward else x
    baseline = torch_gru(weights)
    results = [baseline(data, hidden) for data, hidden in zip(rows(ordered), state.hidden.split(1), strict=True)]
    after = GRUState(torch.cat([hidden for _, hidden in results]))
    encoded = form.run(ordered, weights, state, backend="reference")
    assert_encodings_close(encoded, encoding([steps for steps, _ in results], after), steps=14, dtype=torch.float64)


def torch_gru(weights: GRUWeights) -> torch.nn.GRU:
    """Return torch.nn.GRU with these weights. It adds two biases, but the reset gate scales the recurrent bias of the new gate."""
    assert weights.input is not None and weights.bias is not None and weights.recurrent_bias is not None
    of_input, of_recurrent = weights.bias * 0.25, weights.bias * 0.75
    of_input[-weights.hidden :], of_recurrent[-weights.hidden :] = weights.bias[-weights.hidden :], weights.recurrent_bias
    baseline = torch.nn.GRU(weights.input.shape[0], weights.hidden, dtype=torch.float64).requires_grad_(False)
    baseline.load_state_dict(
        {
            "weight_ih_l0": weights.input.T,
            "weight_hh_l0": weights.recurrent.T,
            "bias_ih_l0": of_input,
            "bias_hh_l0": of_recurrent,
        }
    )
    return baseline


def test_reference_with_reset_before_matches_cho() -> None:
    form = Form("gru", reset="before")
    x, weights, state = as_float64(form.arguments([9, 1, 14], 5, 3))
    steps = [cho(data, hidden, weights) for data, hidden in zip(rows(x), state.hidden, strict=True)]
    after = GRUState(torch.stack([row[-1] for row in steps]))
    encoded = form.run(x, weights, state, backend="reference")
    assert_encodings_close(encoded, encoding(steps, after), steps=14, dtype=torch.float64)


def cho(x: Tensor, hidden: Tensor, weights: GRUWeights) -> Tensor:
    """r = s(W_r x + U_r h), z = s(W_z x + U_z h), n = tanh(W x + U (r h)), h' = z h + (1 - z) n; column vectors, gate by gate."""
    assert weights.input is not None and weights.bias is not None
    of_input, of_hidden, bias = (blocks.chunk(3, dim=-1) for blocks in (weights.input, weights.recurrent, weights.bias))
    steps = []
    for step in x:
        reset, update = (torch.sigmoid(of_input[k].T @ step + of_hidden[k].T @ hidden + bias[k]) for k in (0, 1))
        new = torch.tanh(of_input[2].T @ step + of_hidden[2].T @ (reset * hidden) + bias[2])
        hidden = update * hidden + (1 - update) * new
        steps.append(hidden)
    return torch.stack(steps)


def test_both_resets_agree_when_the_reset_gate_is_open() -> None:
    x, weights, state = as_float64(Form("gru", reset="before").arguments([9, 1, 14], 5, 3))
    weights.bias[:5] = 40.0  # the sigmoid of 40 is 1 in float64
    after = GRUWeights(weights.input, weights.recurrent, weights.bias, torch.zeros(5, dtype=torch.float64))
    before_result, after_result = (Form("gru").run(x, each, state, backend="reference") for each in (weights, after))
    assert_encodings_close(before_result, after_result, steps=14, dtype=torch.float64)
