"""Recurrent encoders: LSTM and GRU by PyTorch's modules, SRU and QRNN by the levels of `scans.py`. Causal encoders run forward only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from service.modeling.spec.layers import GRULayer, LSTMLayer, QRNNLayer, SRULayer
from training.encoder import Encoder
from training.scans import Level, QRNNLevel, SRULevel

SUFFIXES = {"forward": "", "backward": "_reverse"}
"""The ends of the names of PyTorch's parameters."""


class TorchRecurrentEncoder(Encoder):
    """One level of nn.LSTM or nn.GRU. PyTorch has two biases; a bias that the model folder lacks stays zero."""

    recurrent: nn.LSTM | nn.GRU

    def __init__(self, layer: LSTMLayer | GRULayer) -> None:
        super().__init__()
        self.layers, self.outputs, self.directions = (layer,), layer.outputs, layer.directions
        self.description = f"one {adverb(layer.bidirectional)} {layer.kind.upper()} layer of {units(layer)}"

    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        if (lengths == inputs.shape[1]).all():  # without padding: the backward pass of nn.GRU is slow for packed rows
            whole: Tensor = self.recurrent(inputs)[0]
            return whole
        packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs: Tensor = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=inputs.shape[1])[0]
        return outputs

    def tensors(self, first: int) -> dict[str, Tensor]:
        views = {}
        for direction in self.directions:
            suffix = SUFFIXES[direction]
            views[f"layers.{first}.0.{direction}.input"] = self.recurrent.get_parameter(f"weight_ih_l0{suffix}").T
            views[f"layers.{first}.0.{direction}.recurrent"] = self.recurrent.get_parameter(f"weight_hh_l0{suffix}").T
            views[f"layers.{first}.0.{direction}.bias"] = self.recurrent.get_parameter(f"bias_ih_l0{suffix}")
        return views

    def second_biases(self) -> list[Tensor]:
        """Return the biases of the recurrent product of each direction, set to zero."""
        return [nn.init.zeros_(self.recurrent.get_parameter(f"bias_hh_l0{SUFFIXES[name]}")) for name in self.directions]


class LSTMEncoder(TorchRecurrentEncoder):
    def __init__(self, width: int, hidden: int, causal: bool = False) -> None:
        super().__init__(LSTMLayer(kind="lstm", hidden=hidden, bidirectional=not causal))
        self.recurrent = nn.LSTM(width, hidden, batch_first=True, bidirectional=not causal)
        for bias in self.second_biases():
            bias.requires_grad_(False)


class GRUEncoder(TorchRecurrentEncoder):
    """Its second bias is learned for the new gate only, where the reset gate multiplies it."""

    def __init__(self, width: int, hidden: int, causal: bool = False) -> None:
        super().__init__(GRULayer(kind="gru", hidden=hidden, bidirectional=not causal))
        self.recurrent = nn.GRU(width, hidden, batch_first=True, bidirectional=not causal)
        learned = torch.arange(3 * hidden) >= 2 * hidden
        for bias in self.second_biases():
            bias.register_hook(lambda gradient: gradient * learned.to(gradient.device))  # type: ignore[no-untyped-call]

    def tensors(self, first: int) -> dict[str, Tensor]:
        views = super().tensors(first)
        for direction in self.directions:
            new_gate = self.recurrent.get_parameter(f"bias_hh_l0{SUFFIXES[direction]}")[2 * self.recurrent.hidden_size :]
            views[f"layers.{first}.0.{direction}.recurrent_bias"] = new_gate
        return views


class ScanEncoder(Encoder):
    """Levels without a recurrent product."""

    depth = 2
    levels: nn.ModuleList

    def __init__(self, layer: SRULayer | QRNNLayer, details: str) -> None:
        super().__init__()
        self.layers, self.outputs, self.directions = (layer,), layer.outputs, layer.directions
        kind = layer.kind.upper()
        self.description = f"{self.depth} {adverb(layer.bidirectional)} {kind} layers of {units(layer)}{details}"

    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        for level in self.levels:
            inputs = level(inputs, lengths)
        return inputs

    def tensors(self, first: int) -> dict[str, Tensor]:
        views = {}
        for index, level in enumerate(self.levels):
            assert isinstance(level, Level)
            for name in level.names:
                for direction, view in zip(self.directions, level.get_parameter(name), strict=True):
                    views[f"layers.{first}.{index}.{direction}.{name}"] = view
        return views


class SRUEncoder(ScanEncoder):
    """SRU version 2, in which both gates read the previous cell (Lei et al., 2018)."""

    def __init__(self, width: int, hidden: int, causal: bool = False) -> None:
        layer = SRULayer(kind="sru", hidden=hidden, depth=self.depth, bidirectional=not causal)
        super().__init__(layer, ", version 2 (with the cell in both gates)")
        inputs = [width] + [self.outputs] * (self.depth - 1)
        self.levels = nn.ModuleList(SRULevel(size, hidden, layer.blocks(size), len(self.directions)) for size in inputs)


class QRNNEncoder(ScanEncoder):
    """QRNN with fo-pooling over windows of two steps (Bradbury et al., 2017)."""

    window = 2

    def __init__(self, width: int, hidden: int, causal: bool = False) -> None:
        layer = QRNNLayer(kind="qrnn", hidden=hidden, depth=self.depth, bidirectional=not causal, window=self.window)
        super().__init__(layer, f" over windows of {self.window} steps")
        inputs = [width] + [self.outputs] * (self.depth - 1)
        self.levels = nn.ModuleList(QRNNLevel(size, hidden, self.window, len(self.directions)) for size in inputs)


def adverb(bidirectional: bool) -> str:
    return "bidirectional" if bidirectional else "unidirectional"


def units(layer: LSTMLayer | GRULayer | SRULayer | QRNNLayer) -> str:
    return f"{layer.hidden} units each way" if layer.bidirectional else f"{layer.hidden} units"
