"""The reference of the GRU is torch.nn.GRU where it resets after the product, and Cho's formula where it resets before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.contract import GRUState, GRUWeights
from tests.kernels.families import Form
from tests.kernels.inputs import assert_encodes_alike, encoding, rows, widened


@pytest.mark.parametrize("backward", [False, True])
def test_the_reference_is_torch_nn_gru_in_float64(backward: bool) -> None:
    form = Form("gru", reset="after")
    x, weights, state = widened(form.given([9, 1, 14], 5, 3))
    turned = x.reversed() if backward else x
    peer = torch_gru(weights)
    answers = [peer(data, hidden) for data, hidden in zip(rows(turned), state.hidden.split(1), strict=True)]
    after = GRUState(torch.cat([hidden for _, hidden in answers]))
    encoded = form.run(turned, weights, state, backend="reference")
    assert_encodes_alike(encoded, encoding([steps for steps, _ in answers], after), steps=14, dtype=torch.float64)


def torch_gru(weights: GRUWeights) -> torch.nn.GRU:
    """torch.nn.GRU has two biases that are added, save that the recurrent one of the new gate stands inside the reset."""
    assert weights.input is not None and weights.bias is not None and weights.recurrent_bias is not None
    of_input, of_recurrent = weights.bias * 0.25, weights.bias * 0.75
    of_input[-weights.hidden :], of_recurrent[-weights.hidden :] = weights.bias[-weights.hidden :], weights.recurrent_bias
    peer = torch.nn.GRU(weights.input.shape[0], weights.hidden, dtype=torch.float64).requires_grad_(False)
    peer.load_state_dict(
        {
            "weight_ih_l0": weights.input.T,
            "weight_hh_l0": weights.recurrent.T,
            "bias_ih_l0": of_input,
            "bias_hh_l0": of_recurrent,
        }
    )
    return peer


def test_with_the_reset_before_the_product_the_reference_is_the_formula_of_cho() -> None:
    form = Form("gru", reset="before")
    x, weights, state = widened(form.given([9, 1, 14], 5, 3))
    steps = [cho(data, hidden, weights) for data, hidden in zip(rows(x), state.hidden, strict=True)]
    after = GRUState(torch.stack([row[-1] for row in steps]))
    encoded = form.run(x, weights, state, backend="reference")
    assert_encodes_alike(encoded, encoding(steps, after), steps=14, dtype=torch.float64)


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


def test_without_a_recurrent_bias_and_with_an_open_reset_both_resets_are_one() -> None:
    x, weights, state = widened(Form("gru", reset="before").given([9, 1, 14], 5, 3))
    weights.bias[:5] = 40.0  # the sigmoid of 40 is 1 in float64
    after = GRUWeights(weights.input, weights.recurrent, weights.bias, torch.zeros(5, dtype=torch.float64))
    one, other = (Form("gru").run(x, each, state, backend="reference") for each in (weights, after))
    assert_encodes_alike(one, other, steps=14, dtype=torch.float64)
