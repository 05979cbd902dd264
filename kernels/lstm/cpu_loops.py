"""The LSTM's loop over the steps of a batch, compiled for the CPU.

A tile is LANES units of a few rows: the gate inputs of a step plus the products of the hidden state, for all gates of these
units, and then their new cells and hidden state. There are two hidden states, before and after a step, because every tile reads
the whole state before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiled import Codegen, Compiled, inner, llvm_code
from kernels.cpu.int8 import rows_of_product
from kernels.cpu.products import gate_inputs, max_rows, padded_width, sums_of_4, tile_memory, tile_rows, vector_bytes
from kernels.cpu.rows import (
    OutputArrays,
    add_step,
    begin_outputs,
    end_rows,
    floats,
    load_state,
    order_batch,
    still_running,
    store_state,
)
from kernels.cpu.vectors import FLOAT_BYTES, LANES, LONG_BYTES, Vectors, index
from kernels.lstm.types import LSTMWeights

BLOCKS = len(LSTMWeights.gates)
LARGEST = max_rows(BLOCKS)


@llvm_code
def update_cells(_typing: Any, rows: Any, gates: Any, cells: Any, hidden: Any, width: Any) -> tuple[Any, Codegen]:
    """Update LANES cells of each row of a tile and write their hidden state.

    gates: (rows, BLOCKS, LANES) float32, the gates before their activation; cells, hidden: rows with `width` numbers from row
    to row. All but numbers are addresses.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        rows, gates, cells, hidden, width = arguments
        code = Vectors(builder)
        gates_at, cells_at, hidden_at = (code.pointer(address) for address in (gates, cells, hidden))
        with cgutils.for_range(builder, rows, intp=rows.type) as loop:
            first, row_at = builder.mul(loop.index, index(BLOCKS * LANES)), builder.mul(loop.index, width)
            sums = [code.load(gates_at, builder.add(first, index(block * LANES))) for block in range(BLOCKS)]
            new_cell, new_hidden = _emit_cell(code, sums, code.load(cells_at, row_at))
            code.store(new_cell, cells_at, row_at)
            code.store(new_hidden, hidden_at, row_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


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
def advance(
    storage: int,
    running: int,
    gates: int,
    gate_offsets: int,
    block: int,
    before: int,
    row_offsets: int,
    hidden: int,
    recurrent: int,
    cells: int,
    after: int,
    width: int,
    sums: int,
    quantized: int,
) -> None:
    """Advance the running rows by one step, panel by panel.

    gates, gate_offsets, block: the gate inputs, where the inputs of each row begin, and the numbers from gate to gate; before,
    after, cells: rows of `width` numbers; row_offsets: where each row of `before` begins; sums, quantized: memory for the sums of
    a tile and for quantized rows.
    """
    values, begins = rows_of_product(storage, before, row_offsets, running, hidden, quantized)
    panel_bytes = BLOCKS * vector_bytes(storage, hidden)
    for panel in range(width // LANES):
        column = FLOAT_BYTES * LANES * panel
        row = 0
        while row < running:
            count = tile_rows(running - row, LARGEST)
            offset = LONG_BYTES * row
            sums_of_4(
                storage,
                count,
                gates + column,
                gate_offsets + offset,
                block,
                values,
                begins + offset,
                hidden,
                recurrent + panel_bytes * panel,
                sums,
                BLOCKS * LANES,
            )
            begin = FLOAT_BYTES * width * row + column
            update_cells(count, sums, cells + begin, after + begin, width)
            row += count


@Compiled
def run(
    part: int,
    parts: int,
    offsets: int,
    offset_bytes: int,
    rows: int,
    tokens: int,
    reverse: int,
    data: int,
    number_bytes: int,
    columns: int,
    storage: int,
    hidden: int,
    input: int,
    bias: int,
    recurrent: int,
    _recurrent_bias: int,
    table: int,
    table_rows: int,
    hidden_before: int,
    cell_before: int,
    sources: int,
    hidden_after: int,
    cell_after: int,
    slots: int,
    steps: int,
    last: int,
    mean: int,
    max: int,
    output_width: int,
    scratch: int,
) -> None:
    """Encode part `part` of `parts` of a batch's rows. Addresses are 0 for arrays that a call does not have.

    offset_bytes, number_bytes: of an offset and of a number of the data; scratch: memory as `kernels.lstm.cpu` computes it. The
    other arguments are those of `kernels.lstm.lstm` with packed weights.
    """
    width = padded_width(hidden)
    batch, step_tokens, gate_offsets, memory = order_batch(offsets, offset_bytes, rows, tokens, reverse, part, parts, scratch)
    outputs = OutputArrays(steps, last, mean, max, output_width)
    row_offsets, sums, quantized, memory = tile_memory(rows, width, memory)
    states, cells = memory, memory + 2 * FLOAT_BYTES * width * rows
    gates, block = gate_inputs(
        batch,
        step_tokens,
        gate_offsets,
        data,
        number_bytes,
        columns,
        storage,
        BLOCKS,
        hidden,
        input,
        bias,
        table,
        table_rows,
        cells + FLOAT_BYTES * width * rows,
    )
    load_state(batch, hidden_before, sources, hidden, states, width)
    load_state(batch, cell_before, sources, hidden, cells, width)
    begin_outputs(batch, outputs, hidden)
    before, after = states, states + FLOAT_BYTES * width * rows
    running, first = len(batch.order), 0
    for step in range(batch.steps):
        running = still_running(batch, running, step)
        offsets_at = gate_offsets.ctypes.data + LONG_BYTES * first
        advance(
            storage,
            running,
            gates,
            offsets_at,
            block,
            before,
            row_offsets,
            hidden,
            recurrent,
            cells,
            after,
            width,
            sums,
            quantized,
        )
        add_step(batch, outputs, running, step_tokens[first:], hidden, after, width)
        first += running
        before, after = after, before
    end_rows(batch, outputs, hidden, width, states, rows, hidden_after, slots)
    for position in range(len(batch.order)):
        store_state(batch, position, floats(cells + FLOAT_BYTES * width * position, hidden), cell_after, slots)
