"""Weights, blocks and states of convolutions, and the checks of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels.activations import FUNCTIONS
from kernels.ragged import (
    ContractError,
    Ragged,
    RowState,
    Sizes,
    check_absent,
    check_data,
    check_shape,
    count_windows,
    state_entries,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {kind: FUNCTIONS[kind] for kind in ("none", "relu", "tanh", "gelu")}

GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "glu": lambda value, gate: value * gate.sigmoid(),
    "gated_tanh": lambda value, gate: value.tanh() * gate.sigmoid(),
}
"""Functions of a value and its gate (Dauphin et al. 2017; van den Oord et al. 2016)."""


@dataclass(frozen=True)
class ConvWeights:
    """One 1-D convolution over time: y[t] = activation(sum over k of x[t x stride - left + k x dilation] @ filters[k] + bias).

    filters: (width, inputs, maps), the earliest step first; bias: (maps,); left, right: zero steps before and after each row. A gated
    activation has two maps per output: the values, then their gates. Values must not change once a kernel has packed them. A row of n
    steps has (n + left + right - reach) // stride + 1 output steps, but at least 0, where reach = (width - 1) x dilation + 1.

    embedding: (vocabulary, inputs), or None. With an embedding, the data are ids, (tokens,) int32 or int64, and the convolution runs over
    their vectors. tables: (width, 1 + vocabulary, maps) from `kernels.embedding.fold_taps`, or None. With tables, the data are ids, the
    convolution is a sum of table rows over the window, and only the shape of `filters` matters. Id n is row `kernels.embedding.FIRST` + n;
    the row before FIRST is zero and stands for padding.
    """

    filters: Tensor
    bias: Tensor
    left: int = 0
    right: int = 0
    dilation: int = 1
    stride: int = 1
    activation: str = "none"
    embedding: Tensor | None = None
    tables: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Width, inputs and maps of the filters. Cached, because reading a tensor's shape takes longer."""
        width, inputs, maps = self.filters.shape
        return width, inputs, maps

    @cached_property
    def outputs(self) -> int:
        return self.filters.shape[2] // (2 if self.activation in GATED else 1)

    @cached_property
    def reach(self) -> int:
        return (self.filters.shape[0] - 1) * self.dilation + 1

    @cached_property
    def keeps_steps(self) -> bool:
        """Whether a row has one output step for every input step."""
        return self.stride == 1 and self.left + self.right == self.reach - 1

    @property
    def takes_ids(self) -> bool:
        return self.embedding is not None or self.tables is not None

    @cached_property
    def columns(self) -> int | None:
        """Columns of the data, or None if the data are ids. Checks the shapes of the weights once; raises ContractError if they do not
        fit together."""
        check_shape("weights.filters", self.filters, (None, None, None))
        width, inputs, maps = self.filters.shape
        check_shape("weights.bias", self.bias, (maps,))
        if width < 1 or self.dilation < 1 or self.stride < 1 or self.left < 0 or self.right < 0:
            raise ContractError("width, dilation and stride must be at least 1, left and right at least 0")
        if self.activation not in ACTIVATIONS and self.activation not in GATED:
            raise ContractError(
                f"weights.activation is {self.activation!r}, expected one of {', '.join((*ACTIVATIONS, *GATED))}"
            )
        if self.activation in GATED and maps % 2:
            raise ContractError(
                f"weights.filters has {maps} maps, expected an even number for {self.activation!r}: values, then gates"
            )
        if self.tables is not None:
            check_absent(self, ("embedding",), "weights.tables has a value")
            check_shape("weights.tables", self.tables, (width, None, maps))
            if not self.tables.shape[1]:
                raise ContractError("weights.tables has no rows, expected at least the row of padding")
        if self.embedding is not None:
            check_shape("weights.embedding", self.embedding, (None, inputs))
        return None if self.takes_ids else inputs

    @cached_property
    def packed(self) -> dict[Any, Any]:
        """The weights in the layouts that kernels read, by layout. Each is packed once."""
        return {}

    def activated(self, maps: Tensor) -> Tensor:
        """Return (..., outputs) of (..., maps)."""
        if self.activation in GATED:
            return GATED[self.activation](*maps.chunk(2, dim=-1))
        return ACTIVATIONS[self.activation](maps)

    def steps(self, steps: Sizes) -> Sizes:
        """Return the number of output steps of rows with `steps` input steps, on the host."""
        return count_windows(steps + self.left + self.right, self.reach, self.stride)


@dataclass(frozen=True, slots=True)
class ConvState(RowState):
    """The steps before the next chunk of each row. left: (rows, left, inputs), oldest first; it replaces the zeros on the left.

    Slots and sources as in `kernels.ragged.RowState`: with slots, left is a state cache, (slots, left, inputs).
    """

    left: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """A sequence of convolutions with an optional residual connection around it.

    With `residual`, y = activation(convolved + x), or with a projection (a convolution of width 1), y = activation(convolved +
    projection(x)). activation: a key of ACTIVATIONS; "none" without a residual.
    """

    layers: tuple[ConvWeights, ...]
    residual: bool = False
    projection: ConvWeights | None = None
    activation: str = "none"

    @property
    def outputs(self) -> int:
        return self.layers[-1].outputs


def check_conv(x: Ragged, weights: ConvWeights, state: ConvState | None) -> None:
    """Check the arguments of `conv`; raises ContractError if a shape does not fit."""
    check_data(x, weights.columns)
    if state is not None:
        _check_conv_state("state", x, weights, state)


def check_conv_stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None) -> None:
    """Check the arguments of `stack`; raises ContractError if consecutive layers or the states do not fit together."""
    if not blocks or not all(block.layers for block in blocks):
        raise ContractError("blocks is empty, or has a block without layers: a stack needs at least one layer in every block")
    check_conv(x, blocks[0].layers[0], None)
    columns = blocks[0].layers[0].columns
    for number, block in enumerate(blocks):
        columns = _check_conv_block(f"blocks[{number}]", block, columns, first=number == 0)
    if states is None:
        return
    layers = [layer for block in blocks for layer in block.layers]
    if len(states) != len(layers):
        raise ContractError(f"states has {len(states)} entries, expected {len(layers)}: one per layer")
    for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
        _check_conv_state(f"states[{number}]", x, layer, state)


def check_text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> None:
    """Check the arguments of `text_cnn`; raises ContractError unless all layers read the same data and fit the classifier."""
    if not layers:
        raise ContractError("layers is empty: a text CNN needs at least one layer")
    first = layers[0]
    for number, layer in enumerate(layers):
        if number == 0 or layer.columns != first.columns:  # the data are checked once
            check_conv(x, layer, None)
        if layer.embedding is not first.embedding or (layer.tables is None) != (first.tables is None):
            raise ContractError(
                f"layers[{number}] and layers[0] differ in how they take ids: share one embedding, or give every layer tables"
            )
    if classifier is not None:
        weight, bias = classifier
        check_shape("classifier[0]", weight, (sum(layer.outputs for layer in layers), None))
        check_shape("classifier[1]", bias, (weight.shape[1],))


def _check_conv_block(name: str, block: ConvBlock, columns: int | None, *, first: bool) -> int:
    """Return the output columns of a block. columns: its input columns, or None for ids."""
    inputs = columns
    for number, layer in enumerate(block.layers):
        expected = layer.columns
        if expected is None and not (first and number == 0):
            raise ContractError(f"{name}.layers[{number}] takes ids, which only the first layer of a stack can do")
        if expected != inputs:
            raise ContractError(f"{name}.layers[{number}] takes {expected} columns and its input has {inputs}")
        inputs = layer.outputs
    if block.residual:
        _check_residual(name, block, columns)
    elif block.projection is not None or block.activation != "none":
        raise ContractError(f"{name} has a projection or an activation but residual is False: set residual")
    return block.outputs


def _check_residual(name: str, block: ConvBlock, columns: int | None) -> None:
    """Check the residual connection of a block. columns: its input columns, or None for ids."""
    if columns is None:
        raise ContractError(f"{name} has a residual and the data are ids: ids cannot be added, embed them before the stack")
    if block.activation not in ACTIVATIONS:
        raise ContractError(f"{name}.activation is {block.activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    for number, layer in enumerate(block.layers):
        if not layer.keeps_steps:
            raise ContractError(
                f"{name} has a residual and layers[{number}] does not keep the steps: use stride 1 and left + right = reach - 1"
            )
    projection = block.projection
    if projection is None:
        if block.outputs != columns:
            raise ContractError(f"{name} adds {columns} columns to {block.outputs}: add a projection")
        return
    shape = projection.columns, projection.outputs
    if shape != (columns, block.outputs):
        raise ContractError(f"{name}.projection maps {shape[0]} to {shape[1]} columns, expected {columns} to {block.outputs}")
    if projection.filters.shape[0] != 1 or not projection.keeps_steps or projection.activation != "none":
        raise ContractError(f"{name}.projection must have width 1 and no padding, stride or activation")


def _check_conv_state(name: str, x: Ragged, weights: ConvWeights, state: ConvState) -> None:
    columns = weights.columns
    if columns is None:
        raise ContractError(f"{name} must be None because the data are ids: a convolution over ids keeps no state")
    check_shape(f"{name}.left", state.left, (state_entries(x, state, name), weights.left, columns))
