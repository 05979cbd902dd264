"""Convolutional layers on a device, and their ways in from token ids.

Convolutions that follow each other are one stack, so that what runs them may keep the maps between them as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import conv as conv_kernel
from kernels.contract import ContractError, ConvBlock, ConvState, ConvWeights, Encoded, Outputs, Ragged, arithmetic
from kernels.conv.folding import fold_batch_norm, fold_weight_norm
from kernels.embedding import fold_taps, folded_bytes
from service.modeling.layer import EMBEDDED, FOLDED, Runs, embedded, once, tensors_of
from service.modeling.spec import ConvLayer, TCNLayer, TextCNNLayer


class Convolutions(Runs):
    """Blocks of convolutions, one after the other."""

    def __init__(self, blocks: Sequence[ConvBlock]) -> None:
        self._blocks = tuple(blocks)
        self._of_ids: ConvBlock | None = None
        """The first block as it takes ids, if it does."""
        self._embedding: Tensor | None = None

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        if self._of_ids is not None:
            return conv_kernel.stack(x, (self._of_ids, *self._blocks[1:]), want=want)
        return conv_kernel.stack(self._vectors(x), self._blocks, want=want)

    def chunk(self, x: Ragged, want: Outputs, states: Sequence[ConvState] | None) -> tuple[Encoded, list[ConvState]]:
        """Goes on from `states`, layer by layer; returns what comes out and the states after it.

        Of causal layers with stride 1, the chunks of a row give what the whole row gives. Raises ContractError where the ids go through
        tables.
        """
        if self.takes_ids == FOLDED:
            raise ContractError("tables keep no state: embed the ids as they are")
        x = self._vectors(x)
        before = self._beginning(x) if states is None else states
        encoded = conv_kernel.stack(x, self._blocks, before, want=want)
        return encoded, list(encoded.state)

    @property
    def streams(self) -> bool:
        # Tables keep no state, and which way of taking ids is the faster one is not known before both were tried.
        return self.takes_ids is None and all(one.keeps_steps and not one.right for one in self._layers())

    def slabs(self, places: int) -> list[ConvState]:
        return [ConvState(one.filters.new_zeros(places, one.left, one.filters.shape[1])) for one in self._layers()]

    def embed(self, table: Tensor) -> None:
        # What is added to what a block gives are vectors: they are looked up before it.
        first = self._blocks[0]
        self._of_ids = None if first.residual else _with_first(first, replace(first.layers[0], embedding=table))
        self._embedding, self.takes_ids = table, EMBEDDED

    def fold(self, table: Tensor) -> None:
        first = self._blocks[0]
        self._of_ids = _with_first(first, _folded(first.layers[0], table))
        self._embedding, self.takes_ids = None, FOLDED

    def folded_bytes(self, table: Tensor) -> int | None:
        first = self._blocks[0]
        return None if first.residual else _folded_bytes(first.layers[0], table)

    def backend(self) -> str:
        return conv_kernel.choice(conv_kernel.widest(self._layers())).backend.name

    def tensors(self) -> list[Tensor]:
        projections = [block.projection for block in self._blocks if block.projection is not None]
        of_ids = [] if self._of_ids is None else [self._of_ids.layers[0]]
        held = [tensor for weights in (*self._layers(), *projections, *of_ids) for tensor in tensors_of(weights)]
        return once(held if self._embedding is None else [*held, self._embedding])

    def _layers(self) -> list[ConvWeights]:
        return [layer for block in self._blocks for layer in block.layers]

    def _vectors(self, x: Ragged) -> Ragged:
        return x if self._embedding is None else embedded(x, self._embedding)

    def _beginning(self, x: Ragged) -> list[ConvState]:
        """Of rows that have not begun."""
        return [ConvState(torch.zeros(x.rows, one.left, one.filters.shape[1], device=x.data.device)) for one in self._layers()]


class TextCNN(Runs):
    """Convolutions of several widths over the same steps, each pooled by its maximum over time, side by side."""

    def __init__(self, layers: Sequence[ConvWeights]) -> None:
        self._layers = tuple(layers)
        self._of_ids: tuple[ConvWeights, ...] | None = None
        """The layers as they take ids, if they do."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return conv_kernel.text_cnn(x, self._of_ids or self._layers, self.linear)

    def embed(self, table: Tensor) -> None:
        self._of_ids = tuple(replace(layer, embedding=table) for layer in self._layers)
        self.takes_ids = EMBEDDED

    def fold(self, table: Tensor) -> None:
        self._of_ids = tuple(_folded(layer, table) for layer in self._layers)
        self.takes_ids = FOLDED

    def folded_bytes(self, table: Tensor) -> int:
        return sum(_folded_bytes(layer, table) for layer in self._layers)

    def backend(self) -> str:
        return conv_kernel.choice(conv_kernel.widest(self._layers)).backend.name

    def tensors(self) -> list[Tensor]:
        return once([tensor for layer in (*self._layers, *(self._of_ids or ())) for tensor in tensors_of(layer)])


def build_conv(layer: ConvLayer, held: Mapping[str, Tensor]) -> list[ConvBlock]:
    """The blocks of a layer, of its weights, which are on their device."""
    left, right = layer.sides
    filters, bias = _filters(held, ""), held["bias"]
    if layer.batch_norm:
        filters, bias = fold_batch_norm(filters, bias, held["norm"])
    return [ConvBlock((ConvWeights(filters, bias, left, right, layer.dilation, layer.stride, layer.activation),))]


def build_tcn(layer: TCNLayer, held: Mapping[str, Tensor]) -> list[ConvBlock]:
    """The blocks of a layer, of its weights, which are on their device."""
    return [_tcn_level(layer, level, held) for level in range(layer.levels)]


def build_text_cnn(layer: TextCNNLayer, held: Mapping[str, Tensor]) -> TextCNN:
    """The layer of its weights, which are on their device."""

    def of_width(width: int) -> ConvWeights:
        filters, bias = held[f"{width}.filters"], held[f"{width}.bias"]
        return ConvWeights(filters, bias, left=layer.padding, right=layer.padding, activation="relu")

    return TextCNN([of_width(width) for width in layer.widths])


def _tcn_level(layer: TCNLayer, level: int, held: Mapping[str, Tensor]) -> ConvBlock:
    dilation = 2**level
    left = (layer.width - 1) * dilation

    def convolution(place: int) -> ConvWeights:
        name = f"{level}.{place}."
        return ConvWeights(_filters(held, name), held[f"{name}bias"], left, dilation=dilation, activation="relu")

    name = f"{level}.projection."
    projection = ConvWeights(held[f"{name}filters"], held[f"{name}bias"]) if f"{name}filters" in held else None
    return ConvBlock((convolution(0), convolution(1)), residual=True, projection=projection, activation="relu")


def _filters(held: Mapping[str, Tensor], name: str) -> Tensor:
    """As they are, or of their direction and magnitude."""
    if f"{name}filters" in held:
        return held[f"{name}filters"]
    return fold_weight_norm(held[f"{name}direction"], held[f"{name}magnitude"])


def _with_first(block: ConvBlock, layer: ConvWeights) -> ConvBlock:
    return replace(block, layers=(layer, *block.layers[1:]))


def _folded(weights: ConvWeights, table: Tensor) -> ConvWeights:
    # Held as it is added up: widening every row that is gathered would cost more than the memory is worth.
    return replace(weights, tables=fold_taps(table, weights.filters, arithmetic(table.dtype, table.device)))


def _folded_bytes(weights: ConvWeights, table: Tensor) -> int:
    width, _, maps = weights.filters.shape
    return folded_bytes(table, maps, taps=width, dtype=arithmetic(table.dtype, table.device))
