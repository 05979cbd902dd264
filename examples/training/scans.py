"""Levels of SRU and QRNN in plain PyTorch. The directions run at once: the direction, forward or backward, is the first axis of every
shape."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from training.steps import reverse_rows


class Level(nn.Module, ABC):
    """One or both directions of a level; the backward direction runs on reversed rows."""

    names: tuple[str, ...]
    """Its parameters, with the names of the tensors of a level in the model folder."""

    bias: nn.Parameter
    """(directions, gates·hidden)"""

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, [forward | backward]), or only forward, of (rows, steps, inputs)."""
        if len(self.bias) == 1:
            return self.scan(rows.transpose(0, 1)[None])[0]
        forward, backward = self.scan(torch.stack([rows, reverse_rows(rows, lengths)]).transpose(1, 2))
        return torch.cat([forward, reverse_rows(backward, lengths)], dim=-1)

    @abstractmethod
    def scan(self, inputs: Tensor) -> Tensor:
        """Return (directions, rows, steps, hidden) of (directions, steps, rows, inputs)."""


class SRULevel(Level):
    names = ("input", "bias", "cell")

    def __init__(self, inputs: int, hidden: int, blocks: int, directions: int) -> None:
        super().__init__()
        bound = math.sqrt(3 / inputs)
        self.input = nn.Parameter(torch.empty(directions, inputs, blocks * hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(directions, 2 * hidden))
        self.cell = nn.Parameter(torch.empty(directions, 2 * hidden).uniform_(-math.sqrt(3), math.sqrt(3)))

    def scan(self, inputs: Tensor) -> Tensor:
        hidden = self.bias.shape[1] // 2
        product = torch.bmm(inputs.flatten(1, 2), self.input).view(*inputs.shape[:3], -1)
        parts = product.chunk(product.shape[-1] // hidden, dim=-1)  # candidate, forget, reset, and a skip if there is any
        if len(parts) == 3:  # the skip is the input itself, an equal part for each direction
            skips = [rows[..., index * hidden :][..., :hidden] for index, rows in enumerate(inputs)]
            parts = (*parts, torch.stack(skips))
        candidate, forget, reset, skipped = parts
        forget_bias, reset_bias = self.bias[:, None, None].chunk(2, dim=-1)
        forget_cell, reset_cell = self.cell[:, None, None].chunk(2, dim=-1)
        cell = torch.zeros_like(candidate[:, 0])
        before, cells = [], []
        for new, gate in zip(candidate.unbind(1), (forget + forget_bias).unbind(1), strict=True):
            before.append(cell)
            cell = torch.lerp(new, cell, torch.sigmoid(torch.addcmul(gate, forget_cell[:, 0], cell)))
            cells.append(cell)
        r = torch.sigmoid(reset + reset_cell * torch.stack(before, dim=1) + reset_bias)
        return torch.lerp(skipped, torch.stack(cells, dim=1), r).transpose(1, 2)


class QRNNLevel(Level):
    """fo-pooling over windows of the current and the previous steps; matrix 0 of `input` is for the current step."""

    names = ("input", "bias")

    def __init__(self, inputs: int, hidden: int, window: int, directions: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(window * inputs)
        self.input = nn.Parameter(torch.empty(directions, window, inputs, 3 * hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(directions, 3 * hidden))

    def scan(self, inputs: Tensor) -> Tensor:
        steps, window = inputs.shape[1], self.input.shape[1]
        seen = pad(inputs, (0, 0, 0, 0, window - 1, 0))  # zeros before the sequence
        taps = torch.cat([seen[:, window - 1 - back :][:, :steps] for back in range(window)], dim=-1)
        product = torch.baddbmm(self.bias[:, None], taps.flatten(1, 2), self.input.flatten(1, 2))
        candidate, forget, output = product.view(*inputs.shape[:3], -1).chunk(3, dim=-1)
        cell, cells = torch.zeros_like(candidate[:, 0]), []
        for new, f in zip(candidate.tanh().unbind(1), forget.sigmoid().unbind(1), strict=True):
            cell = torch.lerp(new, cell, f)
            cells.append(cell)
        return (output.sigmoid() * torch.stack(cells, dim=1)).transpose(1, 2)
