"""The launcher of `cpu_loops.py`, which the SRU and the QRNN share: packed weights, and one call for all steps of a ragged
batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu import launch
from kernels.cpu.storage import INT8, STORAGES, panel_storage
from kernels.cpu.threads import run_in_parts
from kernels.scan.forms import ScanForm

PRODUCT_TOKENS = 192
"""Tokens of a chunk with gate inputs from a product."""
GATHERED_FLOATS = 16384
"""Gate inputs of a chunk that are rows of an array: they stay in the fastest cache but one."""
GATHERED_UNITS = 512
"""Units of such a chunk, which are consecutive in memory."""
STEP_OPERATIONS = 64
"""Operations of a step of one unit without its product, as many as multiplications that take the same time."""


class ScanArguments(NamedTuple):
    """A layer as the compiled loop takes it: the addresses of the product's weights, or 0, of the bias and of the factors; width: the
    hidden size with padding; group_units: the most units that are computed together."""

    form: int
    hidden: int
    storage: int
    weights: int
    bias: int
    factors: int
    width: int
    group_units: int


class GateInputs(NamedTuple):
    """Where the compiled loop finds the gate inputs and the skip of a batch. The address of a missing array is 0.

    With weights, source is the data, and each token's `depth` values begin at begins[token], or at `columns` times its number.
    Without weights, source are `row_count` rows of `columns` stored gate inputs for each tap; a token's gate inputs are the sum of
    the rows ``first_row + numbers[token, tap]`` of all taps, or the row of its own number. skip: rows of `skip_columns` numbers, for
    a skip that is no block.
    """

    source: int
    columns: int
    depth: int = 0
    begins: int = 0
    numbers: int = 0
    number_bytes: int = 0
    first_row: int = 0
    row_count: int = 0
    taps: int = 1
    tap_stride: int = 0
    skip: int = 0
    skip_columns: int = 0


@dataclass(frozen=True, slots=True)
class ScanLayer:
    """The packed weights of an SRU or a QRNN.

    groups: the most threads; chunk_tokens: that are computed together; token_floats: scratch memory of a token, with its quantized
    values; operations: for each token, as multiplications; arrays: what the addresses refer to.
    """

    arguments: ScanArguments
    groups: int
    chunk_tokens: int
    token_floats: int
    operations: int
    arrays: tuple[Tensor, ...]

    def run(self, batch: launch.Arguments, gates: GateInputs, cells: launch.Arguments, outputs: launch.Arguments) -> None:
        """Encode a batch. batch, cells, outputs: a `BatchArguments`, a `RowStates` and an `OutputArrays`."""
        _, _, rows, tokens, _ = batch
        chunk = max(1, min(self.chunk_tokens, tokens))
        longs, floats = rows + 1 + 3 * chunk, rows * self.arguments.width + chunk * self.token_floats
        run_in_parts(
            launch.loops("kernels.scan.cpu_loops").run,
            (batch, chunk, self.arguments, gates, cells, outputs),
            self.groups,
            tokens * self.operations,
            launch.LONG_BYTES * longs + 3 * launch.ALIGNED_BYTES + launch.FLOAT_BYTES * floats,
        )


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the old cell in the forget gate and the gate of the hidden vector, (2 x hidden,) or None, and of the
    skip."""

    cell: Tensor | None = None
    skip: float = 1.0


def cell_states(state: Any, rows: int, hidden: int) -> tuple[launch.Arguments, Tensor, Any]:
    """Return the `RowStates` of the cells, the cells after the batch, and other arrays that the addresses refer to."""
    if state is None:
        after = torch.empty(rows, hidden)
        return (0, 0, after.data_ptr(), 0), after, None
    if state.slots is None:
        after, before = torch.empty(rows, hidden), launch.as_floats(state.cell)
        return (before.data_ptr(), 0, after.data_ptr(), 0), after, before
    slots = launch.as_longs(state.slots)
    sources = slots if state.sources is None else launch.as_longs(state.sources)
    cells = state.cell.data_ptr()
    return (cells, sources.data_ptr(), cells, slots.data_ptr()), state.cell, (slots, sources)


def product_layer(form: ScanForm, weight: Tensor, bias: Tensor, hidden: int, factors: Factors, *, int8: bool) -> ScanLayer:
    """Pack a layer with gate inputs that are a product. weight: (depth, blocks x hidden), bias: (blocks x hidden,), the early
    blocks first; int8: as in the weights."""
    from kernels.cpu.int8 import row_floats
    from kernels.cpu.products import PANEL_COLUMNS, pack_columns

    storage = panel_storage(weight, int8=int8)
    panels = pack_columns(_by_group(weight, form.blocks, PANEL_COLUMNS), 1, storage)
    packed_bias = _by_group(bias.float()[None], form.blocks, PANEL_COLUMNS)[0].contiguous()
    return _layer(
        form,
        hidden,
        panels,
        packed_bias,
        factors,
        storage,
        PANEL_COLUMNS,
        PRODUCT_TOKENS,
        len(weight) * form.blocks,
        row_floats(len(weight)) if storage == INT8 else 0,
    )


def row_layer(form: ScanForm, bias: Tensor, hidden: int, factors: Factors, storage: torch.dtype) -> ScanLayer:
    """Pack a layer with gate inputs that are rows of an array. bias: (blocks x hidden,), the early blocks first."""
    from kernels.cpu.products import PANEL_COLUMNS

    padded_bias = pad(bias.float().reshape(form.blocks, hidden), (0, -hidden % PANEL_COLUMNS))
    units = min(GATHERED_UNITS, padded_bias.shape[1])
    chunk = max(1, GATHERED_FLOATS // max(1, units * len(padded_bias)))
    return _layer(form, hidden, None, padded_bias, factors, STORAGES[storage], units, chunk, 0, 0)


def _layer(
    form: ScanForm,
    hidden: int,
    panels: Tensor | None,
    bias: Tensor,
    factors: Factors,
    storage: int,
    group_units: int,
    chunk_tokens: int,
    products: int,
    quantized_floats: int,
) -> ScanLayer:
    from kernels.cpu.products import PANEL_COLUMNS

    cell = bias.new_zeros(2, hidden) if factors.cell is None else factors.cell.float().reshape(2, hidden)
    packed_factors = torch.cat((pad(cell, (0, -hidden % PANEL_COLUMNS)).flatten(), torch.tensor([factors.skip])))
    width = (len(packed_factors) - 1) // 2
    addresses = 0 if panels is None else panels.data_ptr(), bias.data_ptr(), packed_factors.data_ptr()
    return ScanLayer(
        arguments=ScanArguments(form.number, hidden, storage, *addresses, width, max(group_units, 1)),
        groups=width // PANEL_COLUMNS,
        chunk_tokens=chunk_tokens,
        token_floats=form.with_skip_block.blocks * group_units + quantized_floats,
        operations=hidden * (products + STEP_OPERATIONS),
        arrays=(bias, packed_factors) if panels is None else (panels, bias, packed_factors),
    )


def _by_group(columns: Tensor, blocks: int, group: int) -> Tensor:
    """Return columns, (n, blocks x hidden), as (n, groups x blocks x group): the units of a group are together, with zeros
    after the last."""
    separate = columns.reshape(len(columns), blocks, columns.shape[1] // blocks)
    padded = pad(separate, (0, -separate.shape[2] % group))
    groups = padded.reshape(len(columns), blocks, padded.shape[2] // group, group)
    return groups.transpose(1, 2).flatten(1)
