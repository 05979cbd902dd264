"""Convolutional encoders: Kim's CNN over whole texts, a stack of dilated convolutions with a vector per step, and a TCN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from service.modeling.spec.layers import ConvLayer, TCNLayer, TextCNNLayer
from training.encoder import Encoder
from training.steps import max_over_time, without_padding


class TextCNNEncoder(Encoder):
    """Convolutions of several widths over the steps, with zeros before and after each row (Kim, 2014). It has no vector per step."""

    widths = (3, 4, 5)
    padding = max(widths) - 1

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        layer = TextCNNLayer(kind="text_cnn", widths=self.widths, filters=hidden, padding=self.padding)
        self.layers, self.outputs = (layer,), layer.outputs
        self.description = f"convolutions over 3, 4 and 5 words with {hidden} filters each and ReLU"
        self.convolutions = nn.ModuleList(nn.Conv1d(width, hidden, taps) for taps in self.widths)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        channels = pad(without_padding(inputs, lengths), (0, 0, self.padding, self.padding)).transpose(1, 2)
        maxima = []
        for taps, convolution in zip(self.widths, self.convolutions, strict=True):
            steps = convolution(channels).transpose(1, 2)
            maxima.append(max_over_time(steps, lengths + 2 * self.padding - taps + 1).relu())
        return torch.cat(maxima, dim=-1)

    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        raise TypeError("a text CNN has a vector for the whole text only: use a ConvolutionEncoder for a vector per step")

    def tensors(self, first: int) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for taps, convolution in zip(self.widths, self.convolutions, strict=True):
            views |= parameters(convolution, f"layers.{first}.{taps}")
        return views


class ConvolutionEncoder(Encoder):
    """Convolutions with ReLU. The dilation doubles from layer to layer. They read equally many steps on both sides, or no later steps."""

    depth, taps = 4, 5

    def __init__(self, width: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        dilations = [2**level for level in range(self.depth)]
        padding = "causal" if causal else "same"
        self.layers = tuple(
            ConvLayer.model_validate(
                {"kind": "conv", "filters": hidden, "width": self.taps, "dilation": dilation, "padding": padding}
            )
            for dilation in dilations
        )
        self.outputs = hidden
        self.description = (
            f"{self.depth} {'causal ' if causal else ''}convolutions over {self.taps} steps with {hidden} filters, ReLU "
            f"and the dilations {', '.join(map(str, dilations))}"
        )
        self.around = [(self.taps - 1) * dilation for dilation in dilations]
        self.causal = causal
        self.convolutions = nn.ModuleList(
            nn.Conv1d(hidden if level else width, hidden, self.taps, dilation=dilation)
            for level, dilation in enumerate(dilations)
        )

    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        for around, convolution in zip(self.around, self.convolutions, strict=True):
            before = around if self.causal else around // 2
            channels = without_padding(inputs, lengths).transpose(1, 2)
            inputs = convolution(pad(channels, (before, around - before))).relu().transpose(1, 2)
        return inputs

    def tensors(self, first: int) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for index, convolution in enumerate(self.convolutions, first):
            views |= parameters(convolution, f"layers.{index}")
        return views


class TCNEncoder(Encoder):
    """Levels of two causal convolutions with ReLU and a residual; the dilation doubles from level to level (Bai et al., 2018).

    Unless it is `causal`, a convolution below them reads each step with the steps that follow it.
    """

    levels, taps, ahead = 4, 3, 8

    def __init__(self, width: int, hidden: int, causal: bool = True) -> None:
        super().__init__()
        layer = TCNLayer(kind="tcn", filters=hidden, levels=self.levels, width=self.taps)
        look_ahead = ConvLayer(kind="conv", filters=hidden, width=self.ahead + 1, pads=(0, self.ahead))
        self.layers, self.outputs = ((layer,) if causal else (look_ahead, layer)), layer.outputs
        self.description = f"{self.levels} levels of two causal convolutions over {self.taps} steps with {hidden} filters each"
        if not causal:
            self.description += f", above a convolution with ReLU over each step and the {self.ahead} steps after it"
        self.look_ahead = None if causal else nn.Conv1d(width, hidden, self.ahead + 1)
        self.convolutions = nn.ModuleDict()
        for level in range(self.levels):
            inputs, dilation = (width if causal and level == 0 else hidden), 2**level
            self.convolutions[f"{level}/0"] = nn.Conv1d(inputs, hidden, self.taps, dilation=dilation)
            self.convolutions[f"{level}/1"] = nn.Conv1d(hidden, hidden, self.taps, dilation=dilation)
            if inputs != hidden:
                self.convolutions[f"{level}/projection"] = nn.Conv1d(inputs, hidden, 1)

    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        steps = inputs.transpose(1, 2)
        if self.look_ahead is not None:
            steps = self.look_ahead(pad(without_padding(inputs, lengths).transpose(1, 2), (0, self.ahead))).relu()
        for level in range(self.levels):
            before = ((self.taps - 1) * 2**level, 0)
            residual = self.convolutions[f"{level}/projection"](steps) if f"{level}/projection" in self.convolutions else steps
            for position in range(2):
                steps = self.convolutions[f"{level}/{position}"](pad(steps, before)).relu()
            steps = (steps + residual).relu()
        return steps.transpose(1, 2)

    def tensors(self, first: int) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        if self.look_ahead is not None:
            views |= parameters(self.look_ahead, f"layers.{first}")
        for name, convolution in self.convolutions.items():
            views |= parameters(convolution, f"layers.{first + len(self.layers) - 1}.{name.replace('/', '.')}")
        return views


def parameters(convolution: nn.Module, name: str) -> dict[str, Tensor]:
    """Return views of a convolution's parameters, in the names and layouts of the model folder."""
    return {
        f"{name}.filters": convolution.get_parameter("weight").permute(2, 1, 0),
        f"{name}.bias": convolution.get_parameter("bias"),
    }
