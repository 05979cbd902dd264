"""The GRU's weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from kernels.activations import SIGMOID, TANH, Activation
from kernels.gated import RESET_BEFORE, RecurrentWeights, gated_columns, variants_of
from kernels.ragged import ContractError, check_shape


@dataclass(frozen=True)
class GRUWeights(RecurrentWeights):
    """The weights of a GRU.

    activations: of the reset and update gates, and of the new gate.

    recurrent_bias: (hidden,), the bias of the new gate's recurrent product, which the reset gate scales with it ("reset after", as in
    cuDNN and PyTorch); or None to apply the reset gate before the product (Cho et al. 2014). A recurrent norm needs a recurrent_bias.
    """

    gates = ("reset", "update", "new")

    activations: tuple[Activation, Activation] = (SIGMOID, TANH)
    recurrent_bias: Tensor | None = field(kw_only=True)

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What these weights have beyond the GRU of cuDNN and PyTorch."""
        return variants_of(self, **{RESET_BEFORE: self.recurrent_bias is None})

    @cached_property
    def columns(self) -> int | None:
        columns = gated_columns(self)
        if self.recurrent_bias is not None:
            check_shape("weights.recurrent_bias", self.recurrent_bias, (self.hidden,))
        elif self.recurrent_norm is not None:
            raise ContractError("weights.recurrent_norm needs one recurrent product: pass a recurrent_bias")
        return columns
