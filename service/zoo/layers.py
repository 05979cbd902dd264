"""From a layer of model.toml to the layer on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.contract import arithmetic
from service.zoo import convolution, recurrent
from service.zoo.layer import Runs
from service.zoo.spec import ConvLayer, Layer, RecurrentLayer, TextCNNLayer


def build(layer: Layer, inputs: int, arrays: Mapping[str, Tensor], device: torch.device) -> Runs:
    """The layer with its weights on `device`; `inputs` is the width of what comes in, `arrays` are the layer's own."""
    held = {name: array.to(device, arithmetic(array.dtype, device)) for name, array in arrays.items()}
    if isinstance(layer, RecurrentLayer):
        return recurrent.build(layer, inputs, held)
    if isinstance(layer, ConvLayer):
        return convolution.build_conv(layer, held)
    assert isinstance(layer, TextCNNLayer), "the encoder gives an embedding to the layer after it"
    return convolution.build_text_cnn(layer, held)
