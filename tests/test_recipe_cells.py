"""The cells of SRU and QRNN that the recipes train: their values and gradients equal those of the plain loop."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("examples")

DIRECTIONS, STEPS, ROWS, HIDDEN = 2, 7, 3, 5


def module() -> Any:
    return importlib.import_module("training.cells")


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain_forget_cells(candidate: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    cell, cells = torch.zeros_like(candidate[:, 0]), []
    for step in range(candidate.shape[1]):
        forget = torch.sigmoid(gate[:, step] + weight[:, 0] * cell)
        cell = forget * cell + (1 - forget) * candidate[:, step]
        cells.append(cell)
    return torch.stack(cells, dim=1)


def plain_pool(forget: Tensor, new: Tensor) -> Tensor:
    cell, cells = torch.zeros_like(new[:, 0]), []
    for step in range(new.shape[1]):
        cell = forget[:, step] * cell + new[:, step]
        cells.append(cell)
    return torch.stack(cells, dim=1)


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize(("name", "plain"), [("forget_cells", plain_forget_cells), ("pool", plain_pool)])
def test_cells_and_gradients_are_those_of_the_loop(name: str, plain: Callable[..., Tensor], steps: int) -> None:
    torch.manual_seed(steps)
    shape = (DIRECTIONS, steps, ROWS, HIDDEN)
    inputs = [values(*shape), values(*shape), values(DIRECTIONS, 1, 1, HIDDEN)][: 3 if name == "forget_cells" else 2]
    direct = torch.randn(*shape, dtype=torch.float64)
    cells, expected = getattr(module(), name)(*inputs), plain(*inputs)
    torch.testing.assert_close(cells, expected)
    torch.testing.assert_close(torch.autograd.grad(cells, inputs, direct), torch.autograd.grad(expected, inputs, direct))


def test_gradients_are_those_of_small_changes() -> None:
    torch.manual_seed(1)
    shape = (DIRECTIONS, STEPS, ROWS, HIDDEN)
    assert torch.autograd.gradcheck(module().forget_cells, (values(*shape), values(*shape), values(DIRECTIONS, 1, 1, HIDDEN)))
    assert torch.autograd.gradcheck(module().pool, (values(*shape), values(*shape)))
