"""What every kernel family takes and gives: layouts, gate order and dtypes, said once.

Row vectors throughout, ``y = x @ W + b``. A batch is ragged: its sequences lie end to end and nothing is padded. Nothing here
computes; the checks raise ContractError before a kernel reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sizes = NDArray[np.int64]
"""Steps, lengths and places on the host, where small arrays are cheap."""

GATES = ("input", "forget", "cell", "output")
"""Order of the LSTM's gate blocks along every axis of 4 x hidden."""

STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ContractError(ValueError):
    """An argument is not what a kernel asks for; the message names it, what it is and what it should be."""


def arithmetic(storage: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of products. On a CPU, float16 and bfloat16 are for storage only. Cells and sums are float32 everywhere."""
    return torch.float32 if device.type == "cpu" else storage


@dataclass(frozen=True)
class Ragged:
    """Sequences laid end to end.

    data: (tokens, ...); offsets: (rows + 1,) int32 or int64 on data's device, from 0 to tokens, never falling. On a GPU, where nobody
    looks at them, they may end before the data: the tokens after all rows belong to none, and what comes out for them means nothing.
    """

    data: Tensor
    offsets: Tensor

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def lengths(self) -> Sizes:
        """(rows,) steps of each row, on the host; on a GPU the first look waits for the device."""
        return np.diff(self.offsets.cpu().numpy()).astype(np.int64)

    def reversed(self) -> Ragged:
        """Every row back to front."""
        return Ragged(self.data.index_select(0, reversal(self.offsets, len(self.data))), self.offsets)


@dataclass(frozen=True)
class LSTMWeights:
    """One layer in one direction; gate blocks in the order of GATES. Values do not change once a kernel has seen them.

    input: (inputs, 4 x hidden), or None when the data already are gate inputs, that is ``x @ input + bias``;
    recurrent: (hidden, 4 x hidden); bias: (4 x hidden,), or None with input.
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]

    @cached_property
    def columns(self) -> int:
        """Of the data; looks at the shapes above once, and raises ContractError unless they hold together."""
        return _columns(self, 4)

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """The recurrent weights as kernels want them, by whatever tells one layout from another; made once and kept."""
        return {}


@dataclass(frozen=True, slots=True)
class LSTMState:
    """hidden, cell: (rows, hidden) float32, what the next chunk of each row goes on from.

    With slots, (rows,) int32 or int64, they are slabs, (places, hidden): row r goes on from place sources[r], (rows,) of either dtype
    too, and its new state is written to place slots[r]. Without sources, which the state that comes out never has, both are slots[r].
    No row goes on from a place that another row writes; but several may go on from one place, and several may write to one, which then
    holds values of any of them. Without slots, the new state is another array.
    """

    hidden: Tensor
    cell: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> LSTMState:
        """Without slots: what the rows go on from, copied out of its places, or itself where it has none."""
        places = origins(self)
        return self if places is None else LSTMState(self.hidden[places], self.cell[places])


@dataclass(frozen=True, slots=True)
class GRUWeights:
    """One layer in one direction; gate blocks reset, update, new.

    input: (inputs, 3 x hidden), or None when the data already are gate inputs; recurrent: (hidden, 3 x hidden);
    bias: (3 x hidden,), or None with input; recurrent_bias: (hidden,) of the new gate, inside the reset ("reset after", as in
    cuDNN and PyTorch), or None for a reset before the product (Cho et al. 2014).
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None
    recurrent_bias: Tensor | None

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]


@dataclass(frozen=True, slots=True)
class GRUState:
    """hidden: (rows, hidden) float32; slots and sources as in LSTMState: with them, hidden is a slab, (places, hidden)."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> GRUState:
        """Without slots: what the rows go on from, copied out of its places, or itself where it has none."""
        places = origins(self)
        return self if places is None else GRUState(self.hidden[places])


@dataclass(frozen=True)
class SRUWeights:
    """One layer in one direction; blocks candidate, forget, reset and, where there is one, skip. Values do not change once a kernel
    has seen them.

    input: (inputs, 3 x hidden or 4 x hidden), or None when the data already are the product with it; projection: (columns, inputs)
    that stands before it, or None; bias: (2 x hidden,) forget and reset; cell: (2 x hidden,) by which the old cell enters both
    gates, or None (version 1). Without a skip block, the skip is the data's own columns from `skip_from` on times `scale`, or
    nothing when `skip_from` is None.

    table: (vocabulary, 3 x hidden or 4 x hidden), or None: the data are ids, (tokens,) int32 or int64, whose rows of it are the
    blocks, and input, projection, skip_from and norm are None. norm: (2, columns) gain and offset of a layer norm of the data, as
    torch.nn.LayerNorm computes it, before projection and product but not before the data's own columns, or None.
    """

    input: Tensor | None
    bias: Tensor
    cell: Tensor | None
    projection: Tensor | None = None
    skip_from: int | None = None
    scale: float = 1.0
    tanh: bool = False
    table: Tensor | None = None
    norm: Tensor | None = None

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // 2

    @cached_property
    def columns(self) -> int | None:
        """Of the data; None where they are ids or blocks. Looks at the shapes above once, and raises ContractError unless they hold
        together."""
        return _sru_columns(self)

    @cached_property
    def form(self) -> dict[str, Any]:
        """What both directions of a layer have in common; their own columns begin in different places."""
        return _form(self) | {"skip_from": self.skip_from is not None}

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """The weights as kernels want them, by whatever tells one layout from another; made once and kept."""
        return {}


@dataclass(frozen=True, slots=True)
class SRUState:
    """cell: (rows, hidden) float32; slots and sources as in LSTMState: with them, cell is a slab, (places, hidden)."""

    cell: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> SRUState:
        """Without slots: what the rows go on from, copied out of its places, or itself where it has none."""
        places = origins(self)
        return self if places is None else SRUState(self.cell[places])


POOLINGS = {"f": 2, "fo": 3, "ifo": 4}
"""Blocks of a QRNN by its pooling: candidate, forget, then output, then input gate."""


@dataclass(frozen=True)
class QRNNWeights:
    """One layer in one direction; blocks candidate, forget, output, input, as many as `pooling` asks for. Values do not change once
    a kernel has seen them.

    input: (window, inputs, blocks x hidden) with the present step first, then the one before it and so on, or None when the data
    already are the masked convolution without its bias; bias: (blocks x hidden,).

    tables: (window, 1 + vocabulary, blocks x hidden), the present step first, or None: the data are ids, (tokens,) int32 or int64,
    the convolution is the sum over the window of the rows of the ids at and before the step, and input is None. Id n is row
    `kernels.embedding.FIRST` + n; the row before the first is zeros, for steps that are padding.
    """

    input: Tensor | None
    bias: Tensor
    pooling: str = "fo"
    tables: Tensor | None = None

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // POOLINGS[self.pooling]

    @property
    def window(self) -> int:
        taps = self.input if self.tables is None else self.tables
        return 1 if taps is None else taps.shape[0]

    @cached_property
    def columns(self) -> int | None:
        """Of the data; None where they are ids. Looks at the shapes above once, and raises ContractError unless they hold
        together."""
        return _qrnn_columns(self)

    @cached_property
    def form(self) -> dict[str, Any]:
        """What both directions of a layer have in common."""
        return _form(self)

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """The weights as kernels want them, by whatever tells one layout from another; made once and kept."""
        return {}


@dataclass(frozen=True, slots=True)
class QRNNState:
    """cell: (rows, hidden) float32; left: (rows, window - 1, inputs) the steps before the next one, oldest first.

    With tables, left is (rows, window - 1) int64, rows of the tables as `kernels.embedding.tap_rows` has them, 0 for padding. Slots
    and sources as in LSTMState: with them, cell and left are slabs, (places, ...).
    """

    cell: Tensor
    left: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> QRNNState:
        """Without slots: what the rows go on from, copied out of its places, or itself where it has none."""
        places = origins(self)
        return self if places is None else QRNNState(self.cell[places], self.left[places])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
}


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "glu": lambda value, gate: value * gate.sigmoid(),
    "gated_tanh": lambda value, gate: value.tanh() * gate.sigmoid(),
}
"""Of a value and its gate: Dauphin et al. 2017, and van den Oord et al. 2016."""


@dataclass(frozen=True)
class ConvWeights:
    """One 1-D convolution over time: y[t] = activation(sum over k of x[t x stride - left + k x dilation] @ filters[k] + bias).

    filters: (width, inputs, maps), the earliest step first; bias: (maps,); left, right: zero steps before and after each row. The maps
    are the outputs, or, of an activation in GATED, twice as many: the values, then their gates. Values do not change once a kernel
    has seen them. A row of n steps gives (n + left + right - reach) // stride + 1 steps, where reach = (width - 1) x dilation + 1,
    or none.

    embedding: (vocabulary, inputs), or None: the data are ids, (tokens,) int32 or int64, of its rows, which the convolution sees.
    tables: (width, 1 + vocabulary, maps) as `kernels.embedding.fold_taps` makes them, or None: the data are ids, the convolution is
    the sum over the window of the rows of the tables, and of the filters only the shape matters. Id n is row
    `kernels.embedding.FIRST` + n; the row before the first is zeros, for steps that are padding.
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
        """Of the filters: width, inputs and maps; asking an array takes longer."""
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
        """Whether a row gives a step for every step."""
        return self.stride == 1 and self.left + self.right == self.reach - 1

    @property
    def takes_ids(self) -> bool:
        return self.embedding is not None or self.tables is not None

    @cached_property
    def columns(self) -> int | None:
        """Of the data; None where they are ids. Looks at the shapes above once, and raises ContractError unless they hold
        together."""
        return _conv_columns(self)

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """The weights as kernels want them, by whatever tells one layout from another; made once and kept."""
        return {}

    def steps(self, steps: Sizes) -> Sizes:
        """Steps that come out of rows of so many steps, on the host."""
        return whole_windows(steps + self.left + self.right, self.reach, self.stride)


@dataclass(frozen=True, slots=True)
class ConvState:
    """left: (rows, left, inputs) the steps before the next one, oldest first; they take the place of the zeros.

    Slots and sources as in LSTMState: with them, left is a slab, (places, left, inputs).
    """

    left: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> ConvState:
        """Without slots: what the rows go on from, copied out of its places, or itself where it has none."""
        places = origins(self)
        return self if places is None else ConvState(self.left[places])


State = LSTMState | GRUState | SRUState | QRNNState | ConvState
"""Of any family."""


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """Convolutions one after the other, and what came in added to what they give, if `residual`:
    y = activation(convolved + x), or with a projection, a convolution of width 1, y = activation(convolved + projection(x)).

    activation: one of ACTIVATIONS, after the addition; without a residual there is none.
    """

    layers: tuple[ConvWeights, ...]
    residual: bool = False
    projection: ConvWeights | None = None
    activation: str = "none"

    @property
    def outputs(self) -> int:
        return self.layers[-1].outputs


@dataclass(frozen=True, slots=True)
class Outputs:
    """What leaves the device; what is not wanted is not written."""

    steps: bool = False
    last: bool = False
    mean: bool = False
    max: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """What was wanted, float32: steps (tokens, hidden); last, mean, max (rows, hidden); and the state after the last step.

    `offsets` are those of `steps`, where they are not the input's. Of a row without steps, mean and max are zero, and last is the
    hidden state it came with, or zero where the family keeps none. scores: (rows, labels) float32 of a linear layer over the maximum,
    where the kernel was given one.
    """

    state: Any
    steps: Tensor | None = None
    last: Tensor | None = None
    mean: Tensor | None = None
    max: Tensor | None = None
    offsets: Tensor | None = None
    scores: Tensor | None = None


def origins(state: State) -> Tensor | None:
    """(rows,) int64 the places that the rows go on from, of a state in slots."""
    places = state.slots if state.sources is None else state.sources
    return None if places is None else places.long()


def begins(sizes: Sizes) -> Sizes:
    """The sum of those before each: where it begins when they are laid end to end."""
    before: Sizes = sizes.cumsum() - sizes
    return before


def whole_windows(steps: Sizes, reach: int, stride: int) -> Sizes:
    """How many windows of `reach` steps, `stride` apart, lie within so many steps."""
    windows: Sizes = np.maximum((steps - reach) // stride + 1, 0)
    return windows


def reversal(offsets: Tensor, tokens: int) -> Tensor:
    """(tokens,) where each token of the rows, read back to front, comes from; what stands for a token after all rows means nothing. Waits
    for no device."""
    # Of as few operations as can be: each of them is a launch. One more than the token is the first that is not before it.
    beyond = torch.arange(1, tokens + 1, device=offsets.device, dtype=offsets.dtype)
    row = torch.searchsorted(offsets[1:], beyond)
    both_ends = offsets + offsets.roll(-1)
    return both_ends[row].sub_(beyond).clamp_(min=0)


def check_lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("x.data", x.data, (None, weights.columns))
    check_ragged(x)
    if state is None:
        return
    places = _places(x, state)
    expect("state.hidden", state.hidden, (places, weights.hidden))
    expect("state.cell", state.cell, (places, weights.hidden))


def check_gru(x: Ragged, weights: GRUWeights, state: GRUState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("x.data", x.data, (None, _columns(weights, 3)))
    check_ragged(x)
    if weights.recurrent_bias is not None:
        expect("weights.recurrent_bias", weights.recurrent_bias, (weights.hidden,))
    if state is not None:
        expect("state.hidden", state.hidden, (_places(x, state), weights.hidden))


def check_sru(x: Ragged, weights: SRUWeights, state: SRUState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    columns = weights.columns
    if weights.table is not None:
        _expect_ids(x)
    elif columns is None:
        _expect_blocks("x.data", x.data, weights.hidden)
    else:
        expect("x.data", x.data, (None, columns))
    check_ragged(x)
    if state is not None:
        expect("state.cell", state.cell, (_places(x, state), weights.hidden))


def check_qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    columns = weights.columns
    if columns is None:
        _expect_ids(x)
    else:
        expect("x.data", x.data, (None, columns))
    check_ragged(x)
    if state is None:
        return
    expect("state.cell", state.cell, (_places(x, state), weights.hidden))
    places, before = len(state.cell), weights.window - 1
    expect("state.left", state.left, (places, before) if columns is None else (places, before, columns))
    if columns is None and state.left.dtype != torch.int64:
        raise ContractError(f"state.left is {state.left.dtype}, expected rows of weights.tables, torch.int64")


def check_both(
    check: Callable[[Ragged, Any, Any], None], x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None
) -> None:
    """Raises ContractError unless `check` passes each direction, forward first, and both have the same form."""
    for one, state in zip(weights, states or (None, None), strict=True):
        check(x, one, state)
    forward, backward = (one.form for one in weights)
    if forward != backward:
        name = next(name for name in forward if forward[name] != backward[name])
        raise ContractError(f"weights.{name} is {forward[name]} forward and {backward[name]} backward, expected the same")


def check_conv(x: Ragged, weights: ConvWeights, state: ConvState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    columns = weights.columns
    if columns is None:
        _expect_ids(x)
    else:
        expect("x.data", x.data, (None, columns))
    check_ragged(x)
    if state is not None:
        _check_conv_state("state", x, weights, state)


def check_conv_stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None) -> None:
    """Raises ContractError unless each layer takes what the one before it gives, and the states are those of the layers."""
    if not blocks or not all(block.layers for block in blocks):
        raise ContractError("a stack has at least one block, and each of them at least one layer")
    check_conv(x, blocks[0].layers[0], None)
    columns = blocks[0].layers[0].columns
    for number, block in enumerate(blocks):
        columns = _check_conv_block(f"blocks[{number}]", block, columns, first=number == 0)
    if states is None:
        return
    layers = [layer for block in blocks for layer in block.layers]
    if len(states) != len(layers):
        raise ContractError(f"states has {len(states)} of them, expected one for each of {len(layers)} layers")
    for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
        _check_conv_state(f"states[{number}]", x, layer, state)


def check_text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> None:
    """Raises ContractError unless all layers take the same data in the same way, and the classifier what they give together."""
    if not layers:
        raise ContractError("a text CNN has at least one layer")
    first = layers[0]
    for number, layer in enumerate(layers):
        check_conv(x, layer, None)
        if layer.embedding is not first.embedding or (layer.tables is None) != (first.tables is None):
            raise ContractError(
                f"layers[{number}] takes ids in another way than layers[0]: one embedding for all, or tables for each"
            )
    if classifier is not None:
        weight, bias = classifier
        expect("classifier[0]", weight, (sum(layer.outputs for layer in layers), None))
        expect("classifier[1]", bias, (weight.shape[1],))


def _check_conv_block(name: str, block: ConvBlock, columns: int | None, *, first: bool) -> int:
    """How many columns come out; columns: of what comes in, None where it is ids."""
    inner = columns
    for number, layer in enumerate(block.layers):
        takes = layer.columns
        if takes is None and not (first and number == 0):
            raise ContractError(f"{name}.layers[{number}] takes ids, which only the first layer of a stack may")
        if takes != inner:
            raise ContractError(f"{name}.layers[{number}] takes {takes} columns, and {inner} come in")
        inner = layer.outputs
    if block.residual:
        _check_residual(name, block, columns)
    elif block.projection is not None or block.activation != "none":
        raise ContractError(f"{name} has a projection or an activation although it has no residual")
    return block.outputs


def _check_residual(name: str, block: ConvBlock, columns: int | None) -> None:
    """columns: of what comes in."""
    if columns is None:
        raise ContractError(f"{name} has a residual although the data are ids")
    if block.activation not in ACTIVATIONS:
        raise ContractError(f"{name}.activation is {block.activation!r}; known are {', '.join(ACTIVATIONS)}")
    for number, layer in enumerate(block.layers):
        if not layer.keeps_steps:
            raise ContractError(f"{name} has a residual although layers[{number}] does not give a step for every step")
    projection = block.projection
    if projection is None:
        if block.outputs != columns:
            raise ContractError(f"{name} adds {columns} columns to {block.outputs}: a projection is missing")
        return
    shape = projection.columns, projection.outputs
    if shape != (columns, block.outputs):
        raise ContractError(
            f"{name}.projection goes from {shape[0]} to {shape[1]} columns, expected {columns} to {block.outputs}"
        )
    if projection.filters.shape[0] != 1 or not projection.keeps_steps or projection.activation != "none":
        raise ContractError(f"{name}.projection is of width 1, without padding, stride and activation")


def _check_conv_state(name: str, x: Ragged, weights: ConvWeights, state: ConvState) -> None:
    columns = weights.columns
    if columns is None:
        raise ContractError(f"{name} is given although the data are ids: a convolution over ids keeps none")
    expect(f"{name}.left", state.left, (_places(x, state, name), weights.left, columns))


def _columns(weights: LSTMWeights | GRUWeights, gates: int) -> int:
    """How many columns the data have; raises ContractError unless the weights' shapes hold together."""
    expect("weights.recurrent", weights.recurrent, (None, None))
    hidden = weights.hidden
    expect("weights.recurrent", weights.recurrent, (hidden, gates * hidden))
    if weights.input is not None and weights.bias is not None:
        expect("weights.input", weights.input, (None, gates * hidden))
        expect("weights.bias", weights.bias, (gates * hidden,))
        return weights.input.shape[0]
    if weights.input is not None or weights.bias is not None:
        raise ContractError("weights.input and weights.bias are given together or not at all")
    return gates * hidden


def _sru_columns(weights: SRUWeights) -> int | None:
    """How many columns the data have, None of ids and blocks; raises ContractError unless the weights' shapes hold together."""
    expect("weights.bias", weights.bias, (None,))
    hidden = weights.hidden
    expect("weights.bias", weights.bias, (2 * hidden,))
    if weights.cell is not None:
        expect("weights.cell", weights.cell, (2 * hidden,))
    if weights.table is not None:
        _expect_blocks("weights.table", weights.table, hidden)
        _expect_none(weights, ("input", "projection", "skip_from", "norm"), "the data are ids")
        return None
    if weights.input is None:
        _expect_none(weights, ("projection", "skip_from", "norm"), "the data already are the product with weights.input")
        return None
    _expect_blocks("weights.input", weights.input, hidden)
    columns = weights.input.shape[0]
    if weights.projection is not None:
        expect("weights.projection", weights.projection, (None, columns))
        columns = weights.projection.shape[0]
    if weights.norm is not None:
        expect("weights.norm", weights.norm, (2, columns))
    if weights.skip_from is not None:
        if weights.input.shape[1] == 4 * hidden:
            raise ContractError("weights.skip_from is given although the skip is a block of its own")
        if not 0 <= weights.skip_from <= columns - hidden:
            raise ContractError(f"weights.skip_from is {weights.skip_from} of {columns} columns, {hidden} are needed")
    return columns


def _qrnn_columns(weights: QRNNWeights) -> int | None:
    """How many columns the data have, None of ids; raises ContractError unless the weights' shapes hold together."""
    if weights.pooling not in POOLINGS:
        raise ContractError(f"weights.pooling is {weights.pooling!r}; known are {', '.join(POOLINGS)}")
    expect("weights.bias", weights.bias, (None,))
    blocks = POOLINGS[weights.pooling] * weights.hidden
    expect("weights.bias", weights.bias, (blocks,))
    if weights.tables is not None:
        _expect_none(weights, ("input",), "the data are ids")
    name, taps = ("input", weights.input) if weights.tables is None else ("tables", weights.tables)
    if taps is None:
        return blocks
    expect(f"weights.{name}", taps, (None, None, blocks))
    if weights.window < 1:
        raise ContractError(f"weights.{name} has a window of 0 steps, expected at least the present one")
    if weights.tables is None:
        return taps.shape[1]
    if not taps.shape[1]:
        raise ContractError("weights.tables has no rows, expected at least the one of padding")
    return None


def _conv_columns(weights: ConvWeights) -> int | None:
    """How many columns the data have, None of ids; raises ContractError unless the weights' shapes hold together."""
    expect("weights.filters", weights.filters, (None, None, None))
    width, inputs, maps = weights.filters.shape
    expect("weights.bias", weights.bias, (maps,))
    if width < 1 or weights.dilation < 1 or weights.stride < 1 or weights.left < 0 or weights.right < 0:
        raise ContractError("width, dilation and stride are at least 1, left and right at least 0")
    if weights.activation not in ACTIVATIONS and weights.activation not in GATED:
        raise ContractError(f"weights.activation is {weights.activation!r}; known are {', '.join((*ACTIVATIONS, *GATED))}")
    if weights.activation in GATED and maps % 2:
        raise ContractError(f"weights.filters has {maps} maps, expected as many gates as values for {weights.activation!r}")
    if weights.tables is not None:
        _expect_none(weights, ("embedding",), "weights.tables are")
        expect("weights.tables", weights.tables, (width, None, maps))
        if not weights.tables.shape[1]:
            raise ContractError("weights.tables has no rows, expected at least the one of padding")
    if weights.embedding is not None:
        expect("weights.embedding", weights.embedding, (None, inputs))
    return None if weights.takes_ids else inputs


def _form(weights: SRUWeights | QRNNWeights) -> dict[str, Any]:
    """Shape and dtype of every array, and everything else as it is."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: (*value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in values.items()}


def _places(x: Ragged, state: State, name: str = "state") -> int | None:
    """How many a state has: one for each row, or, with slots, any number."""
    if state.slots is None:
        if state.sources is not None:
            raise ContractError(f"{name}.sources is given although {name}.slots is not")
        return x.rows
    expect(f"{name}.slots", state.slots, (x.rows,))
    if state.sources is not None:
        expect(f"{name}.sources", state.sources, (x.rows,))
    return None


def _expect_ids(x: Ragged) -> None:
    expect("x.data", x.data, (None,))
    if x.data.dtype not in (torch.int32, torch.int64):
        raise ContractError(f"x.data is {x.data.dtype}, expected ids, torch.int32 or torch.int64")


def _expect_blocks(name: str, array: Tensor, hidden: int) -> None:
    expect(name, array, (None, None))
    if array.shape[1] not in (3 * hidden, 4 * hidden):
        raise ContractError(f"{name} has the shape {tuple(array.shape)}, expected 3 or 4 blocks of {hidden}")


def _expect_none(weights: SRUWeights | QRNNWeights | ConvWeights, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(weights, name) is not None:
            raise ContractError(f"weights.{name} is given although {why}")


def check_ragged(x: Ragged) -> None:
    """Raises ContractError unless x is a batch. On a GPU the offsets' values are the caller's word: reading them would wait."""
    expect("x.offsets", x.offsets, (None,))
    if x.offsets.device.type != "cpu":
        return
    offsets = x.offsets.tolist()
    if not offsets or offsets[0] != 0 or offsets[-1] != len(x.data) or any(end < begin for begin, end in pairwise(offsets)):
        raise ContractError(f"x.offsets goes from 0 to the {len(x.data)} tokens without falling, got {offsets[:8]}")


def expect(name: str, array: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ContractError unless `array` has this shape; None stands for any size."""
    found = array.shape
    if found == shape:
        return
    alike = len(found) == len(shape) and (
        (found[1:] == shape[1:] and shape[0] is None)
        or all(want in (None, have) for want, have in zip(shape, found, strict=True))
    )
    if not alike:
        sizes = [*found, *("any" for _ in shape)]
        wanted = tuple(size if want is None else want for want, size in zip(shape, sizes, strict=False))
        raise ContractError(f"{name} has the shape {tuple(found)}, expected {wanted}")
