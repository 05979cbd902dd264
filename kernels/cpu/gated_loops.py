"""The loop over the steps of a batch that the LSTM and the GRU share, compiled for the CPU.

A tile is LANES units of a few rows: the gate inputs of a step plus the products of the hidden state, for some gates of these units,
and then what the cell makes of their sums. There are two hidden states, before and after a step, because every tile reads the whole
state before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.compiled import inner
from kernels.cpu.gated import GatedArguments
from kernels.cpu.int8 import rows_of_product
from kernels.cpu.launch import BatchArguments, OutputArrays, RowStates
from kernels.cpu.products import PANEL_COLUMNS, max_rows, padded_width, product, sums_of, tile_memory, tile_rows, vector_bytes
from kernels.cpu.rows import (
    Batch,
    add_step,
    begin_outputs,
    end_rows,
    floats,
    load_state,
    order_batch,
    still_running,
    store_state,
    table_row,
)
from kernels.cpu.storage import INT8
from kernels.cpu.vectors import FLOAT_BYTES, LANES, LONG_BYTES


class GatedStep(NamedTuple):
    """A step of the running rows.

    gates, gate_offsets, block: the gate inputs, where the inputs of each row begin, and the numbers from gate to gate; before, after:
    hidden states, rows of `width` numbers; own: the arrays of the family, each like a hidden state and `array_bytes` large; row_offsets:
    where each row of an array begins; sums, quantized: memory for the sums of a tile and for quantized rows; descending: whether the step
    takes panels from the last to the first. Every second step does: the panels that the step before it took last are still in the cache.
    """

    running: int
    weights: GatedArguments
    gates: int
    gate_offsets: int
    block: int
    before: int
    after: int
    own: int
    array_bytes: int
    width: int
    row_offsets: int
    sums: int
    quantized: int
    descending: bool


def tiles_of(gates: int, started: int, finish: Any) -> Any:
    """Return the compiled function that computes the tiles of a step, with `gates` gates in a tile, of which `started` have inputs that
    their sums start from.

    finish: makes use of the sums of a tile and a panel, from (step, sums, rows, column, place, gate_offsets): where the tile begins in a
    row and in an array, in bytes, and where the gate inputs of its rows begin. The function takes the step, the inputs of the first gate,
    the array of the rows in the product, and its panels.
    """
    largest = max_rows(gates)
    sums_of_rows, sums_of_two_panels = sums_of(gates, started), sums_of(gates, started, panels=2)

    @inner
    def tiles(step: GatedStep, inputs: int, states: int, panels: int) -> None:
        storage, hidden = step.weights.storage, step.weights.hidden
        values, begins = rows_of_product(storage, states, step.row_offsets, step.running, hidden, step.quantized)
        panel_bytes = gates * vector_bytes(storage, hidden)
        count_of_panels = step.width // LANES
        together = 2 if step.running == 1 and storage != INT8 and count_of_panels % 2 == 0 else 1
        groups = count_of_panels // together
        for position in range(groups):
            panel = together * (groups - 1 - position if step.descending else position)
            column = FLOAT_BYTES * LANES * panel
            row = 0
            if together == 2:
                sums_of_two_panels(
                    *(storage, 1, inputs + column, step.gate_offsets, step.block, values, begins, hidden),
                    *(panels + panel_bytes * panel, step.sums, gates * LANES),
                )
                for number in range(2):
                    at = column + FLOAT_BYTES * LANES * number
                    finish(step, step.sums + FLOAT_BYTES * LANES * gates * number, 1, at, at, step.gate_offsets)
                row = 1
            while row < step.running:
                count = tile_rows(step.running - row, largest)
                gate_offsets = step.gate_offsets + LONG_BYTES * row
                sums_of_rows(
                    *(storage, count, inputs + column, gate_offsets, step.block, values, begins + LONG_BYTES * row, hidden),
                    *(panels + panel_bytes * panel, step.sums, gates * LANES),
                )
                finish(step, step.sums, count, column, FLOAT_BYTES * step.width * row + column, gate_offsets)
                row += count

    return tiles


def gated_loop(gates: int, arrays: int, advance: Any) -> Any:
    """Return the compiled loop of a family with this number of gates.

    arrays: its own arrays in scratch memory, of which the first has the cells if the state has them; advance: advances the rows by a step.
    The loop encodes part `part` of `parts` of a batch's rows. data, number_bytes: the data and the bytes of one of its numbers; cell: of
    the state, or zeros; scratch: memory of `kernels.cpu.launch.scratch_bytes`.
    """

    @inner
    def loop(
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
        rows, units = call.rows, weights.hidden
        width = padded_width(units)
        batch, step_tokens, gate_offsets, memory = order_batch(call, part, parts, scratch)
        row_offsets, sums, quantized, states = tile_memory(rows, width, memory)
        array_bytes = FLOAT_BYTES * width * rows
        own = states + 2 * array_bytes
        memory = own + arrays * array_bytes
        inputs, block = gate_inputs(batch, step_tokens, gate_offsets, data, number_bytes, gates, weights, memory)
        load_state(batch, hidden, units, states, width)
        if cell.after:
            load_state(batch, cell, units, own, width)
        begin_outputs(batch, outputs, units)
        before, after = states, states + array_bytes
        running, first = len(batch.order), 0
        for step in range(batch.steps):
            running = still_running(batch, running, step)
            offsets = gate_offsets.ctypes.data + LONG_BYTES * first
            advance(
                GatedStep(
                    *(running, weights, inputs, offsets, block, before, after, own, array_bytes, width),
                    *(row_offsets, sums, quantized, step % 2 == 1),
                )
            )
            add_step(batch, outputs, running, step_tokens[first:], units, after, width)
            first += running
            before, after = after, before
        end_rows(batch, outputs, units, width, states, rows, hidden)
        if cell.after:
            for position in range(len(batch.order)):
                store_state(batch, position, floats(own + FLOAT_BYTES * width * position, units), cell)

    return loop


@inner
def gate_inputs(
    batch: Batch,
    tokens: Any,
    offsets: Any,
    data: int,
    number_bytes: int,
    blocks: int,
    weights: GatedArguments,
    memory: int,
) -> tuple[int, int]:
    """Return the address of the gate inputs and the numbers from block to block of a row. Rows are in the order of the steps.

    tokens: the numbers of the tokens, step by step; offsets: receives where each token's gate inputs begin; data: rows of
    numbers, which are the gate inputs themselves when there is no weight, or ids of `number_bytes` for a table of gate inputs; blocks: the
    gates; memory: for gate inputs that are computed or not aligned, and then for quantized data. Raises IndexError for an id outside of
    the table.
    """
    columns, hidden, table = weights.columns, weights.hidden, weights.table
    width = padded_width(hidden)
    for position in range(batch.tokens):
        row = tokens[position] if not table else table_row(data, number_bytes, tokens[position], 0, weights.table_rows)
        offsets[position] = columns * row
    if table:
        data = table
    if not weights.input and width == hidden:
        return data, hidden
    out_width = (blocks * width + PANEL_COLUMNS - 1) // PANEL_COLUMNS * PANEL_COLUMNS
    if weights.input:
        quantized = memory + FLOAT_BYTES * out_width * batch.tokens
        rows, begins = rows_of_product(weights.storage, data, offsets.ctypes.data, batch.tokens, columns, quantized)
        product(
            *(weights.storage, rows, begins, batch.tokens, columns, weights.input, weights.bias, memory, out_width),
        )
    else:
        for position in range(batch.tokens):
            row = floats(data + FLOAT_BYTES * offsets[position], columns)
            target = floats(memory + FLOAT_BYTES * out_width * position, out_width)
            for block in range(blocks):
                target[block * width : block * width + hidden] = row[block * hidden : (block + 1) * hidden]
                target[block * width + hidden : (block + 1) * width] = 0.0
    for position in range(batch.tokens):
        offsets[position] = position * out_width
    return memory, width
