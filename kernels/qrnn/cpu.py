"""The QRNN's launcher of the CPU loops: all steps of a ragged batch in one call, without padding and without copies of
windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import launch
from kernels.cpu.storage import as_stored_rows
from kernels.embedding import FIRST
from kernels.qrnn.types import POOLINGS, QRNNState, QRNNWeights
from kernels.ragged import Ragged, without_sources
from kernels.scan.cpu import (
    Factors,
    GateInputs,
    ScanLayer,
    cell_states,
    product_layer,
    row_layer,
)

LOOPS = "kernels.qrnn.cpu_loops"
BLOCKS = {"f": (0, 1), "fo": (0, 1, 2), "ifo": (0, 1, 3, 2)}
"""The blocks of each pooling in the order of the compiled loop: the output gate is the last."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """The layer in one direction, and its tables."""

    layer: ScanLayer
    tables: Tensor | None

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (*self.layer.arrays, *(() if self.tables is None else (self.tables,)))


def _run(x: Ragged, weights: QRNNWeights, state: QRNNState | None, outputs: launch.Arguments, reverse: int) -> QRNNState:
    """Write the outputs to their addresses and return the state after the batch. reverse: 1 for the backward direction."""
    packed, offsets = _pack(weights, reverse), x.offsets.contiguous()
    batch = offsets.data_ptr(), offsets.itemsize, offsets.shape[0] - 1, x.data.shape[0], reverse
    states, cells, kept = cell_states(state, batch[2], packed.layer.arguments.hidden)
    lefts, left, left_before = _lefts(x, weights, state, states)
    arrays, gates = _gates(x, weights, packed, batch, lefts)
    packed.layer.run(batch, gates, states, outputs)
    del arrays, kept, left_before  # the addresses refer to them until here
    return QRNNState(cells, left) if state is None or state.slots is None else without_sources(state)


qrnn, bidirectional = launch.backend_functions(_run)
"""Encode every row in one direction, and in both. Shapes as in `kernels.qrnn.types`."""


def _lefts(
    x: Ragged, weights: QRNNWeights, state: QRNNState | None, cells: launch.Arguments
) -> tuple[launch.Arguments, Tensor, Tensor | None]:
    """Return the addresses of the steps before the rows and after them; the steps after the rows; and an array that the addresses
    refer to. cells: the addresses of the cells, with the same slots."""
    if state is not None and state.slots is not None:
        left = state.left
        return (left.data_ptr(), cells[1], left.data_ptr(), cells[3]), left, None
    before, shape = None if state is None else state.left, (x.rows, weights.window - 1)
    if weights.tables is not None:
        after = torch.empty(shape, dtype=torch.int64)
        before = None if before is None else before.contiguous()
    else:
        after = torch.empty(*shape, x.data.shape[1])
        before = None if before is None else launch.as_floats(before)
    return (0 if before is None else before.data_ptr(), 0, after.data_ptr(), 0), after, before


def _gates(
    x: Ragged, weights: QRNNWeights, packed: _Packed, batch: launch.Arguments, lefts: launch.Arguments
) -> tuple[tuple[Tensor, ...], GateInputs]:
    """Return arrays, and where the compiled loop finds the gate inputs in them. Writes the steps after the rows."""
    taps, tables = weights.window, packed.tables
    if tables is not None:
        numbers, first = x.data.contiguous(), FIRST
        if taps > 1:
            numbers, first = _find_rows(numbers, tables, batch, lefts), 0
        rows = {
            "numbers": numbers.data_ptr(),
            "number_bytes": numbers.itemsize,
            "first_row": first,
            "row_count": tables.shape[1],
        }
        return (numbers,), GateInputs(tables.data_ptr(), tables.stride(1), taps=taps, tap_stride=tables.stride(0), **rows)
    data = launch.as_floats(x.data)
    source, columns = data.data_ptr(), data.shape[1]
    if weights.input is None:
        return (data,), GateInputs(source, columns)
    if taps == 1:
        return (data,), GateInputs(source, columns, columns)
    begins = _find_windows(data, taps, batch, lefts)
    return (data, begins), GateInputs(source, columns, taps * columns, begins.data_ptr())


def _find_rows(ids: Tensor, tables: Tensor, batch: launch.Arguments, lefts: launch.Arguments) -> Tensor:
    """Return the rows of the tables in each token's window. Raises IndexError for a row outside of the tables."""
    taps, height, _ = tables.shape
    numbers = torch.empty(ids.shape[0], taps, dtype=torch.int64)
    launch.loops(LOOPS).find_rows(ids.data_ptr(), ids.itemsize, FIRST, height, batch, taps, lefts, numbers.data_ptr())
    return numbers


def _find_windows(data: Tensor, taps: int, batch: launch.Arguments, lefts: launch.Arguments) -> Tensor:
    """Return where each token's window begins, followed by memory for a copy of the steps around the beginnings of the
    rows."""
    tokens, columns = data.shape
    edges = batch[2] * (taps - 1) * columns  # two float32 steps in the memory of one int64 step
    begins = torch.empty(tokens + edges, dtype=torch.int64)
    begins_at = begins.data_ptr()
    launch.loops(LOOPS).find_windows(
        data.data_ptr(), columns, batch, taps, lefts, begins_at + launch.LONG_BYTES * tokens, begins_at
    )
    return begins


def _pack(weights: QRNNWeights, reverse: int) -> _Packed:
    """Return the packed weights. The steps of a window are in the order of memory, which is different for each direction."""
    key = "cpu", reverse if weights.input is not None else 0
    packed: _Packed | None = weights.packed.get(key)
    if packed is None:
        packed = weights.packed[key] = _pack_layer(weights, reverse)
    return packed


def _pack_layer(weights: QRNNWeights, reverse: int) -> _Packed:
    form, hidden, blocks = weights.scan_form, weights.hidden, POOLINGS[weights.pooling]
    order = list(BLOCKS[weights.pooling])
    bias = weights.bias.view(blocks, hidden)[order].flatten()
    if weights.input is not None:
        taps = weights.input if reverse else weights.input.flip(0)
        matrix = taps.flatten(0, 1).view(-1, blocks, hidden)[:, order].flatten(1)
        return _Packed(product_layer(form, matrix, bias, hidden, Factors(), int8=weights.int8), None)
    tables = None if weights.tables is None else as_stored_rows(weights.tables)
    storage = torch.float32 if tables is None else tables.dtype
    return _Packed(row_layer(form, bias, hidden, Factors(), storage), tables)
