"""What every kernel family takes and gives: layouts, gate order and dtypes, said once.

Row vectors throughout, ``y = x @ W + b``. A batch is ragged: its sequences lie end to end and nothing is padded. Nothing here
computes; the checks raise ContractError before a kernel reads out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

GATES = ("input", "forget", "cell", "output")
"""Order of the LSTM's gate blocks along every axis of 4 x hidden."""

STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ContractError(ValueError):
    """An argument is not what a kernel asks for; the message names it, what it is and what it should be."""


def arithmetic(storage: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of products. On a CPU, float16 and bfloat16 are for storage only. Cells and sums are float32 everywhere."""
    return torch.float32 if device.type == "cpu" else storage


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences laid end to end.

    data: (tokens, ...); offsets: (rows + 1,) int32 or int64 on data's device, from 0 to tokens, never falling.
    """

    data: Tensor
    offsets: Tensor

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    def lengths(self) -> list[int]:
        """Steps of each row, on the host; on a GPU this waits for the device."""
        return torch.diff(self.offsets).tolist()

    def reversed(self) -> Ragged:
        """Every row back to front."""
        return Ragged(self.data.index_select(0, reversal(self.offsets)), self.offsets)


@dataclass(frozen=True, slots=True)
class LSTMWeights:
    """One layer in one direction; gate blocks in the order of GATES.

    input: (inputs, 4 x hidden), or None when the data already are gate inputs, that is ``x @ input + bias``;
    recurrent: (hidden, 4 x hidden); bias: (4 x hidden,), or None with input.
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]


@dataclass(frozen=True, slots=True)
class LSTMState:
    """hidden, cell: (rows, hidden) float32, what the next chunk of each row goes on from."""

    hidden: Tensor
    cell: Tensor


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

    Of a row without steps, last is the hidden state it came with, mean and max are zero.
    """

    state: LSTMState
    steps: Tensor | None = None
    last: Tensor | None = None
    mean: Tensor | None = None
    max: Tensor | None = None


def reversal(offsets: Tensor) -> Tensor:
    """(tokens,) int64: where each token of the rows, read back to front, comes from."""
    lengths = torch.diff(offsets).long()
    ends = (offsets[:-1].long() + offsets[1:].long() - 1).repeat_interleave(lengths)
    return ends - torch.arange(ends.shape[0], device=offsets.device)


def check_lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None) -> None:
    """Raises ContractError unless the shapes above hold together."""
    expect("weights.recurrent", weights.recurrent, (None, None))
    hidden = weights.hidden
    expect("weights.recurrent", weights.recurrent, (hidden, 4 * hidden))
    inputs: int | None = 4 * hidden
    if weights.input is not None and weights.bias is not None:
        expect("weights.input", weights.input, (None, 4 * hidden))
        expect("weights.bias", weights.bias, (4 * hidden,))
        inputs = weights.input.shape[0]
    elif weights.input is not None or weights.bias is not None:
        raise ContractError("weights.input and weights.bias are given together or not at all")
    expect("x.data", x.data, (None, inputs))
    check_ragged(x)
    if state is not None:
        expect("state.hidden", state.hidden, (x.rows, hidden))
        expect("state.cell", state.cell, (x.rows, hidden))


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
    fits = array.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if not fits:
        sizes = [*array.shape, *("any" for _ in shape)]
        wanted = tuple(size if want is None else want for want, size in zip(shape, sizes, strict=False))
        raise ContractError(f"{name} has the shape {tuple(array.shape)}, expected {wanted}")
