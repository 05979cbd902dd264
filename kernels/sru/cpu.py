"""The SRU's launcher of the CPU loops: all steps of a ragged batch in one call, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import launch
from kernels.cpu.storage import as_stored_rows
from kernels.cpu.threads import run_in_parts
from kernels.norm import layer_norm
from kernels.ragged import Ragged, without_sources
from kernels.scan.cpu import (
    Factors,
    GateInputs,
    ScanLayer,
    cell_states,
    product_layer,
    row_layer,
)
from kernels.sru.types import SRUState, SRUWeights


@dataclass(frozen=True, slots=True)
class _Projection:
    """A packed projection: its width with padding, the scratch memory of a token's quantized values, its addresses and storage
    for the compiled product, and the arrays behind them."""

    width: int
    quantized_floats: int
    arguments: tuple[int, ...]
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Packed:
    """The layer, and its projection or table."""

    layer: ScanLayer
    projection: _Projection | None
    table: Tensor | None

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        projection = () if self.projection is None else self.projection.arrays
        return (*self.layer.arrays, *projection, *(() if self.table is None else (self.table,)))


def _run(x: Ragged, weights: SRUWeights, state: SRUState | None, outputs: launch.Arguments, reverse: int) -> SRUState:
    """Write the outputs to their addresses and return the state after the batch. reverse: 1 for the backward direction."""
    packed, offsets = _pack(x, weights), x.offsets.contiguous()
    batch = offsets.data_ptr(), offsets.itemsize, offsets.shape[0] - 1, x.data.shape[0], reverse
    states, cells, kept = cell_states(state, batch[2], packed.layer.arguments.hidden)
    arrays, gates = _gates(x, weights, packed)
    packed.layer.run(batch, gates, states, outputs)
    del arrays, kept  # the addresses refer to them until here
    return SRUState(cells) if state is None or state.slots is None else without_sources(state)


sru, bidirectional = launch.backend_functions(_run)
"""Encode every row in one direction, and in both. Shapes as in `kernels.sru.types`."""


def _gates(x: Ragged, weights: SRUWeights, packed: _Packed) -> tuple[tuple[Tensor, ...], GateInputs]:
    """Return arrays, and where the compiled loop finds the gate inputs and the skip in them."""
    if packed.table is not None:
        table, ids = packed.table, x.data.contiguous()
        rows = {"numbers": ids.data_ptr(), "number_bytes": ids.itemsize, "row_count": len(table)}
        return (ids,), GateInputs(table.data_ptr(), table.stride(0), **rows)
    data = launch.as_floats(x.data)
    columns = data.shape[1]
    if weights.input is None:
        return (data,), GateInputs(data.data_ptr(), columns)
    values, depth = data if weights.norm is None else layer_norm(data, weights.norm), columns
    if packed.projection is not None:
        values, depth = _project(values, packed.projection), weights.input.shape[0]
    skip, skip_columns = 0, 0
    if weights.skip_from is not None:
        skip, skip_columns = data.data_ptr() + launch.FLOAT_BYTES * weights.skip_from, columns
    gates = GateInputs(values.data_ptr(), values.shape[1], depth, skip=skip, skip_columns=skip_columns)
    return (data, values), gates


def _project(values: Tensor, projection: _Projection) -> Tensor:
    tokens, columns = values.shape
    out = torch.empty(tokens, projection.width)
    storage, *addresses = projection.arguments
    arguments = (tokens, storage, values.data_ptr(), columns, *addresses, projection.width, out.data_ptr())
    scratch = launch.aligned(launch.LONG_BYTES * tokens) + launch.FLOAT_BYTES * projection.quantized_floats * tokens
    operations = tokens * columns * projection.width
    run_in_parts(
        launch.loops("kernels.sru.cpu_loops").project, arguments, tokens, operations, scratch + 2 * launch.ALIGNED_BYTES
    )
    return out


def _pack(x: Ragged, weights: SRUWeights) -> _Packed:
    """Return the packed weights. Blocks as the data may have a skip block or not."""
    key = "cpu", x.data.shape[-1] if weights.input is None and weights.table is None else 0
    packed: _Packed | None = weights.packed.get(key)
    if packed is None:
        packed = weights.packed[key] = _pack_layer(x, weights)
    return packed


def _pack_layer(x: Ragged, weights: SRUWeights) -> _Packed:
    table = None if weights.table is None else as_stored_rows(weights.table)
    hidden = weights.hidden
    form = weights.scan_form(x.data)
    bias = torch.zeros(form.blocks * hidden)
    bias[hidden : 3 * hidden] = weights.bias
    factors = Factors(weights.cell, weights.scale if form.blocks == 3 else 1.0)
    if weights.input is not None:
        layer = product_layer(form, weights.input, bias, hidden, factors, int8=weights.int8)
    else:
        layer = row_layer(form, bias, hidden, factors, torch.float32 if table is None else table.dtype)
    projection = None if weights.projection is None else _pack_projection(weights.projection, int8=weights.int8)
    return _Packed(layer, projection, table)


def _pack_projection(projection: Tensor, *, int8: bool) -> _Projection:
    from kernels.cpu.int8 import row_floats
    from kernels.cpu.products import pack_columns, product_width
    from kernels.cpu.storage import INT8, panel_storage

    storage = panel_storage(projection, int8=int8)
    panels, width = pack_columns(projection, 1, storage), product_width(projection.shape[1])
    bias = torch.zeros(width)
    quantized_floats = row_floats(len(projection)) if storage == INT8 else 0
    return _Projection(width, quantized_floats, (storage, panels.data_ptr(), bias.data_ptr()), (panels, bias))
