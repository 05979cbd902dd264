"""The GRU's loop over the steps of a batch, compiled for the CPU.

A tile is LANES units of a few rows. With the reset after the product, it is the gate inputs of a step plus the products of the
hidden state, for all gates of these units, and then their new hidden state. With the reset before the product, the tiles of a
step first compute the reset and update gates of all units, and then the new gate, whose product takes the reset hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiled import Codegen, Compiled, inner, llvm_code
from kernels.cpu.int8 import rows_of_product
from kernels.cpu.products import (
    gate_inputs,
    max_rows,
    padded_width,
    sums_of_1,
    sums_of_2,
    sums_of_3,
    tile_memory,
    tile_rows,
    vector_bytes,
)
from kernels.cpu.rows import OutputArrays, add_step, begin_outputs, end_rows, load_state, order_batch, still_running
from kernels.cpu.vectors import FLOAT, FLOAT_BYTES, LANES, LONG, LONG_BYTES, Vectors, index

BLOCKS = 3
RESET_AND_UPDATE, NEW = 2, 1
"""Gates that a tile computes together with the reset before the product."""
LARGEST, LARGEST_RESET_AND_UPDATE, LARGEST_NEW = max_rows(BLOCKS), max_rows(RESET_AND_UPDATE), max_rows(NEW)


@llvm_code
def update_hidden(
    _typing: Any, rows: Any, gates: Any, new_inputs: Any, offsets: Any, bias: Any, before: Any, after: Any, width: Any
) -> tuple[Any, Codegen]:
    """Write the new hidden state of LANES units of each row of a tile, with the reset after the product.

    gates: (rows, BLOCKS, LANES) float32, the reset and update gates before their activation and the product of the new gate
    without its bias; new_inputs, offsets: the inputs of the new gate and where each row's begin, int64; bias: of the product of
    the new gate; before, after: rows with `width` numbers from row to row. All but numbers are addresses.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        rows, gates, new_inputs, offsets, bias, before, after, width = arguments
        code = Vectors(builder)
        offsets_at = code.pointer(offsets, LONG)
        gates_at, inputs_at, bias_at, before_at, after_at = (
            code.pointer(address, FLOAT) for address in (gates, new_inputs, bias, before, after)
        )
        recurrent_bias = code.load(bias_at, index(0))
        with cgutils.for_range(builder, rows, intp=rows.type) as loop:
            first, row_at = builder.mul(loop.index, index(BLOCKS * LANES)), builder.mul(loop.index, width)
            reset, update, product = (code.load(gates_at, builder.add(first, index(block * LANES))) for block in range(BLOCKS))
            new_input = code.load(inputs_at, builder.load(builder.gep(offsets_at, [loop.index])))
            reset_product = builder.fdiv(builder.fadd(product, recurrent_bias), code.sigmoid_divisor(reset))
            new = code.tanh(builder.fadd(new_input, reset_product))
            code.store(_emit_mix(code, code.load(before_at, row_at), new, update), after_at, row_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@llvm_code
def reset_hidden(
    _typing: Any, rows: Any, gates: Any, before: Any, updates: Any, reset_states: Any, width: Any
) -> tuple[Any, Codegen]:
    """Write the update gates of a tile, before their activation, and its hidden state times the reset gate.

    gates: (rows, RESET_AND_UPDATE, LANES) float32, before their activation; before, updates, reset_states: rows with `width`
    numbers from row to row. All but numbers are addresses.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        rows, gates, before, updates, reset_states, width = arguments
        code = Vectors(builder)
        gates_at, before_at, updates_at, reset_at = (
            code.pointer(address) for address in (gates, before, updates, reset_states)
        )
        with cgutils.for_range(builder, rows, intp=rows.type) as loop:
            first, row_at = builder.mul(loop.index, index(RESET_AND_UPDATE * LANES)), builder.mul(loop.index, width)
            reset, update = code.load(gates_at, first), code.load(gates_at, builder.add(first, index(LANES)))
            code.store(builder.fdiv(code.load(before_at, row_at), code.sigmoid_divisor(reset)), reset_at, row_at)
            code.store(update, updates_at, row_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@llvm_code
def mix_hidden(_typing: Any, rows: Any, gates: Any, before: Any, updates: Any, after: Any, width: Any) -> tuple[Any, Codegen]:
    """Write the new hidden state of LANES units of each row of a tile.

    gates: (rows, LANES) float32, the new gate before its activation; before, updates, after: rows with `width` numbers from row
    to row, the updates before their activation. All but numbers are addresses.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        rows, gates, before, updates, after, width = arguments
        code = Vectors(builder)
        gates_at, before_at, updates_at, after_at = (code.pointer(address) for address in (gates, before, updates, after))
        with cgutils.for_range(builder, rows, intp=rows.type) as loop:
            row_at = builder.mul(loop.index, width)
            new = code.tanh(code.load(gates_at, builder.mul(loop.index, index(LANES))))
            mixed = _emit_mix(code, code.load(before_at, row_at), new, code.load(updates_at, row_at))
            code.store(mixed, after_at, row_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _emit_mix(code: Vectors, hidden: ir.Value, new: ir.Value, update: ir.Value) -> ir.Value:
    """Return ``(1 - z) * new + z * hidden`` for the update gate z, with one division."""
    build = code.builder
    return build.fadd(new, build.fdiv(build.fsub(hidden, new), code.sigmoid_divisor(update)))


@inner
def reset_after(
    storage: int,
    running: int,
    gates: int,
    gate_offsets: int,
    block: int,
    before: int,
    row_offsets: int,
    hidden: int,
    recurrent: int,
    recurrent_bias: int,
    after: int,
    width: int,
    sums: int,
    quantized: int,
) -> None:
    """Advance the running rows by one step, panel by panel.

    gates, gate_offsets, block: the gate inputs, where the inputs of each row begin, and the numbers from gate to gate; before,
    after: rows of `width` numbers; row_offsets: where each row of `before` begins; sums, quantized: memory for the sums of a tile
    and for quantized rows.
    """
    values, begins = rows_of_product(storage, before, row_offsets, running, hidden, quantized)
    panel_bytes = BLOCKS * vector_bytes(storage, hidden)
    for panel in range(width // LANES):
        column = FLOAT_BYTES * LANES * panel
        row = 0
        while row < running:
            count = tile_rows(running - row, LARGEST)
            offset = LONG_BYTES * row
            sums_of_3(
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
            new_inputs = gates + column + FLOAT_BYTES * RESET_AND_UPDATE * block
            begin = FLOAT_BYTES * width * row + column
            update_hidden(
                count, sums, new_inputs, gate_offsets + offset, recurrent_bias + column, before + begin, after + begin, width
            )
            row += count


@inner
def reset_before(
    storage: int,
    running: int,
    gates: int,
    gate_offsets: int,
    block: int,
    before: int,
    row_offsets: int,
    hidden: int,
    recurrent: int,
    updates: int,
    reset_states: int,
    after: int,
    width: int,
    sums: int,
    quantized: int,
) -> None:
    """Advance the running rows by one step. updates, reset_states: memory for rows of `width` numbers; the rest as in
    `reset_after`."""
    column_bytes = vector_bytes(storage, hidden)
    panels = width // LANES
    values, begins = rows_of_product(storage, before, row_offsets, running, hidden, quantized)
    for panel in range(panels):
        column = FLOAT_BYTES * LANES * panel
        row = 0
        while row < running:
            count = tile_rows(running - row, LARGEST_RESET_AND_UPDATE)
            offset = LONG_BYTES * row
            weights = recurrent + RESET_AND_UPDATE * column_bytes * panel
            sums_of_2(
                storage,
                count,
                gates + column,
                gate_offsets + offset,
                block,
                values,
                begins + offset,
                hidden,
                weights,
                sums,
                RESET_AND_UPDATE * LANES,
            )
            begin = FLOAT_BYTES * width * row + column
            reset_hidden(count, sums, before + begin, updates + begin, reset_states + begin, width)
            row += count
    values, begins = rows_of_product(storage, reset_states, row_offsets, running, hidden, quantized)
    for panel in range(panels):
        column = FLOAT_BYTES * LANES * panel
        row = 0
        while row < running:
            count = tile_rows(running - row, LARGEST_NEW)
            offset = LONG_BYTES * row
            weights = recurrent + column_bytes * (RESET_AND_UPDATE * panels + panel)
            new_inputs = gates + column + FLOAT_BYTES * RESET_AND_UPDATE * block
            sums_of_1(
                storage,
                count,
                new_inputs,
                gate_offsets + offset,
                block,
                values,
                begins + offset,
                hidden,
                weights,
                sums,
                LANES,
            )
            begin = FLOAT_BYTES * width * row + column
            mix_hidden(count, sums, before + begin, updates + begin, after + begin, width)
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
    recurrent_bias: int,
    table: int,
    table_rows: int,
    hidden_before: int,
    sources: int,
    hidden_after: int,
    slots: int,
    steps: int,
    last: int,
    mean: int,
    max: int,
    output_width: int,
    scratch: int,
) -> None:
    """Encode part `part` of `parts` of a batch's rows. Addresses are 0 for arrays that a call does not have.

    offset_bytes, number_bytes: of an offset and of a number of the data; scratch: memory as `kernels.gru.cpu` computes it. The
    other arguments are those of `kernels.gru.gru` with packed weights.
    """
    width = padded_width(hidden)
    batch, step_tokens, gate_offsets, memory = order_batch(offsets, offset_bytes, rows, tokens, reverse, part, parts, scratch)
    outputs = OutputArrays(steps, last, mean, max, output_width)
    row_offsets, sums, quantized, states = tile_memory(rows, width, memory)
    array_bytes = FLOAT_BYTES * width * rows
    updates, reset_states, memory = states + 2 * array_bytes, states + 3 * array_bytes, states + 4 * array_bytes
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
        memory,
    )
    load_state(batch, hidden_before, sources, hidden, states, width)
    begin_outputs(batch, outputs, hidden)
    before, after = states, states + array_bytes
    running, first = len(batch.order), 0
    for step in range(batch.steps):
        running = still_running(batch, running, step)
        at = gate_offsets.ctypes.data + LONG_BYTES * first
        if recurrent_bias:
            reset_after(
                storage,
                running,
                gates,
                at,
                block,
                before,
                row_offsets,
                hidden,
                recurrent,
                recurrent_bias,
                after,
                width,
                sums,
                quantized,
            )
        else:
            reset_before(
                storage,
                running,
                gates,
                at,
                block,
                before,
                row_offsets,
                hidden,
                recurrent,
                updates,
                reset_states,
                after,
                width,
                sums,
                quantized,
            )
        add_step(batch, outputs, running, step_tokens[first:], hidden, after, width)
        first += running
        before, after = after, before
    end_rows(batch, outputs, hidden, width, states, rows, hidden_after, slots)
