"""Convolutional layers on a device, over vectors or over token ids.

Consecutive convolutions form one stack, so that the backend is free to choose how it stores the steps between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import conv as conv_kernel
from kernels.conv.norms import fold_batch_norm, fold_weight_norm
from kernels.conv.types import ACTIVATIONS, GATED, ConvBlock, ConvState, ConvWeights
from kernels.embedding import fold_taps
from kernels.ragged import Encoded, Outputs, Ragged, compute_dtype
from service.modeling.runnable_layer import EMBEDDED, FOLDED, RunnableLayer, embed_ids, unique_tensors, weight_tensors
from service.modeling.spec.layers import ConvLayer, TCNLayer, TextCNNLayer


class ConvStack(RunnableLayer):
    """A sequence of convolution blocks.

    Over ids, chunks are always embedded, even if whole rows are looked up in folded tables. The states are then vectors of the embedding,
    which any device can import, and all chunks of a sequence are computed in the same way.
    """

    def __init__(self, blocks: Sequence[ConvBlock]) -> None:
        self._blocks = tuple(blocks)
        self._first_over_ids: ConvBlock | None = None
        """The first block with an embedding or tables, if it takes ids."""
        self._embedding: Tensor | None = None
        """Embeds the ids of chunks, and of whole rows unless `_first_over_ids` takes them."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        if self._first_over_ids is not None:
            return conv_kernel.stack(x, (self._first_over_ids, *self._blocks[1:]), want=want)
        return conv_kernel.stack(self._vectors(x), self._blocks, want=want)

    def run_chunk(self, x: Ragged, want: Outputs, states: Sequence[ConvState] | None) -> tuple[Encoded, list[ConvState]]:
        """Run the stack from `states`, one per layer; return the outputs and the new states.

        For causal layers with stride 1, the chunks of a row give the same steps as the whole row.
        """
        x = self._vectors(x)
        states_before = self._zero_states(x) if states is None else states
        encoded = conv_kernel.stack(x, self._blocks, states_before, want=want)
        return encoded, list(encoded.state)

    @property
    def streams(self) -> bool:
        return all(layer.keeps_steps and not layer.right for layer in self._layers())

    def allocate_states(self, slots: int) -> list[ConvState]:
        return [ConvState(layer.filters.new_zeros(slots, layer.left, layer.filters.shape[1])) for layer in self._layers()]

    def embed(self, table: Tensor) -> None:
        # A residual adds vectors to the block's output, so the ids of such a block are embedded before it.
        first = self._blocks[0]
        self._first_over_ids = None if first.residual else _with_first_layer(first, replace(first.layers[0], embedding=table))
        self._embedding, self.takes_ids = table, EMBEDDED

    def fold(self, table: Tensor) -> None:
        first = self._blocks[0]
        self._first_over_ids = _with_first_layer(first, _folded(first.layers[0], table))
        self._embedding, self.takes_ids = table if self.streams else None, FOLDED

    @property
    def folded_columns(self) -> int | None:
        first = self._blocks[0]
        return None if first.residual else _folded_columns(first.layers[0])

    def backend(self) -> str:
        over_ids = () if self._first_over_ids is None else self._first_over_ids.layers
        return conv_kernel.choice(conv_kernel.deciding([*over_ids, *self._layers()])).backend.name

    def tensors(self) -> list[Tensor]:
        projections = [block.projection for block in self._blocks if block.projection is not None]
        first_over_ids = [] if self._first_over_ids is None else [self._first_over_ids.layers[0]]
        tensors = [tensor for weights in (*self._layers(), *projections, *first_over_ids) for tensor in weight_tensors(weights)]
        return unique_tensors(tensors if self._embedding is None else [*tensors, self._embedding])

    def _layers(self) -> list[ConvWeights]:
        return [layer for block in self._blocks for layer in block.layers]

    def _vectors(self, x: Ragged) -> Ragged:
        return x if self._embedding is None else embed_ids(x, self._embedding)

    def _zero_states(self, x: Ragged) -> list[ConvState]:
        """Return the states of rows that have no earlier chunk."""
        return [
            ConvState(torch.zeros(x.rows, layer.left, layer.filters.shape[1], device=x.data.device)) for layer in self._layers()
        ]


class TextCNN(RunnableLayer):
    """Convolutions of several widths over the same steps, each pooled by its maximum over time and concatenated."""

    def __init__(self, layers: Sequence[ConvWeights]) -> None:
        self._layers = tuple(layers)
        self._layers_over_ids: tuple[ConvWeights, ...] | None = None
        """The layers with an embedding or tables, if they take ids."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return conv_kernel.text_cnn(x, self._layers_over_ids or self._layers, self.linear)

    def embed(self, table: Tensor) -> None:
        self._layers_over_ids = tuple(replace(layer, embedding=table) for layer in self._layers)
        self.takes_ids = EMBEDDED

    def fold(self, table: Tensor) -> None:
        self._layers_over_ids = tuple(_folded(layer, table) for layer in self._layers)
        self.takes_ids = FOLDED

    @property
    def folded_columns(self) -> int:
        return sum(map(_folded_columns, self._layers))

    def backend(self) -> str:
        return conv_kernel.choice(conv_kernel.deciding(self._layers_over_ids or self._layers)).backend.name

    def tensors(self) -> list[Tensor]:
        layers = (*self._layers, *(self._layers_over_ids or ()))
        return unique_tensors([tensor for layer in layers for tensor in weight_tensors(layer)])


def build_conv(layer: ConvLayer, weights: Mapping[str, Tensor]) -> list[ConvBlock]:
    """Return the blocks of a `conv` layer. Its weights are on their device already."""
    left, right = (0, 0) if layer.pads_by_length else layer.padding_steps
    filters, bias = _ungrouped(_filters(weights, ""), layer.groups), weights["bias"]
    if layer.batch_norm:
        filters, bias = fold_batch_norm(filters, bias, weights["norm"], layer.epsilon)
    activation = layer.activation.kind if has_kernel_activation(layer) else "none"
    return [ConvBlock((ConvWeights(filters, bias, left, right, layer.dilation, layer.stride, activation),))]


def has_kernel_activation(layer: ConvLayer) -> bool:
    """Return whether the convolution kernels apply the activation of this layer themselves."""
    return layer.activation.kind in (*ACTIVATIONS, *GATED)


def build_tcn(layer: TCNLayer, weights: Mapping[str, Tensor]) -> list[ConvBlock]:
    """Return the blocks of a `tcn` layer. Its weights are on their device already."""
    return [_tcn_level(layer, level, weights) for level in range(layer.levels)]


def build_text_cnn(layer: TextCNNLayer, weights: Mapping[str, Tensor]) -> TextCNN:
    """Return a `text_cnn` layer. Its weights are on their device already."""

    def of_width(width: int) -> ConvWeights:
        filters, bias = weights[f"{width}.filters"], weights[f"{width}.bias"]
        return ConvWeights(filters, bias, left=layer.padding, right=layer.padding, activation="relu")

    return TextCNN([of_width(width) for width in layer.widths])


def _tcn_level(layer: TCNLayer, level: int, weights: Mapping[str, Tensor]) -> ConvBlock:
    dilation = 2**level
    left = (layer.width - 1) * dilation

    def convolution(position: int) -> ConvWeights:
        name = f"{level}.{position}."
        return ConvWeights(_filters(weights, name), weights[f"{name}bias"], left, dilation=dilation, activation="relu")

    name = f"{level}.projection."
    projection = ConvWeights(weights[f"{name}filters"], weights[f"{name}bias"]) if f"{name}filters" in weights else None
    return ConvBlock((convolution(0), convolution(1)), residual=True, projection=projection, activation="relu")


def _filters(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the stored filters, or the filters of a stored direction and magnitude."""
    if f"{name}filters" in weights:
        return weights[f"{name}filters"]
    return fold_weight_norm(weights[f"{name}direction"], weights[f"{name}magnitude"])


def _ungrouped(filters: Tensor, groups: int) -> Tensor:
    """Return filters over all inputs, (width, inputs, maps), with zeros outside each group. filters: (width, inputs / groups, maps)."""
    if groups == 1:
        return filters
    width, inputs, maps = filters.shape
    whole = filters.new_zeros(width, groups, inputs, groups, maps // groups)
    for group, part in enumerate(filters.chunk(groups, dim=2)):
        whole[:, group, :, group] = part
    return whole.reshape(width, groups * inputs, maps)


def _with_first_layer(block: ConvBlock, layer: ConvWeights) -> ConvBlock:
    return replace(block, layers=(layer, *block.layers[1:]))


def _folded(weights: ConvWeights, table: Tensor) -> ConvWeights:
    # Stored in the dtype of the sum: converting every gathered row would cost more than the memory is worth.
    return replace(weights, tables=fold_taps(table, weights.filters, compute_dtype(table.dtype, table.device)))


def _folded_columns(weights: ConvWeights) -> int:
    width, _, maps = weights.filters.shape
    return width * maps
