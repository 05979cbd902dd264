"""The LSTM's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels.ragged import Ragged, check_ragged, check_shape, gated_columns, source_slots, state_entries

GATES = ("input", "forget", "cell", "output")
"""Order of the gate blocks along every axis of 4 x hidden."""


@dataclass(frozen=True)
class LSTMWeights:
    """The weights of one layer in one direction, gate blocks in the order of GATES. Values must not change after the first call.

    input: (inputs, 4 x hidden), or None when the data are gate inputs, that is ``x @ input + bias``; recurrent: (hidden, 4 x hidden);
    bias: (4 x hidden,), or None when input is None.
    """

    input: Tensor | None
    recurrent: Tensor
    bias: Tensor | None

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0]

    @cached_property
    def columns(self) -> int:
        """The data's number of columns. The first access checks these shapes and raises ContractError if they are inconsistent."""
        return gated_columns(self, 4)

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """The recurrent weights in the layouts that kernels read, by layout; each is made once and kept."""
        return {}


@dataclass(frozen=True, slots=True)
class LSTMState:
    """hidden, cell: (rows, hidden) float32, the state after each row's last chunk; with slots, (slots, hidden) state caches.

    slots, sources: as in `kernels.ragged.RowState`.
    """

    hidden: Tensor
    cell: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None

    def by_row(self) -> LSTMState:
        """Return the state without slots: a copy of the slots that the rows start from, or itself if it has no slots."""
        slots = source_slots(self)
        return self if slots is None else LSTMState(self.hidden[slots], self.cell[slots])


def check_lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    check_shape("x.data", x.data, (None, weights.columns))
    check_ragged(x)
    if state is None:
        return
    entries = state_entries(x, state)
    check_shape("state.hidden", state.hidden, (entries, weights.hidden))
    check_shape("state.cell", state.cell, (entries, weights.hidden))
