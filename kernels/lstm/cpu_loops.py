"""The LSTM's cell and its loop over the steps of a batch, compiled for the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.gated import GatedArguments
from kernels.cpu.gated_loops import GatedStep, gated_loop, tiles_of
from kernels.cpu.launch import BatchArguments, OutputArrays, RowStates
from kernels.cpu.vectors import LANES, Vectors, index, vector_code
from kernels.lstm.types import LSTMWeights

BLOCKS = len(LSTMWeights.gates)


@vector_code
def update_cells(code: Vectors, rows: ir.Value, gates: ir.Value, cells: ir.Value, hidden: ir.Value, width: ir.Value) -> None:
    """Update LANES cells of each row of a tile and write their hidden state.

    gates: (rows, BLOCKS, LANES) float32, the gates before their activation; cells, hidden: rows with `width` numbers from row
    to row. All but numbers are addresses.
    """
    builder = code.builder
    gates_at, cells_at, hidden_at = (code.pointer(address) for address in (gates, cells, hidden))
    with cgutils.for_range(builder, rows, intp=rows.type) as loop:
        first, row_at = builder.mul(loop.index, index(BLOCKS * LANES)), builder.mul(loop.index, width)
        sums = [code.load(gates_at, builder.add(first, index(block * LANES))) for block in range(BLOCKS)]
        new_cell, new_hidden = _emit_cell(code, sums, code.load(cells_at, row_at))
        code.store(new_cell, cells_at, row_at)
        code.store(new_hidden, hidden_at, row_at)


def _emit_cell(code: Vectors, gates: Sequence[ir.Value], cell: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the new cell and hidden state. Each product of a sigmoid and a tanh is one division."""
    build = code.builder
    input_gate, forget_gate, cell_gate, output_gate = gates
    added, divisor = code.tanh_fraction(cell_gate)
    added = build.fdiv(added, build.fmul(code.sigmoid_divisor(input_gate), divisor))
    cell = build.fadd(build.fdiv(cell, code.sigmoid_divisor(forget_gate)), added)
    hidden, divisor = code.tanh_fraction(cell)
    return cell, build.fdiv(hidden, build.fmul(code.sigmoid_divisor(output_gate), divisor))


@inner
def _finish(step: GatedStep, sums: int, rows: int, _column: int, place: int, _gate_offsets: int) -> None:
    update_cells(rows, sums, step.own + place, step.after + place, step.width)


_tiles = tiles_of(BLOCKS, BLOCKS, _finish)


@inner
def _advance(step: GatedStep) -> None:
    _tiles(step, step.gates, step.before, step.weights.recurrent)


_loop = gated_loop(BLOCKS, 1, _advance)


@Compiled
def run(
    part: int,
    parts: int,
    call: BatchArguments,
    data: int,
    number_bytes: int,
    weights: GatedArguments,
    hidden: RowStates,
    cell: RowStates,
    outputs: OutputArrays,
    scratch: int,
) -> None:
    """Encode part `part` of `parts` of a batch's rows, as in `gated_loop`."""
    _loop(part, parts, call, data, number_bytes, weights, hidden, cell, outputs, scratch)
