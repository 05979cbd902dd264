"""What every kernel family takes and gives: layouts, gate order and dtypes, said once.

Row vectors throughout, ``y = x @ W + b``. A batch is ragged: its sequences lie end to end and nothing is padded. Nothing here
computes; the checks raise ContractError before a kernel reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    data: (tokens, ...); offsets: (rows + 1,) int32 or int64 on data's device, from 0 to tokens, never falling.
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

    With slots, (rows,) int32 or int64, they are slabs, (places, hidden): row r goes on from place slots[r], which no other row has,
    and its new state is written there. Without, the new state is another array.
    """

    hidden: Tensor
    cell: Tensor
    slots: Tensor | None = None

    def by_row(self) -> LSTMState:
        """Without slots: copied out of them, or itself where it has none."""
        if self.slots is None:
            return self
        slots = self.slots.long()
        return LSTMState(self.hidden[slots], self.cell[slots])


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
    """hidden: (rows, hidden) float32."""

    hidden: Tensor


@dataclass(frozen=True, slots=True)
class SRUWeights:
    """One layer in one direction; blocks candidate, forget, reset and, where there is one, skip.

    input: (inputs, 3 x hidden or 4 x hidden), or None when the data already are the product with it; projection: (columns, inputs)
    that stands before it, or None; bias: (2 x hidden,) forget and reset; cell: (2 x hidden,) by which the old cell enters both
    gates, or None (version 1). Without a skip block, the skip is the data's own columns from `skip_from` on times `scale`, or
    nothing when `skip_from` is None.
    """

    input: Tensor | None
    bias: Tensor
    cell: Tensor | None
    projection: Tensor | None = None
    skip_from: int | None = None
    scale: float = 1.0
    tanh: bool = False

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // 2


@dataclass(frozen=True, slots=True)
class SRUState:
    """cell: (rows, hidden) float32."""

    cell: Tensor


POOLINGS = {"f": 2, "fo": 3, "ifo": 4}
"""Blocks of a QRNN by its pooling: candidate, forget, then output, then input gate."""


@dataclass(frozen=True, slots=True)
class QRNNWeights:
    """One layer in one direction; blocks candidate, forget, output, input, as many as `pooling` asks for.

    input: (window, inputs, blocks x hidden) with the present step first, then the one before it and so on, or None when the data
    already are the masked convolution without its bias; bias: (blocks x hidden,).
    """

    input: Tensor | None
    bias: Tensor
    pooling: str = "fo"

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // POOLINGS[self.pooling]

    @property
    def window(self) -> int:
        return 1 if self.input is None else self.input.shape[0]


@dataclass(frozen=True, slots=True)
class QRNNState:
    """cell: (rows, hidden) float32; left: (rows, window - 1, inputs) the steps before the next one, oldest first."""

    cell: Tensor
    left: Tensor


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
}


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """One 1-D convolution over time: y[t] = activation(sum over k of x[t x stride - left + k x dilation] @ filters[k] + bias).

    filters: (width, inputs, outputs), the earliest step first; bias: (outputs,); left, right: zero steps before and after each row.
    A row of n steps gives (n + left + right - reach) // stride + 1 steps, where reach = (width - 1) x dilation + 1, or none.
    """

    filters: Tensor
    bias: Tensor
    left: int = 0
    right: int = 0
    dilation: int = 1
    stride: int = 1
    activation: str = "none"

    @property
    def outputs(self) -> int:
        return self.filters.shape[2]

    @property
    def reach(self) -> int:
        return (self.filters.shape[0] - 1) * self.dilation + 1

    def steps(self, steps: Sizes) -> Sizes:
        """Steps that come out of rows of so many steps, on the host."""
        return whole_windows(steps + self.left + self.right, self.reach, self.stride)


@dataclass(frozen=True, slots=True)
class ConvState:
    """left: (rows, left, inputs) the steps before the next one, oldest first; they take the place of the zeros."""

    left: Tensor


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
    hidden state it came with, or zero where the family keeps none.
    """

    state: Any
    steps: Tensor | None = None
    last: Tensor | None = None
    mean: Tensor | None = None
    max: Tensor | None = None
    offsets: Tensor | None = None


def begins(sizes: Sizes) -> Sizes:
    """The sum of those before each: where it begins when they are laid end to end."""
    before: Sizes = sizes.cumsum() - sizes
    return before


def whole_windows(steps: Sizes, reach: int, stride: int) -> Sizes:
    """How many windows of `reach` steps, `stride` apart, lie within so many steps."""
    windows: Sizes = np.maximum((steps - reach) // stride + 1, 0)
    return windows


def reversal(offsets: Tensor, tokens: int) -> Tensor:
    """(tokens,) int64: where each token of the rows, read back to front, comes from. Waits for no device."""
    token = torch.arange(tokens, device=offsets.device)
    after = torch.searchsorted(offsets.long(), token, right=True)
    return offsets[after - 1] + offsets[after] - 1 - token


def check_lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("x.data", x.data, (None, weights.columns))
    check_ragged(x)
    if state is None:
        return
    places: int | None = x.rows
    if state.slots is not None:
        expect("state.slots", state.slots, (x.rows,))
        places = None
    expect("state.hidden", state.hidden, (places, weights.hidden))
    expect("state.cell", state.cell, (places, weights.hidden))


def check_gru(x: Ragged, weights: GRUWeights, state: GRUState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("x.data", x.data, (None, _columns(weights, 3)))
    check_ragged(x)
    if weights.recurrent_bias is not None:
        expect("weights.recurrent_bias", weights.recurrent_bias, (weights.hidden,))
    if state is not None:
        expect("state.hidden", state.hidden, (x.rows, weights.hidden))


def check_sru(x: Ragged, weights: SRUWeights, state: SRUState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("weights.bias", weights.bias, (None,))
    hidden = weights.hidden
    expect("weights.bias", weights.bias, (2 * hidden,))
    if weights.cell is not None:
        expect("weights.cell", weights.cell, (2 * hidden,))
    blocks = x.data if weights.input is None else weights.input
    name = "x.data" if weights.input is None else "weights.input"
    expect(name, blocks, (None, None))
    if blocks.shape[1] not in (3 * hidden, 4 * hidden):
        raise ContractError(f"{name} has the shape {tuple(blocks.shape)}, expected 3 or 4 blocks of {hidden}")
    if weights.input is not None and weights.projection is not None:
        expect("weights.projection", weights.projection, (None, weights.input.shape[0]))
        expect("x.data", x.data, (None, weights.projection.shape[0]))
    elif weights.input is not None:
        expect("x.data", x.data, (None, weights.input.shape[0]))
    elif weights.projection is not None:
        raise ContractError("weights.projection is given although the data already are the product with weights.input")
    if weights.skip_from is not None:
        if weights.input is None or blocks.shape[1] == 4 * hidden:
            raise ContractError("weights.skip_from is given although the skip is a block of its own")
        if not 0 <= weights.skip_from <= x.data.shape[1] - hidden:
            raise ContractError(f"weights.skip_from is {weights.skip_from} of {x.data.shape[1]} columns, {hidden} are needed")
    check_ragged(x)
    if state is not None:
        expect("state.cell", state.cell, (x.rows, hidden))


def check_qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    if weights.pooling not in POOLINGS:
        raise ContractError(f"weights.pooling is {weights.pooling!r}; known are {', '.join(POOLINGS)}")
    expect("weights.bias", weights.bias, (None,))
    blocks = POOLINGS[weights.pooling] * weights.hidden
    expect("weights.bias", weights.bias, (blocks,))
    inputs: int | None = blocks
    if weights.input is not None:
        expect("weights.input", weights.input, (None, None, blocks))
        if weights.window < 1:
            raise ContractError("weights.input has a window of 0 steps, expected at least the present one")
        inputs = weights.input.shape[1]
    expect("x.data", x.data, (None, inputs))
    check_ragged(x)
    if state is not None:
        expect("state.cell", state.cell, (x.rows, weights.hidden))
        expect("state.left", state.left, (x.rows, weights.window - 1, inputs))


def check_conv(x: Ragged, weights: ConvWeights, state: ConvState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("weights.filters", weights.filters, (None, None, None))
    width, inputs, outputs = weights.filters.shape
    expect("weights.bias", weights.bias, (outputs,))
    expect("x.data", x.data, (None, inputs))
    check_ragged(x)
    if width < 1 or weights.dilation < 1 or weights.stride < 1 or weights.left < 0 or weights.right < 0:
        raise ContractError("width, dilation and stride are at least 1, left and right at least 0")
    if weights.activation not in ACTIVATIONS:
        raise ContractError(f"weights.activation is {weights.activation!r}; known are {', '.join(ACTIVATIONS)}")
    if state is not None:
        expect("state.left", state.left, (x.rows, weights.left, inputs))


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
