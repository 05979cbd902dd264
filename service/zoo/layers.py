"""Layers on a device: depth and directions composed around the kernels, and the embedding in front of the first of them.

The first layer of a model over tokens takes ids. It embeds them as they are, or gathers from tables into which the embedding and
the layer's first product were folded at load; both give the same within rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kernels import conv as conv_kernel
from kernels import gru as gru_kernel
from kernels import lstm as lstm_kernel
from kernels import qrnn as qrnn_kernel
from kernels import sru as sru_kernel
from kernels.contract import (
    ConvWeights,
    Encoded,
    GRUWeights,
    LSTMWeights,
    Outputs,
    QRNNWeights,
    Ragged,
    SRUWeights,
    arithmetic,
    reversal,
)
from kernels.embedding import embed, embed_taps, fold, fold_taps, folded_bytes
from service.zoo.spec import ConvLayer, GRULayer, Layer, LSTMLayer, QRNNLayer, RecurrentLayer, SRULayer, TextCNNLayer

Arrays = Mapping[str, Tensor]
Gather = Callable[[Ragged], Ragged]
"""From rows of ids to what a kernel takes."""


class Runs(ABC):
    """One layer of a model. `takes_ids` says how the first layer of a model over tokens makes use of the embedding."""

    takes_ids: str | None = None

    @abstractmethod
    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        """x.data: the layer below's steps, the features, or, in a first layer over tokens, (tokens,) ids."""

    @abstractmethod
    def embed(self, table: Tensor) -> None:
        """Take ids from now on, embedded as they are."""

    @abstractmethod
    def fold(self, table: Tensor) -> None:
        """Take ids from now on, through tables of embedding and first product."""

    @abstractmethod
    def folded_bytes(self, table: Tensor) -> int:
        """Bytes of those tables, known before they are made."""

    @abstractmethod
    def backend(self) -> str:
        """Name of the kernel backend that runs this layer."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What it holds on the device."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a stack has to know of a recurrent kernel. `fold` gives the gather of one direction, `rest` the weights that remain."""

    run: Callable[..., Encoded]
    choice: Callable[..., Any]
    fold: Callable[[Any, Tensor], tuple[Gather, list[Tensor]]]
    rest: Callable[[Any], Any]
    columns: Callable[[Any], int]


class Stack(Runs):
    """`depth` levels of a recurrent layer, each in one or two directions; a level's directions are joined as [forward | backward]."""

    def __init__(self, family: Family, levels: list[list[Any]]) -> None:
        self._family = family
        self._levels = levels
        self._gathers: list[Gather] = []
        self._tables: list[Tensor] = []

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return self.chunk(x, want, None)[0]

    def chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Goes on from `states`, which go level by level, forward first; returns what comes out and the states after it."""
        left = iter(states) if states is not None else None
        after: list[Any] = []
        for level in self._levels:
            wanted = want if level is self._levels[-1] else Outputs(steps=True)
            gathers = self._gathers if level is self._levels[0] else []
            parts = [
                self._directed(x, weights, wanted, backward, gathers, next(left) if left else None)
                for backward, weights in enumerate(level)
            ]
            after += [part.state for part in parts]
            joined = _side_by_side(parts)
            if joined.steps is not None:
                x = Ragged(joined.steps, x.offsets)
        return joined, after

    def embed(self, table: Tensor) -> None:
        dtype = arithmetic(table.dtype, table.device)
        self._gathers = [lambda ids: Ragged(embed(ids.data, table, dtype), ids.offsets)] * len(self._levels[0])
        self._tables, self.takes_ids = [table], "embedding and product"

    def fold(self, table: Tensor) -> None:
        folded = [self._family.fold(weights, table) for weights in self._levels[0]]
        self._gathers = [gather for gather, _ in folded]
        self._tables, self.takes_ids = [table for _, tables in folded for table in tables], "folded table"

    def folded_bytes(self, table: Tensor) -> int:
        return sum(folded_bytes(table, self._family.columns(weights)) for weights in self._levels[0])

    def backend(self) -> str:
        name: str = self._family.choice(self._levels[0][0]).backend.name
        return name

    def tensors(self) -> list[Tensor]:
        return [tensor for level in self._levels for weights in level for tensor in _tensors(weights)] + self._tables

    def _directed(
        self, x: Ragged, weights: Any, want: Outputs, backward: int, gathers: Sequence[Gather], state: Any
    ) -> Encoded:
        rows = x.reversed() if backward else x
        if gathers:
            rows = gathers[backward](rows)
            weights = self._family.rest(weights) if self.takes_ids == "folded table" else weights
        encoded = self._family.run(rows, weights, state, want=want)
        if not backward or encoded.steps is None:
            return encoded
        return replace(encoded, steps=encoded.steps.index_select(0, reversal(x.offsets)))


class Conv(Runs):
    """One convolution over time."""

    def __init__(self, weights: ConvWeights) -> None:
        self._weights = weights
        self._table: Tensor | None = None

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        if self._table is None:
            return conv_kernel.conv(x, self._weights, want=want)
        if self.takes_ids == "folded table":
            return conv_kernel.conv_of_ids(x, self._table, self._weights, want=want)
        dtype = arithmetic(self._table.dtype, self._table.device)
        return conv_kernel.conv(Ragged(embed(x.data, self._table, dtype), x.offsets), self._weights, want=want)

    def embed(self, table: Tensor) -> None:
        self._table, self.takes_ids = table, "embedding and product"

    def fold(self, table: Tensor) -> None:
        self._table, self.takes_ids = fold_taps(table, self._weights.filters), "folded table"

    def folded_bytes(self, table: Tensor) -> int:
        return folded_bytes(table, self._weights.filters.shape[0] * self._weights.outputs)

    def backend(self) -> str:
        return conv_kernel.choice(self._weights).backend.name

    def tensors(self) -> list[Tensor]:
        return _tensors(self._weights) + ([] if self._table is None else [self._table])


class TextCNN(Runs):
    """Convolutions of several widths over the same steps, each pooled by its maximum over time, side by side."""

    def __init__(self, convolutions: Sequence[Conv]) -> None:
        self._convolutions = convolutions

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return _side_by_side([convolution(x, Outputs(max=True)) for convolution in self._convolutions])

    def embed(self, table: Tensor) -> None:
        self._each(lambda convolution: convolution.embed(table))

    def fold(self, table: Tensor) -> None:
        self._each(lambda convolution: convolution.fold(table))

    def folded_bytes(self, table: Tensor) -> int:
        return sum(convolution.folded_bytes(table) for convolution in self._convolutions)

    def backend(self) -> str:
        return self._convolutions[0].backend()

    def tensors(self) -> list[Tensor]:
        # Convolutions that embed share the embedding, which is held once.
        held = {id(tensor): tensor for convolution in self._convolutions for tensor in convolution.tensors()}
        return list(held.values())

    def _each(self, do: Callable[[Conv], None]) -> None:
        for convolution in self._convolutions:
            do(convolution)
        self.takes_ids = self._convolutions[0].takes_ids


def build(layer: Layer, inputs: int, arrays: Arrays, device: torch.device) -> Runs:
    """The layer with its weights on `device`; `inputs` is the width of what comes in, `arrays` are the layer's own."""
    held = {name: array.to(device, arithmetic(array.dtype, device)) for name, array in arrays.items()}
    if isinstance(layer, RecurrentLayer):
        return _stack(layer, inputs, held)
    if isinstance(layer, ConvLayer):
        left, right = layer.sides
        shape = {"left": left, "right": right, "dilation": layer.dilation, "stride": layer.stride}
        return Conv(ConvWeights(held["filters"], held["bias"], **shape, activation=layer.activation))
    assert isinstance(layer, TextCNNLayer), f"a layer of kind {layer.kind} is built by the encoder"
    return TextCNN(
        [
            Conv(ConvWeights(held[f"{width}.filters"], held[f"{width}.bias"], layer.padding, layer.padding, activation="relu"))
            for width in layer.widths
        ]
    )


def _stack(layer: RecurrentLayer, inputs: int, held: Arrays) -> Stack:
    levels = []
    for level in range(layer.depth):
        levels.append(
            [
                _weights(layer, inputs, backward, {name: held[f"{level}.{direction}.{name}"] for name in layer.weights(inputs)})
                for backward, direction in enumerate(layer.directions)
            ]
        )
        inputs = layer.outputs
    return Stack(FAMILIES[type(layer)], levels)


def _weights(layer: RecurrentLayer, inputs: int, backward: int, arrays: Arrays) -> Any:
    """One level in one direction, as the kernel of its family takes it."""
    if isinstance(layer, LSTMLayer):
        return LSTMWeights(arrays["input"], arrays["recurrent"], arrays["bias"])
    if isinstance(layer, GRULayer):
        return GRUWeights(arrays["input"], arrays["recurrent"], arrays["bias"], arrays.get("recurrent_bias"))
    if isinstance(layer, QRNNLayer):
        return QRNNWeights(arrays["input"], arrays["bias"], layer.pooling)
    assert isinstance(layer, SRULayer)
    own_columns = backward * layer.hidden if layer.skip and layer.blocks(inputs) == 3 else None
    return SRUWeights(
        arrays["input"],
        arrays["bias"],
        arrays.get("cell"),
        arrays.get("projection"),
        skip_from=own_columns,
        scale=layer.scale,
        tanh=layer.activation == "tanh",
    )


def _fold_gates(weights: LSTMWeights | GRUWeights, table: Tensor) -> tuple[Gather, list[Tensor]]:
    assert weights.input is not None
    return _gather(fold(table, weights.input, weights.bias))


def _fold_sru(weights: SRUWeights, table: Tensor) -> tuple[Gather, list[Tensor]]:
    """A skip that is the input itself becomes a block of the table."""
    assert weights.input is not None
    product = weights.input if weights.projection is None else weights.projection.float() @ weights.input.float()
    blocks = fold(table, product)
    if weights.skip_from is not None:
        own = table[:, weights.skip_from : weights.skip_from + weights.hidden].float() * weights.scale
        blocks = torch.cat((blocks, own.to(blocks.dtype)), dim=1)
    return _gather(blocks)


def _fold_qrnn(weights: QRNNWeights, table: Tensor) -> tuple[Gather, list[Tensor]]:
    assert weights.input is not None
    tables = fold_taps(table, weights.input.flip(0))  # tap 0 of the window is the present step, tap 0 of a filter the earliest
    left = weights.window - 1
    return lambda ids: Ragged(embed_taps(ids, tables, left=left), ids.offsets), [tables]


def _gather(table: Tensor) -> tuple[Gather, list[Tensor]]:
    return lambda ids: Ragged(embed(ids.data, table, torch.float32), ids.offsets), [table]


def _sru_columns(weights: SRUWeights) -> int:
    assert weights.input is not None
    return weights.input.shape[1] + (0 if weights.skip_from is None else weights.hidden)


FAMILIES: dict[type[RecurrentLayer], Family] = {
    LSTMLayer: Family(
        lstm_kernel.lstm,
        lstm_kernel.choice,
        _fold_gates,
        lambda weights: replace(weights, input=None, bias=None),
        lambda weights: int(weights.input.shape[1]),
    ),
    GRULayer: Family(
        gru_kernel.gru,
        gru_kernel.choice,
        _fold_gates,
        lambda weights: replace(weights, input=None, bias=None),
        lambda weights: int(weights.input.shape[1]),
    ),
    SRULayer: Family(
        sru_kernel.sru,
        sru_kernel.choice,
        _fold_sru,
        lambda weights: replace(weights, input=None, projection=None, skip_from=None),
        _sru_columns,
    ),
    QRNNLayer: Family(
        qrnn_kernel.qrnn,
        qrnn_kernel.choice,
        _fold_qrnn,
        lambda weights: replace(weights, input=None),
        lambda weights: int(weights.input.shape[0] * weights.input.shape[2]),
    ),
}


def _side_by_side(parts: Sequence[Encoded]) -> Encoded:
    """Outputs of the same rows, joined along their width; the state is the first part's."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor | None:
        given = [getattr(part, name) for part in parts]
        return None if given[0] is None else torch.cat(given, dim=1)

    return Encoded(parts[0].state, *(joined(name) for name in ("steps", "last", "mean", "max")))


def _tensors(weights: Any) -> list[Tensor]:
    values = (getattr(weights, field.name) for field in fields(weights))
    return [value for value in values if isinstance(value, Tensor)]
