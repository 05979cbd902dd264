"""The encoders that `train_text.py` trains, in plain PyTorch: from embedded words to one vector per question.

Each encoder has the layer of model.toml that describes it, and returns its parameters in the names and layouts of a model folder.
To add an encoder, subclass `TextEncoder` and list the class in `ENCODERS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from service.modeling.spec import Layer, LSTMLayer, SRULayer, TextCNNLayer


class TextEncoder(nn.Module, ABC):
    """Base class. Arguments: the width of the embedding, and the hidden units per direction or filters per width."""

    layer: Layer
    """The layer of model.toml."""

    description: str
    """The description in the model card."""

    @abstractmethod
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, layer.outputs) of (rows, steps, width). Padding beyond a row's length must not change the result."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""


class LSTMEncoder(TextEncoder):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = LSTMLayer(kind="lstm", hidden=hidden, bidirectional=True)
        self.description = f"one bidirectional LSTM layer of {hidden} units each way"
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        for suffix in ("", "_reverse"):  # PyTorch has two biases and the model folder has one: the second stays zero
            nn.init.zeros_(self.lstm.get_parameter(f"bias_hh_l0{suffix}")).requires_grad_(False)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        return max_over_time(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0], lengths)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            views[f"0.{direction}.input"] = self.lstm.get_parameter(f"weight_ih_l0{suffix}").T
            views[f"0.{direction}.recurrent"] = self.lstm.get_parameter(f"weight_hh_l0{suffix}").T
            views[f"0.{direction}.bias"] = self.lstm.get_parameter(f"bias_ih_l0{suffix}")
        return views


class SRUEncoder(TextEncoder):
    """Bidirectional levels of SRU version 2, in which both gates read the previous cell (Lei et al., 2018)."""

    depth = 2

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = SRULayer(kind="sru", hidden=hidden, depth=self.depth, bidirectional=True)
        self.description = (
            f"{self.depth} bidirectional SRU layers of {hidden} units each way, version 2 (with the cell in both gates)"
        )
        inputs = [width] + [self.layer.outputs] * (self.depth - 1)
        self.levels = nn.ModuleList(SRULevel(size, hidden, self.layer.blocks(size)) for size in inputs)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        for level in self.levels:
            embedded = level(embedded, lengths)
        return max_over_time(embedded, lengths)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for index, level in enumerate(self.levels):
            for name in ("input", "bias", "cell"):
                forward, backward = level.get_parameter(name)
                views[f"{index}.forward.{name}"], views[f"{index}.backward.{name}"] = forward, backward
        return views


class SRULevel(nn.Module):
    """Both directions of a level; the backward direction runs on reversed rows. The direction is the first axis of every shape."""

    def __init__(self, inputs: int, hidden: int, blocks: int) -> None:
        super().__init__()
        bound = math.sqrt(3 / inputs)
        self.input = nn.Parameter(torch.empty(2, inputs, blocks * hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(2, 2 * hidden))
        self.cell = nn.Parameter(torch.empty(2, 2 * hidden).uniform_(-math.sqrt(3), math.sqrt(3)))

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, [forward | backward]) of (rows, steps, inputs)."""
        both = torch.stack([rows, reverse_rows(rows, lengths)]).transpose(1, 2)
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
        forward, backward = torch.stack(steps, dim=2)
        return torch.cat([forward, reverse_rows(backward, lengths)], dim=-1)


class TextCNNEncoder(TextEncoder):
    """Convolutions of several widths over the words, with zeros before and after each row (Kim, 2014)."""

    widths = (3, 4, 5)
    padding = max(widths) - 1

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = TextCNNLayer(kind="text_cnn", widths=self.widths, filters=hidden, padding=self.padding)
        self.description = f"convolutions over 3, 4 and 5 words with {hidden} filters each and ReLU"
        self.convolutions = nn.ModuleList(nn.Conv1d(width, hidden, taps) for taps in self.widths)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        words = embedded.masked_fill(padding_mask(lengths, embedded.shape[1])[:, :, None], 0.0)
        channels = pad(words, (0, 0, self.padding, self.padding)).transpose(1, 2)
        maxima = []
        for taps, convolution in zip(self.widths, self.convolutions, strict=True):
            steps = convolution(channels).transpose(1, 2)
            maxima.append(max_over_time(steps, lengths + 2 * self.padding - taps + 1).relu())
        return torch.cat(maxima, dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for taps, convolution in zip(self.widths, self.convolutions, strict=True):
            views[f"{taps}.filters"] = convolution.get_parameter("weight").permute(2, 1, 0)
            views[f"{taps}.bias"] = convolution.get_parameter("bias")
        return views


ENCODERS: dict[str, type[LSTMEncoder | SRUEncoder | TextCNNEncoder]] = {
    "lstm": LSTMEncoder,
    "sru": SRUEncoder,
    "cnn": TextCNNEncoder,
}


def padding_mask(lengths: Tensor, steps: int) -> Tensor:
    """Return (rows, steps), True for steps beyond the length of their row."""
    return torch.arange(steps) >= lengths[:, None]


def max_over_time(encoded: Tensor, lengths: Tensor) -> Tensor:
    """Return (rows, outputs), the maximum over the steps of each row without padding."""
    return encoded.masked_fill(padding_mask(lengths, encoded.shape[1])[:, :, None], -math.inf).amax(dim=1)


def reverse_rows(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows with their steps in reverse order; padding stays in place."""
    steps = torch.arange(rows.shape[1]).expand(rows.shape[:2])
    source = lengths[:, None] - 1 - steps
    return rows.gather(1, torch.where(source < 0, steps, source)[:, :, None].expand_as(rows))
