"""Encoders of all six families in plain PyTorch: from vectors of steps to one vector per sequence, by the maximum over time.

Each encoder has the layer of model.toml that describes it, and returns its parameters in the names and layouts of a model folder.
To add an encoder, subclass `Encoder` and list the class in `ENCODERS`. The gated products of SRU and QRNN are in `scans.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from service.modeling.spec import GRULayer, Layer, LSTMLayer, QRNNLayer, SRULayer, TCNLayer, TextCNNLayer
from training.scans import Level, QRNNLevel, SRULevel
from training.steps import max_over_time, without_padding


class Encoder(nn.Module, ABC):
    """Base class. Arguments: the width of the inputs, and the hidden units per direction, or the filters."""

    layer: Layer
    """The layer of model.toml."""

    description: str
    """The description in the model card."""

    @abstractmethod
    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, outputs) of (rows, steps, inputs). Padding beyond a row's length must not change the result."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""


class TorchRecurrentEncoder(Encoder):
    """One bidirectional level of nn.LSTM or nn.GRU. PyTorch has two biases; what the model folder lacks of them stays zero."""

    recurrent: nn.LSTM | nn.GRU

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return max_over_time(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0], lengths)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            views[f"0.{direction}.input"] = self.recurrent.get_parameter(f"weight_ih_l0{suffix}").T
            views[f"0.{direction}.recurrent"] = self.recurrent.get_parameter(f"weight_hh_l0{suffix}").T
            views[f"0.{direction}.bias"] = self.recurrent.get_parameter(f"bias_ih_l0{suffix}")
        return views

    def second_biases(self) -> list[Tensor]:
        """Return both directions' biases of the recurrent product, set to zero."""
        return [nn.init.zeros_(self.recurrent.get_parameter(f"bias_hh_l0{suffix}")) for suffix in ("", "_reverse")]


class LSTMEncoder(TorchRecurrentEncoder):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = LSTMLayer(kind="lstm", hidden=hidden, bidirectional=True)
        self.description = f"one bidirectional LSTM layer of {hidden} units each way"
        self.recurrent = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        for bias in self.second_biases():
            bias.requires_grad_(False)


class GRUEncoder(TorchRecurrentEncoder):
    """Its second bias is learned for the new gate only, where the reset gate multiplies it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = GRULayer(kind="gru", hidden=hidden, bidirectional=True)
        self.description = f"one bidirectional GRU layer of {hidden} units each way"
        self.recurrent = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        learned = torch.arange(3 * hidden) >= 2 * hidden
        for bias in self.second_biases():
            bias.register_hook(lambda gradient: gradient * learned.to(gradient.device))  # type: ignore[no-untyped-call]

    def tensors(self) -> dict[str, Tensor]:
        views = super().tensors()
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            new_gate = self.recurrent.get_parameter(f"bias_hh_l0{suffix}")[2 * self.recurrent.hidden_size :]
            views[f"0.{direction}.recurrent_bias"] = new_gate
        return views


class ScanEncoder(Encoder):
    """Bidirectional levels without a recurrent product."""

    depth = 2
    levels: nn.ModuleList

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        for level in self.levels:
            inputs = level(inputs, lengths)
        return max_over_time(inputs, lengths)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for index, level in enumerate(self.levels):
            assert isinstance(level, Level)
            for name in level.names:
                forward, backward = level.get_parameter(name)
                views[f"{index}.forward.{name}"], views[f"{index}.backward.{name}"] = forward, backward
        return views


class SRUEncoder(ScanEncoder):
    """SRU version 2, in which both gates read the previous cell (Lei et al., 2018)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = SRULayer(kind="sru", hidden=hidden, depth=self.depth, bidirectional=True)
        self.description = (
            f"{self.depth} bidirectional SRU layers of {hidden} units each way, version 2 (with the cell in both gates)"
        )
        inputs = [width] + [self.layer.outputs] * (self.depth - 1)
        self.levels = nn.ModuleList(SRULevel(size, hidden, self.layer.blocks(size)) for size in inputs)


class QRNNEncoder(ScanEncoder):
    """QRNN with fo-pooling over windows of two steps (Bradbury et al., 2017)."""

    window = 2

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = QRNNLayer(kind="qrnn", hidden=hidden, depth=self.depth, bidirectional=True, window=self.window)
        self.description = (
            f"{self.depth} bidirectional QRNN layers of {hidden} units each way over windows of {self.window} steps"
        )
        inputs = [width] + [self.layer.outputs] * (self.depth - 1)
        self.levels = nn.ModuleList(QRNNLevel(size, hidden, self.window) for size in inputs)


class TextCNNEncoder(Encoder):
    """Convolutions of several widths over the steps, with zeros before and after each row (Kim, 2014)."""

    widths = (3, 4, 5)
    padding = max(widths) - 1

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = TextCNNLayer(kind="text_cnn", widths=self.widths, filters=hidden, padding=self.padding)
        self.description = f"convolutions over 3, 4 and 5 words with {hidden} filters each and ReLU"
        self.convolutions = nn.ModuleList(nn.Conv1d(width, hidden, taps) for taps in self.widths)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        channels = pad(without_padding(inputs, lengths), (0, 0, self.padding, self.padding)).transpose(1, 2)
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


class TCNEncoder(Encoder):
    """Levels of two causal convolutions with ReLU and a residual; the dilation doubles from level to level (Bai et al., 2018)."""

    levels, taps = 4, 3

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = TCNLayer(kind="tcn", filters=hidden, levels=self.levels, width=self.taps)
        self.description = f"{self.levels} levels of two causal convolutions over {self.taps} steps with {hidden} filters each"
        self.convolutions = nn.ModuleDict()
        for level in range(self.levels):
            inputs, dilation = (hidden if level else width), 2**level
            self.convolutions[f"{level}/0"] = nn.Conv1d(inputs, hidden, self.taps, dilation=dilation)
            self.convolutions[f"{level}/1"] = nn.Conv1d(hidden, hidden, self.taps, dilation=dilation)
            if inputs != hidden:
                self.convolutions[f"{level}/projection"] = nn.Conv1d(inputs, hidden, 1)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        steps = inputs.transpose(1, 2)
        for level in range(self.levels):
            before = ((self.taps - 1) * 2**level, 0)
            residual = self.convolutions[f"{level}/projection"](steps) if f"{level}/projection" in self.convolutions else steps
            for position in range(2):
                steps = self.convolutions[f"{level}/{position}"](pad(steps, before)).relu()
            steps = (steps + residual).relu()
        return max_over_time(steps.transpose(1, 2), lengths)

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for name, convolution in self.convolutions.items():
            views[f"{name.replace('/', '.')}.filters"] = convolution.get_parameter("weight").permute(2, 1, 0)
            views[f"{name.replace('/', '.')}.bias"] = convolution.get_parameter("bias")
        return views


ENCODERS: dict[str, Callable[[int, int], Encoder]] = {
    "sru": SRUEncoder,
    "qrnn": QRNNEncoder,
    "lstm": LSTMEncoder,
    "gru": GRUEncoder,
    "cnn": TextCNNEncoder,
    "tcn": TCNEncoder,
}
