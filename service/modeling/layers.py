"""From the layers of model.toml to what runs on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kernels.contract import ConvBlock, arithmetic
from service.modeling import convolution, recurrent
from service.modeling.layer import Runs
from service.modeling.spec import ConvLayer, Layer, RecurrentLayer, TCNLayer, TextCNNLayer


@dataclass(frozen=True, slots=True)
class Placed:
    """One layer with its name, the width of what comes in, and its own arrays."""

    name: str
    layer: Layer
    inputs: int
    arrays: Mapping[str, Tensor]

    @property
    def convolves(self) -> bool:
        return isinstance(self.layer, ConvLayer | TCNLayer)


@dataclass(frozen=True, slots=True)
class Part:
    """What runs as one, and the names of the layers in it."""

    names: tuple[str, ...]
    runs: Runs


def build_all(placed: Sequence[Placed], device: torch.device) -> list[Part]:
    """Front to back, with the weights on `device`; convolutions that follow each other run as one."""
    parts: list[Part] = []
    for convolves, group in groupby(placed, key=lambda one: one.convolves):
        together = list(group)
        if convolves:
            blocks = [block for one in together for block in _blocks(one.layer, _held(one.arrays, device))]
            parts.append(Part(tuple(one.name for one in together), convolution.Convolutions(blocks)))
        else:
            parts += [Part((one.name,), build(one.layer, one.inputs, one.arrays, device)) for one in together]
    return parts


def build(layer: Layer, inputs: int, arrays: Mapping[str, Tensor], device: torch.device) -> Runs:
    """One layer with its weights on `device`; `inputs` is the width of what comes in, `arrays` are the layer's own."""
    held = _held(arrays, device)
    if isinstance(layer, RecurrentLayer):
        return recurrent.build(layer, inputs, held)
    if isinstance(layer, TextCNNLayer):
        return convolution.build_text_cnn(layer, held)
    return convolution.Convolutions(_blocks(layer, held))


def _blocks(layer: Layer, held: Mapping[str, Tensor]) -> list[ConvBlock]:
    if isinstance(layer, ConvLayer):
        return convolution.build_conv(layer, held)
    assert isinstance(layer, TCNLayer), "the encoder gives an embedding to the layer after it"
    return convolution.build_tcn(layer, held)


def _held(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """In the arithmetic of the device."""
    return {name: array.to(device, arithmetic(array.dtype, device)) for name, array in arrays.items()}
