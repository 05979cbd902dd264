"""The plain RNN's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernels.activations import TANH, Activation
from kernels.gated import RecurrentWeights, gated_columns
from kernels.norm import EPSILON
from kernels.ragged import RowState


@dataclass(frozen=True)
class RNNWeights(RecurrentWeights):
    """The weights of one layer in one direction. Values must not change after the first call.

    input: (inputs, hidden), or None when the data are ``x @ input + bias``; recurrent: (hidden, hidden); bias: (hidden,), or None when
    input is None.

    table: (vocabulary, hidden), or None. With a table, the data are ids, (tokens,) int32 or int64, its rows are the inputs' products
    with the bias added, and input and bias are None.

    activations: the activation, alone. clip: bounds its input, from -clip to clip, or None. input_norm, recurrent_norm: (2, hidden) gain
    and offset of a layer norm over ``x @ input`` without the bias and over ``h @ recurrent``, or None; epsilon: of the norms. int8: has no
    effect, because no backend has int8 products.
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None
    table: Tensor | None = None
    int8: bool = False
    activations: tuple[Activation] = (TANH,)
    clip: float | None = None
    input_norm: Tensor | None = None
    recurrent_norm: Tensor | None = None
    epsilon: float = EPSILON

    @cached_property
    def columns(self) -> int | None:
        return gated_columns(self, 1)


@dataclass(frozen=True, slots=True)
class RNNState(RowState):
    """hidden: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in `kernels.ragged.RowState`."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None
