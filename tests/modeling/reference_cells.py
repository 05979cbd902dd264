"""Reference cells that torch does not have, in plain PyTorch: one level in one direction, on one row at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.modeling.spec import GRULayer, QRNNLayer, SRULayer

BLOCKS = {"f": 2, "fo": 3, "ifo": 4}


class Cell(nn.Module):
    """One level in one direction, from the first step to the last. columns: the first input column of the skip connection."""

    def __init__(self, spec: Any, inputs: int, columns: int) -> None:
        super().__init__()
        self.spec, self.inputs, self.columns = spec, inputs, columns
        self.make(spec, inputs)

    def make(self, spec: Any, inputs: int) -> None:
        raise NotImplementedError

    def forward(self, row: Tensor) -> Tensor:
        raise NotImplementedError

    def named(self) -> dict[str, Tensor]:
        raise NotImplementedError


class ResetBeforeCell(Cell):
    """The GRU of Cho et al. 2014: the reset gate is applied to the state before the product."""

    def make(self, spec: GRULayer, inputs: int) -> None:
        self.input = nn.Linear(inputs, 3 * spec.hidden)
        self.recurrent = nn.ModuleList(nn.Linear(spec.hidden, spec.hidden, bias=False) for _ in range(3))

    def forward(self, row: Tensor) -> Tensor:
        hidden, steps = row.new_zeros(self.spec.hidden), []
        for step in row:
            reset, update, new = self.input(step).chunk(3)
            r = torch.sigmoid(reset + self.recurrent[0](hidden))
            z = torch.sigmoid(update + self.recurrent[1](hidden))
            n = torch.tanh(new + self.recurrent[2](r * hidden))
            hidden = (1 - z) * n + z * hidden
            steps.append(hidden)
        return torch.stack(steps)

    def named(self) -> dict[str, Tensor]:
        return {"input": self.input.weight.T, "recurrent": _concatenated(self.recurrent), "bias": self.input.bias}


class SRUCell(Cell):
    """Lei et al. 2018. The skip is a separate product, the scaled input if the widths agree, or absent. A norm applies to the input of the
    products."""

    def make(self, spec: SRULayer, inputs: int) -> None:
        hidden, outputs = spec.hidden, spec.hidden * (1 + spec.bidirectional)
        narrow = spec.projection is not None and spec.projection < min(inputs, outputs)
        self.narrow = nn.Linear(inputs, spec.projection or 0, bias=False) if narrow else None
        width = self.narrow.out_features if self.narrow else inputs
        self.own_product = spec.skip and inputs != outputs
        self.products = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(3 + self.own_product))
        self.biases, self.by_cell = nn.Parameter(torch.randn(2, hidden)), nn.Parameter(torch.randn(2, hidden))

    def forward(self, row: Tensor, norm: nn.Module | None = None) -> Tensor:
        spec, cell, steps = self.spec, row.new_zeros(self.spec.hidden), []
        by_cell = self.by_cell if spec.cell_gates else torch.zeros_like(self.by_cell)
        for step in row:
            seen = norm(step) if norm else step
            candidate, forget, reset, *skip = (product(self.narrow(seen) if self.narrow else seen) for product in self.products)
            f = torch.sigmoid(forget + by_cell[0] * cell + self.biases[0])
            r = torch.sigmoid(reset + by_cell[1] * cell + self.biases[1])
            cell = f * cell + (1 - f) * candidate
            if spec.skip and not self.own_product:
                skip = [step[self.columns : self.columns + spec.hidden] * spec.scale]
            inner = torch.tanh(cell) if spec.activation == "tanh" else cell
            steps.append(r * inner + (1 - r) * (skip[0] if skip else 0))
        return torch.stack(steps)

    def named(self) -> dict[str, Tensor]:
        named = {"input": _concatenated(self.products), "bias": self.biases.flatten()}
        named |= {"cell": self.by_cell.flatten()} if self.spec.cell_gates else {}
        return named | ({"projection": self.narrow.weight.T} if self.narrow else {})


class QRNNCell(Cell):
    """Bradbury et al. 2017: a causal convolution, then pooling."""

    def make(self, spec: QRNNLayer, inputs: int) -> None:
        self.conv = nn.Conv1d(inputs, BLOCKS[spec.pooling] * spec.hidden, spec.window)

    def forward(self, row: Tensor) -> Tensor:
        gates = self.conv(functional.pad(row.T, (self.spec.window - 1, 0))).T
        cell, steps = row.new_zeros(self.spec.hidden), []
        for step in gates:
            z, forget, *others = step.chunk(BLOCKS[self.spec.pooling])
            f = torch.sigmoid(forget)
            i = torch.sigmoid(others[1]) if self.spec.pooling == "ifo" else 1 - f
            cell = f * cell + i * torch.tanh(z)
            steps.append(torch.sigmoid(others[0]) * cell if others else cell)
        return torch.stack(steps)

    def named(self) -> dict[str, Tensor]:
        assert self.conv.bias is not None
        return {"input": self.conv.weight.permute(2, 1, 0).flip(0), "bias": self.conv.bias}


def _concatenated(linears: nn.ModuleList) -> Tensor:
    """Return the weights as the blocks of one matrix."""
    return torch.cat([one.weight.T for one in linears if isinstance(one, nn.Linear)], dim=1)


CELLS: dict[str, type[Cell]] = {"gru": ResetBeforeCell, "sru": SRUCell, "qrnn": QRNNCell}
