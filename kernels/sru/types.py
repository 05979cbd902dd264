"""The SRU's weights and state, and the check of a call's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.embedding import fold
from kernels.norm import layer_norm
from kernels.ragged import (
    ContractError,
    LayerWeights,
    Ragged,
    RowState,
    check_absent,
    check_data,
    check_ragged,
    check_shape,
    form_of,
    state_entries,
)
from kernels.scan.forms import NO_SKIP, SKIP_BLOCK, SKIP_COLUMNS, ScanForm


@dataclass(frozen=True)
class SRUWeights(LayerWeights):
    """The weights of one layer in one direction, in blocks of `hidden` columns: candidate, forget, reset and, in some layers, skip.
    Values must not change after the first call.

    input: (inputs, 3 x hidden or 4 x hidden), or None when the data are already its product; projection: (columns, inputs), applied
    to the data first, or None; bias: (2 x hidden,) of forget and reset; cell: (2 x hidden,), the factors of the previous cell in both
    gates, or None (version 1). Without a skip block, the skip is `hidden` of the data's columns from `skip_from` on times `scale`, or
    zero when `skip_from` is None.

    table: (vocabulary, 3 x hidden or 4 x hidden), or None. With a table, the data are ids, (tokens,) int32 or int64, the table's rows
    are the blocks, and input, projection, skip_from and norm are None. norm: (2, columns) gain and offset of a layer norm of the data,
    as torch.nn.LayerNorm computes it, or None. It precedes the projection and the product and does not affect the skip.

    int8: whether products on a CPU take int8 weights and rows, each row with its own scale, where the backend can; input and projection
    then have values of `kernels.quantized.dequantize`.
    """

    gates = ("candidate", "forget", "reset")

    input: Tensor | None
    bias: Tensor
    cell: Tensor | None
    projection: Tensor | None = None
    skip_from: int | None = None
    scale: float = 1.0
    tanh: bool = False
    table: Tensor | None = None
    norm: Tensor | None = None
    int8: bool = False

    @property
    def hidden(self) -> int:
        return self.bias.shape[0] // 2

    @property
    def array(self) -> Tensor:
        return self.bias

    @cached_property
    def columns(self) -> int | None:
        """The data's number of columns, or None for ids and blocks. The first access checks these shapes and raises ContractError if they
        are inconsistent."""
        check_shape("weights.bias", self.bias, (None,))
        hidden = self.hidden
        check_shape("weights.bias", self.bias, (2 * hidden,))
        if self.cell is not None:
            check_shape("weights.cell", self.cell, (2 * hidden,))
        if self.table is not None:
            _check_blocks("weights.table", self.table, hidden)
            check_absent(self, ("input", "projection", "skip_from", "norm"), "the data are ids")
            return None
        if self.input is None:
            check_absent(self, ("projection", "skip_from", "norm"), "the data are already the product with weights.input")
            return None
        _check_blocks("weights.input", self.input, hidden)
        columns = self.input.shape[0]
        if self.projection is not None:
            check_shape("weights.projection", self.projection, (None, columns))
            columns = self.projection.shape[0]
        if self.norm is not None:
            check_shape("weights.norm", self.norm, (2, columns))
        if self.skip_from is not None:
            if self.input.shape[1] == 4 * hidden:
                raise ContractError("weights.skip_from must be None because weights.input has a skip block")
            if not 0 <= self.skip_from <= columns - hidden:
                raise ContractError(
                    f"weights.skip_from is {self.skip_from}, expected 0 to {columns - hidden}: "
                    f"the skip takes {hidden} of the data's {columns} columns"
                )
        return columns

    @cached_property
    def form(self) -> dict[str, Any]:
        """The properties that both directions of a layer must share. Their skips may start at different columns."""
        return form_of(self) | {"skip_from": self.skip_from is not None}

    def scan_form(self, data: Tensor) -> ScanForm:
        """Return the form of a layer. data: as in a call; blocks may have a skip block or not."""
        columns = next(array.shape[-1] for array in (self.table, self.input, data) if array is not None)
        blocks = columns // self.hidden if self.hidden else 3
        skip = SKIP_COLUMNS if self.skip_from is not None else SKIP_BLOCK if blocks == 4 else NO_SKIP
        return ScanForm(blocks, sru=True, own_cell=self.cell is not None, skip=skip, tanh=self.tanh)

    def folded(self, embedding: Tensor) -> SRUWeights:
        """Return weights over ids. A skip that is the input itself becomes a block of the table."""
        assert self.input is not None
        product = self.input if self.projection is None else self.projection.float() @ self.input.float()
        normalised = embedding if self.norm is None else layer_norm(embedding, self.norm)
        blocks = fold(normalised, product)
        if self.skip_from is not None:
            skip = embedding[:, self.skip_from : self.skip_from + self.hidden].float() * self.scale
            blocks = torch.cat((blocks, skip.to(blocks.dtype)), dim=1)
        return replace(self, input=None, projection=None, skip_from=None, norm=None, table=blocks.to(embedding.dtype))

    @property
    def table_columns(self) -> int:
        assert self.input is not None
        return self.input.shape[1] + (0 if self.skip_from is None else self.hidden)


@dataclass(frozen=True, slots=True)
class SRUState(RowState):
    """cell: (rows, hidden) float32, or with slots a (slots, hidden) state cache. slots, sources: as in `kernels.ragged.RowState`."""

    cell: Tensor
    slots: Tensor | None = None
    sources: Tensor | None = None


def check_sru(x: Ragged, weights: SRUWeights, state: SRUState | None) -> None:
    """Raises ContractError unless data, weights and state have consistent shapes."""
    columns = weights.columns
    if columns is None and weights.table is None:
        _check_blocks("x.data", x.data, weights.hidden)
        check_ragged(x)
    else:
        check_data(x, columns)
    if state is not None:
        check_shape("state.cell", state.cell, (state_entries(x, state), weights.hidden))


def _check_blocks(name: str, array: Tensor, hidden: int) -> None:
    check_shape(name, array, (None, None))
    if array.shape[1] not in (3 * hidden, 4 * hidden):
        raise ContractError(f"{name} has the shape {tuple(array.shape)}, expected 3 or 4 blocks of {hidden} columns")
