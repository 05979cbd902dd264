"""Convolutional layers on a device, and their ways in from token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kernels import conv as conv_kernel
from kernels.contract import ConvWeights, Encoded, Outputs, Ragged, arithmetic
from kernels.directions import side_by_side
from kernels.embedding import embed, fold_taps, folded_bytes
from service.zoo.layer import EMBEDDED, FOLDED, Runs, once, tensors_of
from service.zoo.spec import ConvLayer, TextCNNLayer


class Conv(Runs):
    """One convolution over time."""

    def __init__(self, weights: ConvWeights) -> None:
        self._weights = weights
        self._table: Tensor | None = None

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        if self._table is None:
            return conv_kernel.conv(x, self._weights, want=want)
        if self.takes_ids == FOLDED:
            return conv_kernel.conv_of_ids(x, self._table, self._weights, want=want)
        dtype = arithmetic(self._table.dtype, self._table.device)
        return conv_kernel.conv(Ragged(embed(x.data, self._table, dtype), x.offsets), self._weights, want=want)

    def embed(self, table: Tensor) -> None:
        self._table, self.takes_ids = table, EMBEDDED

    def fold(self, table: Tensor) -> None:
        # Held as it is added up: widening every row that is gathered would cost more than the memory is worth.
        tables = fold_taps(table, self._weights.filters).to(arithmetic(table.dtype, table.device))
        self._table, self.takes_ids = tables, FOLDED

    def folded_bytes(self, table: Tensor) -> int:
        held_as = arithmetic(table.dtype, table.device)
        return folded_bytes(table, self._weights.outputs, taps=self._weights.filters.shape[0], dtype=held_as)

    def backend(self) -> str:
        return conv_kernel.choice(self._weights).backend.name

    def tensors(self) -> list[Tensor]:
        return tensors_of(self._weights) + ([] if self._table is None else [self._table])


class TextCNN(Runs):
    """Convolutions of several widths over the same steps, each pooled by its maximum over time, side by side."""

    def __init__(self, convolutions: Sequence[Conv]) -> None:
        self._convolutions = convolutions

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        pooled = side_by_side([convolution(x, Outputs(max=True)) for convolution in self._convolutions])
        return replace(pooled, offsets=None)

    def embed(self, table: Tensor) -> None:
        self._each(lambda convolution: convolution.embed(table))

    def fold(self, table: Tensor) -> None:
        self._each(lambda convolution: convolution.fold(table))

    def folded_bytes(self, table: Tensor) -> int:
        return sum(convolution.folded_bytes(table) for convolution in self._convolutions)

    def backend(self) -> str:
        return self._convolutions[0].backend()

    def tensors(self) -> list[Tensor]:
        return once([tensor for convolution in self._convolutions for tensor in convolution.tensors()])

    def _each(self, do: Callable[[Conv], None]) -> None:
        for convolution in self._convolutions:
            do(convolution)
        self.takes_ids = self._convolutions[0].takes_ids


def build_conv(layer: ConvLayer, held: Mapping[str, Tensor]) -> Conv:
    """The layer of its weights, which are on their device."""
    left, right = layer.sides
    return Conv(ConvWeights(held["filters"], held["bias"], left, right, layer.dilation, layer.stride, layer.activation))


def build_text_cnn(layer: TextCNNLayer, held: Mapping[str, Tensor]) -> TextCNN:
    """The layer of its weights, which are on their device."""

    def of_width(width: int) -> Conv:
        filters, bias = held[f"{width}.filters"], held[f"{width}.bias"]
        return Conv(ConvWeights(filters, bias, left=layer.padding, right=layer.padding, activation="relu"))

    return TextCNN([of_width(width) for width in layer.widths])
