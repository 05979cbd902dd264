"""Levels of SRU and QRNN in plain PyTorch. Both directions run at once: the direction is the first axis of every shape."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from training.steps import reverse_rows


class Level(nn.Module, ABC):
    """Both directions of a level; the backward direction runs on reversed rows."""

    names: tuple[str, ...]
    """Its parameters, with the names of the tensors of a level in the model folder."""

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, [forward | backward]) of (rows, steps, inputs)."""
        both = torch.stack([rows, reverse_rows(rows, lengths)]).transpose(1, 2)
        forward, backward = self.scan(both)
        return torch.cat([forward, reverse_rows(backward, lengths)], dim=-1)

    @abstractmethod
    def scan(self, both: Tensor) -> Tensor:
        """Return (2, rows, steps, hidden) of (2, steps, rows, inputs)."""


class SRULevel(Level):
    names = ("input", "bias", "cell")

    def __init__(self, inputs: int, hidden: int, blocks: int) -> None:
        super().__init__()
        bound = math.sqrt(3 / inputs)
        self.input = nn.Parameter(torch.empty(2, inputs, blocks * hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(2, 2 * hidden))
        self.cell = nn.Parameter(torch.empty(2, 2 * hidden).uniform_(-math.sqrt(3), math.sqrt(3)))

    def scan(self, both: Tensor) -> Tensor:
        hidden = self.bias.shape[1] // 2
        product = torch.bmm(both.flatten(1, 2), self.input).view(*both.shape[:3], -1)
        parts = product.chunk(product.shape[-1] // hidden, dim=-1)  # candidate, forget, reset, and skip if there is one
        if len(parts) == 3:  # the skip is the input itself, one half for each direction
            parts = (*parts, torch.stack([both[0, ..., :hidden], both[1, ..., hidden:]]))
        forget_bias, reset_bias = self.bias[:, None].chunk(2, dim=-1)
        forget_cell, reset_cell = self.cell[:, None].chunk(2, dim=-1)
        cell = torch.zeros_like(parts[0][:, 0])
        steps = []
        for candidate, forget, reset, skipped in zip(*(part.unbind(1) for part in parts), strict=True):
            f = torch.sigmoid(forget + forget_cell * cell + forget_bias)
            r = torch.sigmoid(reset + reset_cell * cell + reset_bias)
            cell = f * cell + (1 - f) * candidate
            steps.append(r * cell + (1 - r) * skipped)
        return torch.stack(steps, dim=2)


class QRNNLevel(Level):
    """fo-pooling over windows of the current and the previous steps; matrix 0 of `input` is for the current step."""

    names = ("input", "bias")

    def __init__(self, inputs: int, hidden: int, window: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(window * inputs)
        self.input = nn.Parameter(torch.empty(2, window, inputs, 3 * hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(2, 3 * hidden))

    def scan(self, both: Tensor) -> Tensor:
        steps, window = both.shape[1], self.input.shape[1]
        seen = pad(both, (0, 0, 0, 0, window - 1, 0))  # zeros before the sequence
        taps = torch.cat([seen[:, window - 1 - back :][:, :steps] for back in range(window)], dim=-1)
        product = torch.baddbmm(self.bias[:, None], taps.flatten(1, 2), self.input.flatten(1, 2)).view(*both.shape[:3], -1)
        candidate, forget, output = product.chunk(3, dim=-1)
        candidate, f, o = candidate.tanh(), forget.sigmoid(), output.sigmoid()
        cell = torch.zeros_like(candidate[:, 0])
        hidden = []
        for step in range(steps):
            cell = f[:, step] * cell + (1 - f[:, step]) * candidate[:, step]
            hidden.append(o[:, step] * cell)
        return torch.stack(hidden, dim=2)
