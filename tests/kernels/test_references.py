"""The references of the recurrent families against torch's modules, published formulas and the `sru` package, and levels in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from kernels.gated import HiddenState
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.qrnn.types import POOLINGS, QRNNState
from kernels.ragged import ContractError, Outputs, Ragged
from kernels.sru.types import SRUState, SRUWeights
from tests.kernels.families import Form
from tests.kernels.inputs import (
    OUTPUTS,
    Arguments,
    arrays,
    as_float64,
    assert_encodings_close,
    encoding,
    map_arrays,
    ragged,
    rows,
)
from tests.sru_package import SRUCell

LENGTHS = [9, 1, 14]
GRU, RESET_BEFORE = Form("gru", reset="after"), Form("gru", reset="before")


def assert_reference_gives(form: Form, arguments: Arguments, steps: Sequence[Tensor], state: Any) -> None:
    encoded = form.run(*arguments, backend="reference")
    assert_encodings_close(encoded, encoding(steps, state), steps=14, dtype=torch.float64)


def test_lstm_is_that_of_torch() -> None:
    """torch stores the weights transposed, in the gate order i f g o, and adds two biases."""
    x, weights, state = as_float64(Form("lstm").arguments(LENGTHS, 5, 3))
    assert isinstance(weights, LSTMWeights) and weights.input is not None and weights.bias is not None
    module = torch.nn.LSTM(3, 5, dtype=torch.float64).requires_grad_(False)
    matrices = {"weight_ih_l0": weights.input.T, "weight_hh_l0": weights.recurrent.T}
    module.load_state_dict(matrices | {"bias_ih_l0": weights.bias * 0.25, "bias_hh_l0": weights.bias * 0.75})
    initial = zip(rows(x), state.hidden.split(1), state.cell.split(1), strict=True)
    results = [module(data, (hidden, cell)) for data, hidden, cell in initial]
    after = LSTMState(*(torch.cat([states[which] for _, states in results]) for which in (0, 1)))
    assert_reference_gives(Form("lstm"), Arguments(x, weights, state), [steps for steps, _ in results], after)


def test_gru_is_that_of_torch() -> None:
    """torch adds two biases, but the reset gate scales the recurrent bias of the new gate."""
    x, weights, state = as_float64(GRU.arguments(LENGTHS, 5, 3))
    of_input, of_recurrent = weights.bias * 0.25, weights.bias * 0.75
    of_input[-5:], of_recurrent[-5:] = weights.bias[-5:], weights.recurrent_bias
    module = torch.nn.GRU(3, 5, dtype=torch.float64).requires_grad_(False)
    matrices = {"weight_ih_l0": weights.input.T, "weight_hh_l0": weights.recurrent.T}
    module.load_state_dict(matrices | {"bias_ih_l0": of_input, "bias_hh_l0": of_recurrent})
    results = [module(data, hidden) for data, hidden in zip(rows(x), state.hidden.split(1), strict=True)]
    after = HiddenState(torch.cat([hidden for _, hidden in results]))
    assert_reference_gives(GRU, Arguments(x, weights, state), [steps for steps, _ in results], after)


def test_gru_with_reset_before_is_that_of_cho() -> None:
    x, weights, state = as_float64(RESET_BEFORE.arguments(LENGTHS, 5, 3))
    steps = [cho(data, hidden, weights) for data, hidden in zip(rows(x), state.hidden, strict=True)]
    after = HiddenState(torch.stack([row[-1] for row in steps]))
    assert_reference_gives(RESET_BEFORE, Arguments(x, weights, state), steps, after)


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


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("window", [1, 3])
def test_qrnn_is_a_convolution_and_a_loop(pooling: str, window: int) -> None:
    form = Form("qrnn", pooling=pooling, window=window)
    x, weights, state = arguments = as_float64(form.arguments([9, 1, 2, 14], 5, 3))
    padded = [torch.cat((left, data)) for left, data in zip(state.left, rows(x), strict=True)]
    # torch's filters are (outputs, inputs, window), the earliest step first.
    filters = weights.input.flip(0).permute(2, 1, 0)
    gates = [conv1d(row.T[None], filters, weights.bias)[0].T for row in padded]
    pairs = [pooled(row, cell, pooling) for row, cell in zip(gates, state.cell, strict=True)]
    left = torch.stack([row[len(row) - window + 1 :] for row in padded])
    after = QRNNState(torch.stack([cell for _, cell in pairs]), left)
    assert_reference_gives(form, arguments, [steps for steps, _ in pairs], after)


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


STEPS, ROWS, HIDDEN = 11, 4, 5


@pytest.mark.parametrize(
    "inputs, options",
    [
        (3, {"v1": True, "use_tanh": True}),
        (7, {"has_skip_term": False, "use_tanh": True}),
        (HIDDEN, {"n_proj": 2, "layer_norm": True}),
        (2 * HIDDEN, {"bidirectional": True, "rescale": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:Running SRU on CPU")
def test_sru_is_that_of_the_package(inputs: int, options: dict[str, Any]) -> None:
    """The skip is the fourth block, the scaled input, or missing; a projection or a layer norm does not change it. The package has the
    columns of a unit side by side."""
    torch.manual_seed(0)
    package = SRUCell(inputs, HIDDEN, **options).double()
    for vector in (package.bias, package.weight_c, *package.children()):
        for each in vector.parameters() if isinstance(vector, torch.nn.Module) else [vector]:
            each.data.normal_().mul_(0 if each is package.weight_c and package.v1 else 1)
    directions, blocks = 1 + package.bidirectional, package.num_matrices
    x, start = (torch.randn(*shape, dtype=torch.float64) for shape in ((STEPS, ROWS, inputs), (ROWS, directions * HIDDEN)))
    steps, after = (array.detach() for array in package(x, start))
    norm = None if package.layer_norm is None else torch.stack((package.layer_norm.weight, package.layer_norm.bias))
    for direction in range(directions):
        own, bias, cell = (
            slice(direction * HIDDEN, (direction + 1) * HIDDEN),
            *(array.view(2, directions, HIDDEN)[:, direction].flatten() for array in (package.bias, package.weight_c)),
        )
        columns = package.weight.view(-1, directions, HIDDEN, blocks)[:, direction].transpose(1, 2).flatten(1)
        skip_from = direction * HIDDEN if blocks == 3 and package.has_skip_term else None
        keys = {"scale": float(package.scale_x), "tanh": package.activation == "tanh", "skip_from": skip_from, "norm": norm}
        weights = SRUWeights(columns, bias, None if package.v1 else cell, package.weight_proj, **keys)
        data, expected = (array.flip(0) if direction else array for array in (x, steps[..., own]))
        packed = ragged(data.transpose(0, 1).flatten(0, 1), [STEPS] * ROWS)
        arguments = Arguments(packed, map_arrays(weights, Tensor.detach), SRUState(start[:, own]))
        assert_reference_gives(Form("sru"), arguments, list(expected.unbind(1)), SRUState(after[:, own]))


# Levels.


def three_levels(form: Form) -> tuple[Ragged, list[Any], list[Any]]:
    """Return the data, and the weights and states of each level."""
    first = form.arguments([3, 0, 5], 8, 6)
    above = [form.arguments([3, 0, 5], 8, first.weights.vector, seed=seed) for seed in (1, 2)]
    return first.x, [level.weights for level in (first, *above)], [level.state for level in (first, *above)]


@pytest.mark.parametrize(
    "form, backend", [(Form("lstm"), "cpu"), (RESET_BEFORE, "framework"), (Form("lstm", projection=True), "framework")], ids=str
)
@pytest.mark.parametrize("starts", [True, False], ids=["states", "zeros"])
def test_levels_equal_calls_one_after_the_other(form: Form, backend: str, starts: bool) -> None:
    x, weights, states = levels = three_levels(form)
    encoded = form.levels(x, weights, states if starts else None, backend=backend)
    for layer, before, after in zip(weights, states, encoded.state, strict=True):
        expected = form.run(x, layer, before if starts else None, backend=backend)
        assert expected.steps is not None
        x = Ragged(expected.steps, x.offsets)
        assert all(torch.equal(array, getattr(expected.state, name)) for name, array in arrays(after).items())
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    alone = form.levels(*levels, want=Outputs(last=True))
    assert alone.last is not None and (alone.steps, alone.mean, alone.max) == (None, None, None)


def test_levels_that_do_not_fit_together_are_refused() -> None:
    form = Form("lstm")
    x, weights, states = three_levels(form)
    narrow, folded = (
        form.arguments([3, 0, 5], 8, 5).weights,
        replace(weights[1], input=None, bias=None, table=torch.zeros(9, 32)),
    )
    short = replace(states[1], hidden=states[1].hidden[:2], cell=states[1].cell[:2])
    for second, state, message in (
        (narrow, states[1], r"x.data has the shape \(8, 8\), expected \(8, 5\)"),
        (folded, states[1], r"weights\[1\].input is None, expected a matrix"),
        (weights[1], short, r"state.hidden has the shape \(2, 8\), expected \(3, 8\)"),
    ):
        with pytest.raises(ContractError, match=message):
            form.levels(x, [weights[0], second, weights[2]], [states[0], state, states[2]])
