"""Stacks of convolutions and text CNNs with random weights, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import AUTO
from kernels.conv import stack, text_cnn
from kernels.conv.types import ConvBlock, ConvState, ConvWeights
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels.families import MAKERS, VOCABULARY, whole
from tests.kernels.inputs import EVERYTHING, map_arrays, ragged

Change = Callable[[Tensor], Tensor]


class Stack(NamedTuple):
    """The arguments of a call of `stack`."""

    x: Ragged
    blocks: tuple[ConvBlock, ...]
    states: tuple[ConvState, ...] | None

    def run(self, *, want: Outputs = EVERYTHING, backend: str = AUTO) -> Encoded:
        return stack(*self, want=want, backend=backend)

    def map_arrays(self, change: Change) -> Stack:
        states = None if self.states is None else tuple(map_arrays(state, change) for state in self.states)
        return Stack(map_arrays(self.x, change), tuple(block_mapped(block, change) for block in self.blocks), states)

    def exact(self, want: Outputs = EVERYTHING) -> Encoded:
        """Return the result of the reference in float64."""
        wide = self.map_arrays(lambda array: array.double() if array.is_floating_point() else array)
        return wide.run(want=want, backend="reference")

    @property
    def layers(self) -> list[ConvWeights]:
        return [layer for block in self.blocks for layer in block.layers]


class TextCNN(NamedTuple):
    """The arguments of a call of `text_cnn`."""

    x: Ragged
    layers: tuple[ConvWeights, ...]
    classifier: tuple[Tensor, Tensor] | None

    def run(self, *, backend: str = AUTO) -> Encoded:
        return text_cnn(*self, backend=backend)

    def map_arrays(self, change: Change) -> TextCNN:
        """Change every array. An embedding that all layers share stays shared."""
        made: dict[int, Tensor] = {}

        def once(array: Tensor) -> Tensor:
            return made.setdefault(id(array), change(array))

        layers = tuple(map_arrays(layer, once) for layer in self.layers)
        classifier = None if self.classifier is None else (once(self.classifier[0]), once(self.classifier[1]))
        return TextCNN(map_arrays(self.x, once), layers, classifier)

    def exact(self) -> Encoded:
        """Return the result of the reference in float64."""
        wide = self.map_arrays(lambda array: array.double() if array.is_floating_point() else array)
        return wide.run(backend="reference")


class Maker:
    """Makes weights from a seed; the inputs of a layer are the outputs of the layer made before it."""

    def __init__(self, inputs: int, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._inputs = self.columns = inputs

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def layer(self, outputs: int, width: int = 2, *, ids: str = "", **others: Any) -> ConvWeights:
        """Return a convolution over the outputs of the previous layer. ids: "", "embedding" or "tables"."""
        made: ConvWeights = MAKERS["conv"](self.normal, 0, outputs, self.columns, width=width, ids=ids, **others)[0]
        self.columns = outputs
        return made

    def causal(self, outputs: int, width: int = 2, *, dilation: int = 1, **others: Any) -> ConvWeights:
        return self.layer(outputs, width, left=(width - 1) * dilation, dilation=dilation, **others)

    def tcn(self, channels: Sequence[int], width: int = 2) -> tuple[ConvBlock, ...]:
        """Return the blocks of Bai et al. 2018, one level per number of channels."""
        return tuple(self._level(number, outputs, width) for number, outputs in enumerate(channels))

    def stack(self, lengths: Sequence[int], *blocks: ConvBlock, with_states: bool = False) -> Stack:
        """Return rows for blocks that this Maker has made, and states if `with_states`."""
        layers = [layer for block in blocks for layer in block.layers]
        states = tuple(ConvState(self.normal(len(lengths), one.left, one.filters.shape[1])) for one in layers)
        return Stack(self._rows(lengths, layers[0].takes_ids), blocks, states if with_states else None)

    def text_cnn(
        self,
        lengths: Sequence[int],
        widths: Sequence[int],
        outputs: Sequence[int],
        *,
        ids: str = "",
        labels: int = 0,
        **others: Any,
    ) -> TextCNN:
        """Return rows, a layer of each width, and a classifier if there are labels."""
        columns, layers = self._inputs, []
        for width, number in zip(widths, outputs, strict=True):
            self.columns = columns
            layers.append(self.layer(number, width, ids=ids, activation="relu", **others))
        if ids == "embedding":
            layers = [replace(layer, embedding=layers[0].embedding) for layer in layers]
        classifier = (self.normal(sum(outputs), labels), self.normal(labels)) if labels else None
        return TextCNN(self._rows(lengths, bool(ids)), tuple(layers), classifier)

    def _rows(self, lengths: Sequence[int], ids: bool) -> Ragged:
        if ids:
            return ragged(whole(self.normal, sum(lengths), below=VOCABULARY).int(), lengths)
        return ragged(self.normal(sum(lengths), self._inputs), lengths)

    def _level(self, number: int, outputs: int, width: int) -> ConvBlock:
        inputs = self.columns
        layers = tuple(self.causal(outputs, width, dilation=2**number, activation="relu") for _ in range(2))
        projection = None
        if inputs != outputs:
            projection = ConvWeights(self.normal(1, inputs, outputs) * inputs**-0.5, self.normal(outputs))
        return ConvBlock(layers, residual=True, projection=projection, activation="relu")


def block_mapped(block: ConvBlock, change: Change) -> ConvBlock:
    layers = tuple(map_arrays(layer, change) for layer in block.layers)
    projection = None if block.projection is None else map_arrays(block.projection, change)
    return replace(block, layers=layers, projection=projection)
