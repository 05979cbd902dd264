"""The GRU's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.ragged import Ragged, check_ragged, check_shape, gated_columns, source_slots, state_entries


@dataclass(frozen=True, slots=True)
class GRUWeights:
    """The weights of one layer in one direction, gate blocks in the order reset, update, new.

    input: (inputs, 3 x hidden), or None when the data are gate inputs; recurrent: (hidden, 3 x hidden); bias: (3 x hidden,), or None
    when input is None. recurrent_bias: (hidden,), the bias of the new gate's recurrent product, which the reset gate scales with it
    ("reset after", as in cuDNN and PyTorch); or None to apply the reset gate before the product (Cho et al. 2014).
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
    """hidden: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in `kernels.ragged.RowState`."""

    hidden: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> GRUState:
        """Return the state without slots: a copy of the slots that the rows start from, or itself if it has no slots."""
        slots = source_slots(self)
        return self if slots is None else GRUState(self.hidden[slots])


def check_gru(x: Ragged, weights: GRUWeights, state: GRUState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    check_shape("x.data", x.data, (None, gated_columns(weights, 3)))
    check_ragged(x)
    if weights.recurrent_bias is not None:
        check_shape("weights.recurrent_bias", weights.recurrent_bias, (weights.hidden,))
    if state is not None:
        check_shape("state.hidden", state.hidden, (state_entries(x, state), weights.hidden))
