"""The LSTM's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kernels.activations import SIGMOID, TANH, Activation
from kernels.gated import PEEPHOLES, PROJECTION, RecurrentWeights, check_gated, gated_columns, variants_of
from kernels.ragged import Ragged, RowState, check_shape, state_entries


@dataclass(frozen=True)
class LSTMWeights(RecurrentWeights):
    """The weights of an LSTM.

    activations: of the input, forget and output gates, of the cell gate, and of the cell before the output gate. peephole: (3 x hidden,),
    or None: the weights of the previous cell in the input and forget gates and of the new cell in the output gate (Gers and Schmidhuber
    2000). projection: (hidden, vector), or None: maps the output to fewer numbers, which are the hidden state; the recurrent matrix then
    has `vector` rows (Sak et al. 2014). cell_norm: (2, hidden) gain and offset of a layer norm of the new cell, or None.
    """

    gates = ("input", "forget", "cell", "output")

    activations: tuple[Activation, Activation, Activation] = (SIGMOID, TANH, TANH)
    peephole: Tensor | None = None
    projection: Tensor | None = None
    cell_norm: Tensor | None = None

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[0] if self.projection is None else self.projection.shape[0]

    @property
    def vector(self) -> int:
        """Width of the output and of the hidden state."""
        return self.recurrent.shape[0] if self.projection is None else self.projection.shape[1]

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What these weights have beyond the plain LSTM."""
        return variants_of(self, **{PEEPHOLES: self.peephole is not None, PROJECTION: self.projection is not None})

    @cached_property
    def columns(self) -> int | None:
        columns = gated_columns(self)
        if self.peephole is not None:
            check_shape("weights.peephole", self.peephole, (3 * self.hidden,))
        if self.cell_norm is not None:
            check_shape("weights.cell_norm", self.cell_norm, (2, self.hidden))
        return columns


@dataclass(frozen=True, slots=True)
class LSTMState(RowState):
    """hidden: (rows, vector), cell: (rows, hidden), float32, the state after each row's last chunk; with slots, state caches with one entry
    for each slot.

    slots, sources: as in `kernels.ragged.RowState`.
    """

    hidden: Tensor
    cell: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None


def check_lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    check_gated(x, weights, state)
    if state is not None:
        check_shape("state.cell", state.cell, (state_entries(x, state), weights.hidden))
