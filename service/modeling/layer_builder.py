"""Builds the runnable layers of an encoder from the layers of its model.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kernels.backend import AUTO
from kernels.conv.types import ConvBlock
from kernels.ragged import compute_dtype
from service.errors import ModelError
from service.modeling import convolution, recurrent
from service.modeling.runnable_layer import RunnableLayer
from service.modeling.spec.activations import Activation
from service.modeling.spec.layers import (
    MATRICES,
    ActivationLayer,
    ConvLayer,
    EmbeddingLayer,
    Layer,
    PoolLayer,
    RecurrentLayer,
    TCNLayer,
    TextCNNLayer,
)
from service.modeling.step_layers import STEP_LAYERS, build_embedding, build_step_layer
from service.modeling.window_layers import PaddedRows, WindowPool

COMPILED = "cpu"
"""The backend of a CPU that reads matrices in bfloat16, with the results of the same values in float32."""


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer of model.toml with its name, its input width and its own arrays."""

    name: str
    layer: Layer
    inputs: int
    arrays: Mapping[str, Tensor]

    @property
    def is_convolution(self) -> bool:
        """Whether this layer may be part of a stack of convolutions."""
        return isinstance(self.layer, TCNLayer) or (isinstance(self.layer, ConvLayer) and not self.layer.pads_by_length)


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """A runnable layer.

    names: of the model's layers that it runs; whole_only: of the layers that need a whole sequence before they answer.
    """

    names: tuple[str, ...]
    layer: RunnableLayer
    whole_only: tuple[str, ...]


def build_parts(
    named_layers: Sequence[NamedLayer], device: torch.device, *, int8: bool = False, requested: str = AUTO
) -> list[EncoderPart]:
    """Return the parts of an encoder, first layer first, with weights on `device`. Consecutive convolutions become one part.

    int8: whether the matrices have the values of int8 numbers and scales, and a CPU may compute with the numbers; requested: the backend of
    recurrent layers, as in `kernels.backend.choose`.
    """
    parts: list[EncoderPart] = []
    named_layers = [part for named in named_layers for part in _with_own_activation(named)]
    for is_convolution, group in groupby(named_layers, key=lambda named: named.is_convolution):
        run = list(group)
        if is_convolution:
            parts.append(_build_stack({named.name: _finite_blocks(named, device) for named in run}))
        else:
            for named in run:
                layer = build_layer(named.layer, named.inputs, named.arrays, device, int8=int8, requested=requested)
                names = _names([named])
                parts.append(EncoderPart(names, layer, () if layer.streams else names))
    return parts


def build_layer(
    layer: Layer,
    inputs: int,
    arrays: Mapping[str, Tensor],
    device: torch.device,
    *,
    int8: bool = False,
    requested: str = AUTO,
) -> RunnableLayer:
    """Return one runnable layer with weights on `device`. inputs: its input width; arrays: its own arrays; int8, requested: as in
    `build_parts`."""
    weights = _on_device(arrays, device)
    if isinstance(layer, RecurrentLayer):
        stack = recurrent.build(layer, inputs, weights, int8=int8, requested=requested)
        if stack.backend() == COMPILED:
            return recurrent.build(layer, inputs, weights | _bfloat16_matrices(arrays), int8=int8, requested=requested)
        return stack
    if isinstance(layer, TextCNNLayer):
        return convolution.build_text_cnn(layer, weights)
    if isinstance(layer, STEP_LAYERS):
        return build_step_layer(layer, inputs, weights)
    if isinstance(layer, EmbeddingLayer):
        return build_embedding(layer)
    if isinstance(layer, PoolLayer):
        return WindowPool(layer)
    convolutions = convolution.ConvStack(_blocks(layer, weights))
    return PaddedRows(layer, convolutions) if isinstance(layer, ConvLayer) and layer.pads_by_length else convolutions


def _with_own_activation(named: NamedLayer) -> list[NamedLayer]:
    """Return the layer, or a convolution and its activation as two layers if the convolution kernels do not have the activation."""
    layer = named.layer
    if not isinstance(layer, ConvLayer) or convolution.has_kernel_activation(layer):
        return [named]
    activation = Activation.model_validate(layer.activation.model_dump())
    return [named, NamedLayer("", ActivationLayer(kind="activation", activation=activation), layer.outputs, {})]


def _names(run: Sequence[NamedLayer]) -> tuple[str, ...]:
    """Return the names of layers in model.toml."""
    return tuple(named.name for named in run if named.name)


def _build_stack(blocks_by_name: Mapping[str, list[ConvBlock]]) -> EncoderPart:
    """Return the part that runs these convolutions, given the blocks of each."""
    stack = convolution.ConvStack([block for blocks in blocks_by_name.values() for block in blocks])
    whole_only = [name for name, blocks in blocks_by_name.items() if not convolution.ConvStack(blocks).streams]
    return EncoderPart(tuple(blocks_by_name), stack, tuple(whole_only))


def _finite_blocks(named: NamedLayer, device: torch.device) -> list[ConvBlock]:
    """Return the blocks of a convolution; raises ModelError if its filters are not finite with the norms folded in."""
    blocks = _blocks(named.layer, _on_device(named.arrays, device))
    for weights in [weights for block in blocks for weights in block.layers]:
        if not bool(torch.isfinite(weights.filters).all() and torch.isfinite(weights.bias).all()):
            raise ModelError(
                f"{named.name}: with its norms folded in, the filters have values above the range of {weights.filters.dtype}: "
                "check the norms, or store the model in a precision with a larger range"
            )
    return blocks


def _blocks(layer: Layer, weights: Mapping[str, Tensor]) -> list[ConvBlock]:
    if isinstance(layer, ConvLayer):
        return convolution.build_conv(layer, weights)
    assert isinstance(layer, TCNLayer), "the encoder hands an embedding to the layer after it"
    return convolution.build_tcn(layer, weights)


def _on_device(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays on `device`, in its arithmetic dtype."""
    return {name: array.to(device, compute_dtype(array.dtype, device)) for name, array in arrays.items()}


def _bfloat16_matrices(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices that are stored in bfloat16: reading them takes half the time of float32."""
    return {
        name: array for name, array in arrays.items() if array.dtype == torch.bfloat16 and name.rpartition(".")[2] in MATRICES
    }
