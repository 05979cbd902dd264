"""The layers of a stack of convolutions inside compiled code: products of whole windows with packed filters, or sums of table rows, then
the activation and the residual.

A window whose steps are consecutive in memory is multiplied where it is. Any other window is copied first: one with a dilation, with
padding, or with steps of the state before the row. All parameters are numbers and addresses; values, states and outputs are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.np.unsafe.ndarray import to_fixed_tuple

from kernels.cpu.compiled import inner
from kernels.cpu.conv_numbers import GATED_TANH, GELU, GLU, RELU, TANH, CallNumbers, LayerNumbers
from kernels.cpu.launch import OutputArrays
from kernels.cpu.products import product
from kernels.cpu.rows import floats, longs, number_at
from kernels.cpu.scans import add_stored, stored_bytes
from kernels.cpu.vectors import FLOAT_BYTES, LANES, Vectors, for_each_case, index, vector_code

LAYER_NUMBERS, CALL_NUMBERS = len(LayerNumbers._fields), len(CallNumbers._fields)


class Steps(NamedTuple):
    """The steps of a part's rows. values: the address of rows of numbers; offsets: where the steps of each row begin in it."""

    values: int
    offsets: Any


class Memory(NamedTuple):
    """The addresses of the scratch memory of a part.

    begins, places: where each window begins in the values, and its output step; table_rows: of the steps of a row; windows: copied windows;
    tile, projected: results of products.
    """

    begins: int
    places: int
    table_rows: int
    windows: int
    tile: int
    projected: int


@vector_code
def _activate(code: Vectors, activation: ir.Value, values: ir.Value, gates: ir.Value, columns: ir.Value) -> None:
    """Apply an activation to `columns` numbers in place, and to the numbers up to a whole vector. values, gates: addresses."""
    builder = code.builder
    count = builder.udiv(builder.add(columns, index(LANES - 1)), index(LANES))
    values_at, gates_at = code.pointer(values), code.pointer(gates)

    def activated(kind: int, value: ir.Value, at: ir.Value) -> ir.Value:
        if kind == RELU:
            return code.maximum(value, code.constant(0.0))
        if kind == GELU:
            return code.gelu(value)
        result = code.tanh(value) if kind in (TANH, GATED_TANH) else value
        return result if kind == TANH else builder.fmul(result, code.sigmoid(code.load(gates_at, at)))

    def emit(kind: int) -> None:
        with cgutils.for_range(builder, count, intp=count.type) as loop:
            at = builder.mul(loop.index, index(LANES))
            code.store(activated(kind, code.load(values_at, at), at), values_at, at)

    for_each_case(builder, activation, (RELU, TANH, GELU, GLU, GATED_TANH), emit)


@inner
def layer_at(numbers: int, number: int) -> LayerNumbers:
    """Return a layer. numbers: the address of (layers, LAYER_NUMBERS) int64."""
    all_numbers = longs(numbers, LAYER_NUMBERS * (number + 1))
    return LayerNumbers(*to_fixed_tuple(all_numbers[LAYER_NUMBERS * number :], LAYER_NUMBERS))


@inner
def call_at(numbers: int, number: int) -> CallNumbers:
    """Return what a call adds to a layer. numbers: the address of (layers, CALL_NUMBERS) int64."""
    all_numbers = longs(numbers, CALL_NUMBERS * (number + 1))
    return CallNumbers(*to_fixed_tuple(all_numbers[CALL_NUMBERS * number :], CALL_NUMBERS))


@inner
def output_offsets(layer: LayerNumbers, offsets: Any, begin: int, written: Any) -> None:
    """Write where the output steps of each row begin. begin: of the first row."""
    reach = (layer.width - 1) * layer.dilation + 1
    written[0] = begin
    for row in range(len(offsets) - 1):
        padded = offsets[row + 1] - offsets[row] + layer.left + layer.right
        written[row + 1] = written[row] + ((padded - reach) // layer.stride + 1 if padded >= reach else 0)


@inner
def table_rows(left: int, height: int, ids: int, id_bytes: int, first: int, last: int, first_id: int, rows: Any) -> None:
    """Write the table rows of the ids from `first` to `last` and of the padding around them.

    left: steps of padding before them; height: rows of the table; first_id: the row of id 0.

    Raises IndexError for an id outside of the table.
    """
    rows[:left] = 0
    for token in range(first, last):
        number = number_at(ids, id_bytes, token)
        if number < 0 or number >= height - first_id:
            raise IndexError("a token id is outside of the table")
        rows[left + token - first] = number + first_id
    rows[left + last - first :] = 0


@inner
def convolve(
    layer: LayerNumbers,
    call: CallNumbers,
    first_row: int,
    inputs: Steps,
    id_bytes: int,
    first_id: int,
    block_values: int,
    block_begin: int,
    outputs: Steps,
    memory: Memory,
) -> None:
    """Compute the output steps of a layer.

    first_row: the number of the part's first row in the batch; inputs: the input steps, or ids of `id_bytes` for tables in which id 0 is
    row `first_id`; block_values, block_begin: the input steps of the layer's block, and the number of the part's first step among them.
    """
    begins, places = longs(memory.begins, layer.together), longs(memory.places, layer.together)
    depth, filled = layer.width * layer.inputs, 0
    for row in range(len(inputs.offsets) - 1):
        begin, steps = inputs.offsets[row], inputs.offsets[row + 1] - inputs.offsets[row]
        windows = outputs.offsets[row + 1] - outputs.offsets[row]
        computed = min(call.needed, (windows + call.spacing - 1) // call.spacing) if call.needed else windows
        if layer.takes_ids and computed:
            rows = longs(memory.table_rows, steps + layer.left + layer.right)
            table_rows(layer.left, layer.height, inputs.values, id_bytes, begin, begin + steps, first_id, rows)
        for number in range(computed):
            if filled == layer.together:
                _finish(layer, inputs.values, block_values, block_begin - outputs.offsets[0], outputs.values, filled, memory)
                filled = 0
            step = windows - 1 - (computed - 1 - number) * call.spacing
            places[filled] = outputs.offsets[row] + step
            if layer.takes_ids:
                _sum_rows(layer, step * layer.stride, memory, filled)
            else:
                first = step * layer.stride - layer.left
                copied = memory.windows + FLOAT_BYTES * depth * filled
                begins[filled] = _window(layer, call, first_row + row, inputs.values, begin, steps, first, copied)
            filled += 1
    if filled:
        _finish(layer, inputs.values, block_values, block_begin - outputs.offsets[0], outputs.values, filled, memory)


@inner
def _sum_rows(layer: LayerNumbers, first: int, memory: Memory, number: int) -> None:
    """Write the bias plus the table rows of a window. first: the first step of the window, counted from the padding."""
    number_bytes = stored_bytes(layer.storage)
    total = memory.tile + FLOAT_BYTES * layer.columns * number
    floats(total, layer.columns)[:] = floats(layer.bias, layer.columns)
    rows = longs(memory.table_rows, first + (layer.width - 1) * layer.dilation + 1)
    for tap in range(layer.width):
        row = layer.tap_numbers * tap + layer.row_numbers * rows[first + tap * layer.dilation]
        add_stored(layer.storage, layer.table + number_bytes * row, layer.outputs, total, total)
        if layer.gates:
            gates = layer.table + number_bytes * (row + layer.outputs)
            gates_total = total + FLOAT_BYTES * layer.gates
            add_stored(layer.storage, gates, layer.outputs, gates_total, gates_total)


@inner
def _window(
    layer: LayerNumbers, call: CallNumbers, row: int, values: int, begin: int, steps: int, first: int, copied: int
) -> int:
    """Return where the numbers of a window begin, counted from `values`, and copy them to `copied` if they are not consecutive.

    row: its number in the batch; begin, steps: of the row; first: the first step of the window, from `-left` on.
    """
    inputs = layer.inputs
    reach = (layer.width - 1) * layer.dilation + 1
    if first >= 0 and first + reach <= steps and (layer.dilation == 1 or layer.width == 1):
        return (begin + first) * inputs
    for tap in range(layer.width):
        step = first + tap * layer.dilation
        target = floats(copied + FLOAT_BYTES * inputs * tap, inputs)
        if step >= 0 and step < steps:
            target[:] = floats(values + FLOAT_BYTES * inputs * (begin + step), inputs)
        elif step < 0 and call.before:
            target[:] = _context(layer, call.before, call.sources, row, step)
        else:
            target[:] = 0.0
    return (copied - values) // FLOAT_BYTES


@inner
def _context(layer: LayerNumbers, states: int, slots: int, row: int, step: int) -> Any:
    """Return a step of the state of a row. step: from `-left` to -1, counted from the row's first step."""
    slot = longs(slots, row + 1)[row] if slots else row
    return floats(states + FLOAT_BYTES * layer.inputs * (layer.left * (slot + 1) + step), layer.inputs)


@inner
def _finish(
    layer: LayerNumbers, values: int, block_values: int, block_shift: int, outputs: int, count: int, memory: Memory
) -> None:
    """Compute `count` output steps from their windows, or from the sums of their table rows.

    values: in which the windows begin; block_values, block_shift: the input steps of the block, and what is added to the number of an
    output step to find its input step among them.
    """
    if not layer.takes_ids:
        product(
            *(layer.storage, values, memory.begins, count, layer.width * layer.inputs),
            *(layer.panels, layer.bias, memory.tile, layer.columns),
        )
    row_bytes = FLOAT_BYTES * layer.columns
    for number in range(count):
        row = memory.tile + row_bytes * number
        _activate(layer.activation, row, row + FLOAT_BYTES * layer.gates, layer.outputs)
    if layer.adds_input:
        _add_input(layer, block_values, block_shift, count, memory)
        for number in range(count):
            _activate(layer.block_activation, memory.tile + row_bytes * number, 0, layer.outputs)
    places = longs(memory.places, count)
    for number in range(count):
        target = floats(outputs + FLOAT_BYTES * layer.outputs * places[number], layer.outputs)
        target[:] = floats(memory.tile + row_bytes * number, layer.outputs)


@inner
def _add_input(layer: LayerNumbers, values: int, shift: int, count: int, memory: Memory) -> None:
    """Add the input of the block, or its projection, to `count` results. values, shift: as `block_values` and `block_shift` above."""
    places, begins = longs(memory.places, count), longs(memory.begins, count)
    for number in range(count):
        begins[number] = layer.block_inputs * (places[number] + shift)
    added, columns = values, layer.block_inputs
    if layer.projects:
        product(
            *(layer.projection_storage, values, memory.begins, count, layer.block_inputs),
            *(layer.projection, layer.projection_bias, memory.projected, layer.projection_columns),
        )
        added, columns = memory.projected, layer.projection_columns
        for number in range(count):
            begins[number] = columns * number
    for number in range(count):
        total = floats(memory.tile + FLOAT_BYTES * layer.columns * number, layer.outputs)
        other = floats(added + FLOAT_BYTES * begins[number], layer.outputs)
        for column in range(layer.outputs):
            total[column] += other[column]


@inner
def keep_contexts(layer: LayerNumbers, call: CallNumbers, first_row: int, inputs: Steps) -> None:
    """Write the states after the call: the last `left` steps of each row and of the state before it."""
    for row in range(len(inputs.offsets) - 1):
        steps = inputs.offsets[row + 1] - inputs.offsets[row]
        # A state may replace itself: a step is read before an earlier step is written over it.
        for position in range(-layer.left, 0):
            target = _context(layer, call.after, call.slots, first_row + row, position)
            step = steps + position
            if step >= 0:
                target[:] = floats(inputs.values + FLOAT_BYTES * layer.inputs * (inputs.offsets[row] + step), layer.inputs)
            elif call.before:
                target[:] = _context(layer, call.before, call.sources, first_row + row, step)
            else:
                target[:] = 0.0


@inner
def pool(steps: Steps, first_row: int, outputs: OutputArrays) -> None:
    """Write the last step, the mean and the maximum of each row, zeros for a row without steps."""
    columns = outputs.width
    for row in range(len(steps.offsets) - 1):
        count = steps.offsets[row + 1] - steps.offsets[row]
        first = steps.values + FLOAT_BYTES * columns * steps.offsets[row]
        at = FLOAT_BYTES * outputs.width * (first_row + row)
        if outputs.last:
            target = floats(outputs.last + at, columns)
            if count:
                target[:] = floats(first + FLOAT_BYTES * columns * (count - 1), columns)
            else:
                target[:] = 0.0
        if outputs.mean:
            target = floats(outputs.mean + at, columns)
            target[:] = 0.0
            for step in range(count):
                values = floats(first + FLOAT_BYTES * columns * step, columns)
                for column in range(columns):
                    target[column] += values[column]
            for column in range(columns):
                target[column] /= np.float32(max(count, 1))
        if outputs.max:
            target = floats(outputs.max + at, columns)
            target[:] = -np.inf if count else 0.0
            for step in range(count):
                values = floats(first + FLOAT_BYTES * columns * step, columns)
                for column in range(columns):
                    value = values[column]
                    # The second comparison is true for a value that is not a number, which then stays.
                    target[column] = value if value > target[column] or value != value else target[column]
