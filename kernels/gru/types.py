"""The GRU's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels.activations import SIGMOID, TANH, Activation
from kernels.gated import RESET_BEFORE, check_gated_data, gated_columns, variants_of
from kernels.norm import EPSILON
from kernels.ragged import ContractError, Ragged, check_shape, form_of, source_slots, state_entries


@dataclass(frozen=True)
class GRUWeights:
    """The weights of one layer in one direction, gate blocks in the order reset, update, new. Values must not change after the
    first call.

    input: (inputs, 3 x hidden), or None when the data are gate inputs; recurrent: (hidden, 3 x hidden); bias: (3 x hidden,), or
    None when input is None. recurrent_bias: (hidden,), the bias of the new gate's recurrent product, which the reset gate
    scales with it ("reset after", as in cuDNN and PyTorch); or None to apply the reset gate before the product (Cho et al.
    2014).

    table: (vocabulary, 3 x hidden), or None. With a table, the data are ids, (tokens,) int32 or int64, the table's rows are the
    gate inputs, and input and bias are None.

    int8: whether products on a CPU take int8 weights and rows, each row with its own scale, where the backend can; input and recurrent
    then have values of `kernels.quantized.dequantize`.

    activations: of the reset and update gates, and of the new gate. clip: bounds the input of every gate's activation, from -clip to clip,
    or None. input_norm, recurrent_norm: (2, 3 x hidden) gain and offset of a layer norm over ``x @ input`` without the bias and over
    ``h @ recurrent``, or None; epsilon: of the norms. A recurrent norm needs a recurrent_bias.
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None
    recurrent_bias: Tensor | None
    table: Tensor | None = None
    int8: bool = False
    activations: tuple[Activation, Activation] = (SIGMOID, TANH)
    clip: float | None = None
    input_norm: Tensor | None = None
    recurrent_norm: Tensor | None = None
    epsilon: float = EPSILON

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]

    @property
    def vector(self) -> int:
        """Width of the output and of the hidden state."""
        return self.hidden

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What these weights have beyond the GRU of cuDNN and PyTorch."""
        return variants_of(self, **{RESET_BEFORE: self.recurrent_bias is None})

    @cached_property
    def columns(self) -> int | None:
        """The data's number of columns, or None for ids. The first access checks the shapes and raises ContractError if they
        are inconsistent."""
        columns = gated_columns(self, 3)
        if self.recurrent_bias is not None:
            check_shape("weights.recurrent_bias", self.recurrent_bias, (self.hidden,))
        elif self.recurrent_norm is not None:
            raise ContractError("weights.recurrent_norm needs one recurrent product: pass a recurrent_bias")
        return columns

    @cached_property
    def form(self) -> dict[str, Any]:
        """The properties that both directions of a layer must share."""
        return form_of(self)

    @cached_property
    def over_gate_inputs(self) -> GRUWeights:
        """The weights of the same layer over the rows of its table. They share what kernels pack."""
        weights = replace(self, input=None, bias=None, table=None, input_norm=None)
        vars(weights)["packed"] = self.packed
        return weights

    @cached_property
    def packed(self) -> dict[Any, Any]:
        """The weights in the layouts that kernels read, by layout; each is made once and kept."""
        return {}


@dataclass(frozen=True, slots=True)
class GRUState:
    """hidden: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in
    `kernels.ragged.RowState`."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> GRUState:
        """Return the state without slots: a copy of the slots that the rows start from, or itself if it has no slots."""
        slots = source_slots(self)
        return self if slots is None else GRUState(self.hidden[slots])


def check_gru(x: Ragged, weights: GRUWeights, state: GRUState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    check_gated_data(x, weights.columns)
    if state is not None:
        check_shape("state.hidden", state.hidden, (state_entries(x, state), weights.hidden))
