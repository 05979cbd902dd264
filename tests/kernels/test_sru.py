"""Tests of the SRU's reference against the arithmetic of the published package, in that package's layout of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.sru.types import SRUState, SRUWeights
from tests.kernels.families import Form, runs_on_cpu
from tests.kernels.inputs import Arguments, assert_encodings_close, encoding, ragged

STEPS, ROWS, HIDDEN = 11, 4, 5

every_activation = pytest.mark.parametrize("tanh", [False, True])
every_version = pytest.mark.parametrize("version", [1, 2])


class Package:
    """One direction of a layer of the published package: time-major, the columns of a unit adjacent, v and b as (2 x hidden)."""

    def __init__(self, *, inputs: int, blocks: int, version: int, tanh: bool, projected: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.x = normal(STEPS, ROWS, inputs)
        self.weight_proj = None if projected is None else normal(inputs, projected) * inputs**-0.5
        self.weight = normal(projected or inputs, HIDDEN * blocks) * (projected or inputs) ** -0.5
        self.weight_c = normal(2 * HIDDEN) * (version == 2)
        self.bias = normal(2 * HIDDEN)
        self.initial = normal(ROWS, HIDDEN)
        self.blocks, self.tanh = blocks, tanh

    def forward(self, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the steps, (steps, rows, hidden), and the last cell. With four blocks, the last block is the residual."""
        x = self.x if self.weight_proj is None else self.x @ self.weight_proj
        u = (x @ self.weight).view(STEPS, ROWS, HIDDEN, self.blocks)
        v_forget, v_reset = self.weight_c.view(2, HIDDEN)
        b_forget, b_reset = self.bias.view(2, HIDDEN)
        residual = u[..., 3] if self.blocks == 4 else residual
        cell, steps = self.initial, []
        for t in range(STEPS):
            before = cell
            forget = torch.sigmoid(u[t, ..., 1] + v_forget * before + b_forget)
            cell = (before - u[t, ..., 0]) * forget + u[t, ..., 0]
            reset = torch.sigmoid(u[t, ..., 2] + v_reset * before + b_reset)
            inner = torch.tanh(cell) if self.tanh else cell
            steps.append(inner * reset if residual is None else (inner - residual[t]) * reset + residual[t])
        return torch.stack(steps), cell

    def arguments(self, *, skip_from: int | None = None, scale: float = 1.0) -> Arguments:
        """Return the same problem in the kernels' layout: blocks adjacent, rows packed end to end."""
        weight = self.weight.view(-1, HIDDEN, self.blocks).transpose(1, 2).reshape(len(self.weight), -1)
        cell = self.weight_c if self.weight_c.any() else None
        weights = SRUWeights(weight, self.bias, cell, self.weight_proj, skip_from=skip_from, scale=scale, tanh=self.tanh)
        return Arguments(ragged(self.x.transpose(0, 1).flatten(0, 1), [STEPS] * ROWS), weights, SRUState(self.initial))

    def assert_matches(self, arguments: Arguments, residual: Tensor | None) -> None:
        """Assert that the reference encodes the arguments as the package does."""
        steps, cell = self.forward(residual)
        encoded = Form("sru").run(*arguments, backend="reference")
        assert_encodings_close(encoded, encoding(list(steps.unbind(1)), SRUState(cell)), steps=STEPS, dtype=torch.float64)


@every_version
@every_activation
def test_skip_is_the_fourth_block(version: int, tanh: bool) -> None:
    package = Package(inputs=3, blocks=4, version=version, tanh=tanh)
    package.assert_matches(package.arguments(), None)


@every_version
@every_activation
@pytest.mark.parametrize("direction", [0, 1])
def test_skip_is_the_scaled_input_with_three_blocks(version: int, tanh: bool, direction: int) -> None:
    package = Package(inputs=2 * HIDDEN, blocks=3, version=version, tanh=tanh)
    residual = package.x.view(STEPS, ROWS, 2, HIDDEN)[:, :, direction] * 3**0.5
    package.assert_matches(package.arguments(skip_from=direction * HIDDEN, scale=3**0.5), residual)


@every_version
@every_activation
def test_reset_scales_the_cell_without_a_skip(version: int, tanh: bool) -> None:
    package = Package(inputs=7, blocks=3, version=version, tanh=tanh)
    package.assert_matches(package.arguments(), None)


@every_version
def test_projection_does_not_affect_the_skip(version: int) -> None:
    package = Package(inputs=HIDDEN, blocks=3, version=version, tanh=False, projected=2)
    package.assert_matches(package.arguments(skip_from=0), package.x)


@every_version
def test_layer_norm_does_not_affect_the_skip(version: int) -> None:
    package = Package(inputs=HIDDEN, blocks=3, version=version, tanh=False, projected=2)
    x, weights, state = package.arguments(skip_from=0)
    norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.float64).requires_grad_(False)
    norm.weight.normal_(), norm.bias.normal_()
    residual, package.x = package.x, norm(package.x)
    package.assert_matches(Arguments(x, replace(weights, norm=torch.stack((norm.weight, norm.bias))), state), residual)


@pytest.mark.parametrize("backend", [backend.name for backend in Form("sru").backends if runs_on_cpu(backend)])
def test_version_1_equals_version_2_with_zero_v(backend: str) -> None:
    form = Form("sru", version=1)
    x, weights, state = form.arguments([7, 1, 0, 13], 5, 3)
    with_zeros = replace(weights, cell=torch.zeros(10))
    without_v, with_zero_v = (form.run(x, each, state, backend=backend) for each in (weights, with_zeros))
    assert_encodings_close(without_v, with_zero_v, steps=0)
