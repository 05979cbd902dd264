"""Tests of the QRNN's reference against torch's convolution of the padded row and a loop for the pooling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear

from kernels.qrnn.types import POOLINGS, QRNNState, QRNNWeights
from tests.kernels.families import Form
from tests.kernels.inputs import as_float64, assert_encodings_close, encoding, rows

every_pooling = pytest.mark.parametrize("pooling", POOLINGS)


@every_pooling
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_reference_matches_torch_conv1d_and_a_loop(pooling: str, window: int) -> None:
    form = Form("qrnn", pooling=pooling, window=window)
    x, weights, state = as_float64(form.arguments([9, 1, 2, 14], 5, 3))
    padded = [torch.cat((left, data)) for left, data in zip(state.left, rows(x), strict=True)]
    pairs = [pooled(convolved(row, weights), cell, pooling) for row, cell in zip(padded, state.cell, strict=True)]
    left = torch.stack([row[len(row) - window + 1 :] for row in padded])
    after = QRNNState(torch.stack([cell for _, cell in pairs]), left)
    encoded = form.run(x, weights, state, backend="reference")
    assert_encodings_close(encoded, encoding([steps for steps, _ in pairs], after), steps=14, dtype=torch.float64)


@every_pooling
def test_reference_with_window_one_matches_a_linear_layer(pooling: str) -> None:
    form = Form("qrnn", pooling=pooling, window=1)
    x, weights, state = as_float64(form.arguments([9, 1, 14], 5, 3))
    gates = [linear(data, weights.input[0].T, weights.bias) for data in rows(x)]
    pairs = [pooled(row, cell, pooling) for row, cell in zip(gates, state.cell, strict=True)]
    after = QRNNState(torch.stack([cell for _, cell in pairs]), state.left)
    encoded = form.run(x, weights, state, backend="reference")
    assert_encodings_close(encoded, encoding([steps for steps, _ in pairs], after), steps=14, dtype=torch.float64)


def test_ifo_with_complementary_input_gate_equals_fo() -> None:
    x, weights, state = as_float64(Form("qrnn", pooling="fo", window=3).arguments([9, 1, 14], 5, 3))
    complementary = QRNNWeights(
        torch.cat((weights.input, -weights.input[..., 5:10]), 2), torch.cat((weights.bias, -weights.bias[5:10])), "ifo"
    )
    fo, ifo = (Form("qrnn").run(x, each, state, backend="reference") for each in (weights, complementary))
    assert_encodings_close(fo, ifo, steps=14, dtype=torch.float64)


def convolved(padded: Tensor, weights: QRNNWeights) -> Tensor:
    """Return the convolution, (steps, blocks x hidden). torch's filters are (outputs, inputs, window), the earliest step first."""
    assert weights.input is not None
    return conv1d(padded.T[None], weights.input.flip(0).permute(2, 1, 0), weights.bias)[0].T


def pooled(gates: Tensor, cell: Tensor, pooling: str) -> tuple[Tensor, Tensor]:
    """Return the steps and the last cell, block by block as in Bradbury et al.: z is tanh; f, o and i are sigmoids."""
    blocks = gates.chunk(POOLINGS[pooling], dim=1)
    z, (f, *others) = blocks[0].tanh(), (block.sigmoid() for block in blocks[1:])
    i = others[1] if pooling == "ifo" else 1 - f
    o = others[0] if others else torch.ones_like(f)
    steps = []
    for t in range(len(gates)):
        cell = f[t] * cell + i[t] * z[t]
        steps.append(o[t] * cell)
    return torch.stack(steps), cell
