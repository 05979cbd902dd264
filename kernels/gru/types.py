"""The GRU's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernels.activations import SIGMOID, TANH, Activation
from kernels.gated import RESET_BEFORE, RecurrentWeights, gated_columns, variants_of
from kernels.norm import EPSILON
from kernels.ragged import ContractError, RowState, check_shape


@dataclass(frozen=True)
class GRUWeights(RecurrentWeights):
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

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What these weights have beyond the GRU of cuDNN and PyTorch."""
        return variants_of(self, **{RESET_BEFORE: self.recurrent_bias is None})

    @cached_property
    def columns(self) -> int | None:
        columns = gated_columns(self, 3)
        if self.recurrent_bias is not None:
            check_shape("weights.recurrent_bias", self.recurrent_bias, (self.hidden,))
        elif self.recurrent_norm is not None:
            raise ContractError("weights.recurrent_norm needs one recurrent product: pass a recurrent_bias")
        return columns


@dataclass(frozen=True, slots=True)
class GRUState(RowState):
    """hidden: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in
    `kernels.ragged.RowState`."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None
