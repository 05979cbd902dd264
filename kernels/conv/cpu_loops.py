"""Convolutions compiled for the CPU: text CNNs over folded tables, and stacks of convolutions.

The windows of a row of a text CNN are sums of table rows, and only their maximum over time is kept. A tile is a few vectors of maps. Its
maxima and the sums of a window stay in registers while all windows of a row pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.conv_numbers import RELU, ClassifierNumbers, LayerNumbers, MemorySizes
from kernels.cpu.convolutions import Memory, Steps, call_at, convolve, keep_contexts, layer_at, output_offsets, pool, table_rows
from kernels.cpu.launch import BatchArguments, OutputArrays
from kernels.cpu.products import product
from kernels.cpu.rows import aligned, floats, longs, number_at, row_ends
from kernels.cpu.scans import stored_bytes
from kernels.cpu.vectors import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    LONG,
    LONG_BYTES,
    REGISTERS,
    STORED,
    Vectors,
    for_each_case,
    index,
    vector_code,
)
from kernels.embedding import FIRST

TILE_VECTORS = min(8, REGISTERS // 4)
"""Vectors of the largest tile: each has a maximum and a sum."""


@vector_code
def max_of_windows(
    code: Vectors,
    storage: ir.Value,
    vectors: ir.Value,
    table: ir.Value,
    tap_numbers: ir.Value,
    row_numbers: ir.Value,
    steps: ir.Value,
    windows: ir.Value,
    stride: ir.Value,
    width: ir.Value,
    dilation: ir.Value,
    columns: ir.Value,
    maxima: ir.Value,
) -> None:
    """Write the maximum over the windows of a row, for up to `vectors` vectors of maps.

    table: the stored numbers of the first map, of row 0 and tap 0; steps: (windows + reach - 1,) int64 table rows; columns: the
    numbers that the last vector has in every table row; maxima: (vectors x LANES,) float32, of which only `columns` in the last
    vector are defined. All but numbers are addresses.
    """
    builder = code.builder
    steps_at, maxima_at = code.pointer(steps, LONG), code.pointer(maxima, FLOAT)
    mask = code.first_lanes(columns)

    def emit(stored: int, count: int) -> None:
        table_at = code.pointer(table, STORED[stored])
        highest = [code.variable(code.constant(-np.inf)) for _ in range(count)]
        with cgutils.for_range(builder, windows, intp=windows.type) as window:
            first_step = builder.mul(window.index, stride)
            sums = [code.variable() for _ in range(count)]
            for place in sums:
                builder.store(code.constant(0.0), place)
            with cgutils.for_range(builder, width, intp=width.type) as tap:
                step = builder.add(first_step, builder.mul(tap.index, dilation))
                row = builder.load(builder.gep(steps_at, [step]))
                first = builder.add(builder.mul(tap.index, tap_numbers), builder.mul(row, row_numbers))
                for number, place in enumerate(sums):
                    at = builder.add(first, index(number * LANES))
                    whole = number < count - 1
                    loaded = code.load_stored(table_at, at, stored) if whole else code.load_masked(table_at, at, stored, mask)
                    builder.store(builder.fadd(builder.load(place), loaded), place)
            for place, total in zip(highest, sums, strict=True):
                builder.store(code.maximum(builder.load(place), builder.load(total)), place)
        for number, place in enumerate(highest):
            code.store(builder.load(place), maxima_at, index(number * LANES))

    sizes = range(1, TILE_VECTORS + 1)
    for_each_case(
        builder,
        storage,
        tuple(STORED),
        lambda stored: for_each_case(builder, vectors, sizes, lambda count: emit(stored, count)),
    )


@Compiled
def text_cnn(
    part: int,
    parts: int,
    batch: BatchArguments,
    ids: int,
    id_bytes: int,
    layers: int,
    layer_count: int,
    outputs: int,
    maxima: int,
    classifier: ClassifierNumbers,
    scores: int,
    scratch: int,
) -> None:
    """Pool part `part` of `parts` of a batch's rows. Raises IndexError for an id outside of the tables.

    layers: (layer_count, LAYER_NUMBERS) int64, a `LayerNumbers` each; maxima: (rows, outputs) float32; scores: of the classifier, or
    0; scratch: memory as `kernels.conv.cpu` computes it.
    """
    begin, end = batch.rows * part // parts, batch.rows * (part + 1) // parts
    tile = scratch
    steps_address = scratch + FLOAT_BYTES * TILE_VECTORS * LANES
    for row in range(begin, end):
        first, last = row_ends(batch, row)
        column = outputs * row
        for number in range(layer_count):
            layer = layer_at(layers, number)
            steps = longs(steps_address, last - first + layer.left + layer.right)
            table_rows(layer.left, layer.height, ids, id_bytes, first, last, FIRST, steps)
            _pool(layer, steps, tile, floats(maxima + FLOAT_BYTES * column, layer.outputs))
            column += layer.outputs
    if scores:
        begins = longs(steps_address, end - begin)
        for row in range(begin, end):
            begins[row - begin] = outputs * row
        out = scores + FLOAT_BYTES * classifier.columns * begin
        product(
            *(classifier.storage, maxima, steps_address, end - begin, outputs),
            *(classifier.panels, classifier.bias, out, classifier.columns),
        )


@inner
def _pool(layer: LayerNumbers, steps: Any, tile: int, target: Any) -> None:
    """Write the activated maximum over the windows of a row, or zeros if it has none."""
    reach = (layer.width - 1) * layer.dilation + 1
    windows = (len(steps) - reach) // layer.stride + 1 if len(steps) >= reach else 0
    if not windows:
        target[:] = 0.0
        return
    number_bytes = stored_bytes(layer.storage)
    bias = floats(layer.bias, layer.outputs)
    highest = floats(tile, TILE_VECTORS * LANES)
    for column in range(0, layer.outputs, TILE_VECTORS * LANES):
        columns = min(layer.outputs - column, TILE_VECTORS * LANES)
        vectors = (columns + LANES - 1) // LANES
        max_of_windows(
            *(layer.storage, vectors, layer.table + number_bytes * column, layer.tap_numbers, layer.row_numbers),
            *(steps.ctypes.data, windows, layer.stride, layer.width, layer.dilation, columns - LANES * (vectors - 1), tile),
        )
        for number in range(columns):
            value = highest[number] + bias[column + number]
            target[column + number] = np.float32(0.0) if layer.activation == RELU and value < 0.0 else value


@Compiled
def stack(
    part: int,
    parts: int,
    batch: BatchArguments,
    data: int,
    id_bytes: int,
    layers: int,
    calls: int,
    layer_count: int,
    written: int,
    results: OutputArrays,
    sizes: MemorySizes,
    scratch: int,
) -> None:
    """Run all layers over part `part` of `parts` of a batch's rows. Raises IndexError for an id outside of the tables.

    data: input steps, or ids of `id_bytes` if the first layer has tables; layers: (layer_count, LAYER_NUMBERS) int64, a `LayerNumbers`
    each; calls: (layer_count, CALL_NUMBERS) int64, a `CallNumbers` each; written: (rows + 1,) int64, where the steps of each row begin in
    the results; scratch: memory as `kernels.conv.cpu_stack` computes it.
    """
    rows, steps = batch.rows, results.steps
    first, count = rows * part // parts, rows * (part + 1) // parts - rows * part // parts
    offsets_before, offsets_after = longs(scratch, count + 1), longs(scratch + LONG_BYTES * (count + 1), count + 1)
    rest = scratch + aligned(2 * LONG_BYTES * (count + 1))
    memory, buffers = _divided(rest, sizes)
    for row in range(count + 1):
        offsets_before[row] = number_at(batch.offsets, batch.offset_bytes, first + row)
    values, input_buffer, block_values, block_begin, block_buffer = data, -1, data, 0, -1
    for number in range(layer_count):
        layer, call = layer_at(layers, number), call_at(calls, number)
        if layer.begins_block:
            block_values, block_begin, block_buffer = values, offsets_before[0], input_buffer
        is_written = steps != 0 and number == layer_count - 1
        output_buffer = 0
        while output_buffer in (input_buffer, block_buffer):
            output_buffer += 1
        target = steps if is_written else buffers + aligned(FLOAT_BYTES * sizes.buffer) * output_buffer
        output_offsets(layer, offsets_before, longs(written, rows + 1)[first] if is_written else 0, offsets_after)
        inputs, outputs = Steps(values, offsets_before), Steps(target, offsets_after)
        convolve(layer, call, first, inputs, id_bytes, FIRST, block_values, block_begin, outputs, memory)
        if call.after:
            keep_contexts(layer, call, first, inputs)
        values, input_buffer = target, output_buffer
        offsets_before, offsets_after = offsets_after, offsets_before
    pool(Steps(values, offsets_before), first, results)


@inner
def _divided(memory: int, sizes: MemorySizes) -> tuple[Memory, int]:
    """Return the parts of the scratch memory, and where the buffers begin."""
    places = memory + aligned(LONG_BYTES * sizes.together)
    table_rows = places + aligned(LONG_BYTES * sizes.together)
    windows = table_rows + aligned(LONG_BYTES * sizes.table_rows)
    tile = windows + aligned(FLOAT_BYTES * sizes.windows)
    projected = tile + aligned(FLOAT_BYTES * sizes.tile)
    buffers = projected + aligned(FLOAT_BYTES * sizes.projected)
    return Memory(memory, places, table_rows, windows, tile, projected), buffers
