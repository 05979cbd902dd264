"""The QRNN's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kernels.embedding import fold_taps
from kernels.ragged import (
    ContractError,
    LayerWeights,
    Ragged,
    RowState,
    check_absent,
    check_data,
    check_shape,
    compute_dtype,
    state_entries,
)
from kernels.scan.forms import CANDIDATES, IDENTITY, POSITIVE, TANH, ScanForm

POOLINGS = {"f": 2, "fo": 3, "ifo": 4}
"""Number of blocks of each pooling: candidate, forget, then output, then input gate."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    TANH: torch.tanh,
    IDENTITY: lambda values: values,
    POSITIVE: lambda values: torch.where(values >= 0, values + 0.5, values.sigmoid()),
}
"""The functions of the candidate."""


@dataclass(frozen=True)
class QRNNWeights(LayerWeights):
    """The weights of one layer in one direction, in blocks of `hidden` columns: candidate, forget, output, input, as many as `pooling`
    has. Values must not change after the first call.

    input: (window, inputs, blocks x hidden), the present step first, then the step before it and so on; or None when the data are
    already the masked convolution without its bias; bias: (blocks x hidden,).

    tables: (window, 1 + vocabulary, blocks x hidden), the present step first, or None. With tables, the data are ids, (tokens,) int32
    or int64, input is None, and the convolution is a sum over the window: each table contributes its row of the id at its step. Id n is
    row `kernels.embedding.FIRST` + n; row 0 is zeros, for steps of padding.

    int8: whether products on a CPU take int8 weights and rows, each row with its own scale, where the backend can; input
    then has values of `kernels.quantized.dequantize`. activation: of the candidate, a key of ACTIVATIONS with f-pooling.
    """

    gates: ClassVar[tuple[str, ...]] = ("candidate", "forget", "output")

    input: Tensor | None
    bias: Tensor
    pooling: str = "fo"
    tables: Tensor | None = None
    int8: bool = False
    activation: str = TANH

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // POOLINGS[self.pooling]

    @property
    def array(self) -> Tensor:
        return self.bias

    @property
    def window(self) -> int:
        taps = self.input if self.tables is None else self.tables
        return 1 if taps is None else taps.shape[0]

    @property
    def scan_form(self) -> ScanForm:
        return ScanForm(POOLINGS[self.pooling], activation=CANDIDATES.index(self.activation))

    @cached_property
    def columns(self) -> int | None:
        """The data's number of columns, or None for ids. The first access checks these shapes and raises ContractError if they
        are inconsistent."""
        if self.pooling not in POOLINGS:
            raise ContractError(f"weights.pooling is {self.pooling!r}, expected one of {', '.join(POOLINGS)}")
        activations = [*ACTIVATIONS] if self.pooling == "f" else [TANH]
        if self.activation not in activations:
            raise ContractError(f"weights.activation is {self.activation!r}, expected one of {', '.join(activations)}")
        check_shape("weights.bias", self.bias, (None,))
        blocks = POOLINGS[self.pooling] * self.hidden
        check_shape("weights.bias", self.bias, (blocks,))
        if self.tables is not None:
            check_absent(self, ("input",), "the data are ids")
        name, taps = ("input", self.input) if self.tables is None else ("tables", self.tables)
        if taps is None:
            return blocks
        check_shape(f"weights.{name}", taps, (None, None, blocks))
        if self.window < 1:
            raise ContractError(f"weights.{name} has a window of 0 steps, expected at least the present step")
        if self.tables is None:
            return taps.shape[1]
        if not taps.shape[1]:
            raise ContractError("weights.tables has no rows, expected at least the row of padding")
        return None

    def folded(self, embedding: Tensor) -> QRNNWeights:
        assert self.input is not None
        return replace(self, input=None, tables=fold_taps(embedding, self.input, dense=True))

    @property
    def table_columns(self) -> int:
        assert self.input is not None
        return self.window * self.input.shape[2]

    def zeros(self, name: str, entries: int) -> Tensor:
        if name != "left":
            return super().zeros(name, entries)
        before, device = self.window - 1, self.bias.device
        if self.tables is not None:
            return torch.zeros(entries, before, dtype=torch.int64, device=device)
        assert self.input is not None
        return torch.zeros(entries, before, self.input.shape[1], dtype=compute_dtype(self.input.dtype, device), device=device)


@dataclass(frozen=True, slots=True)
class QRNNState(RowState):
    """cell: (rows, hidden) float32; left: (rows, window - 1, inputs), the steps before the next chunk, oldest first.

    With tables, left is (rows, window - 1) int64: rows of the tables as `kernels.embedding.tap_rows` returns them, 0 for padding. With
    slots, cell and left are state caches, (slots, ...). slots, sources: as in `kernels.ragged.RowState`.
    """

    cell: Tensor
    left: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None


def check_qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    columns = weights.columns
    check_data(x, columns)
    if state is None:
        return
    check_shape("state.cell", state.cell, (state_entries(x, state), weights.hidden))
    entries, before = len(state.cell), weights.window - 1
    check_shape("state.left", state.left, (entries, before) if columns is None else (entries, before, columns))
    if columns is None and state.left.dtype != torch.int64:
        raise ContractError(f"state.left is {state.left.dtype}, expected rows of weights.tables: torch.int64")
