"""The loops of the SRU and the QRNN, compiled for the CPU.

The tokens are computed in chunks, and a chunk in groups of units. For each group, the gate inputs of all tokens of the chunk
are a product or rows of a table. Then the cells of these units run over the chunk's part of every row while the gate inputs
are in the cache. The units are independent of each other, so a thread takes a part of the units of all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.int8 import rows_of_product
from kernels.cpu.launch import BatchArguments, OutputArrays, RowStates
from kernels.cpu.products import PANEL_COLUMNS, VECTORS, product, vector_bytes
from kernels.cpu.rows import check_rows, floats, longs, number_at
from kernels.cpu.scans import add_stored, scan, stored_bytes
from kernels.cpu.vectors import FLOAT_BYTES, LONG_BYTES
from kernels.scan.cpu import GateInputs, ScanArguments
from kernels.scan.forms import FORMS, ScanForm

EARLY = np.array([form.early for form in FORMS])
LATE = np.array([form.late for form in FORMS])
SKIP = np.array([form.skip for form in FORMS])
IFO = ScanForm(4).number


class Chunk(NamedTuple):
    """A chunk of the tokens. late: the tokens that need a hidden vector; every: whether all tokens do."""

    offsets: Any
    reverse: int
    begin: int
    end: int
    row: int
    late: Any
    every: bool


class Scratch(NamedTuple):
    """Memory of a chunk and a group of units: early and late blocks, the skip, quantized values, and the beginnings of values."""

    early: int
    late: int
    skip: int
    quantized: int
    early_begins: Any
    late_begins: Any


class Group(NamedTuple):
    """Consecutive units: the first, how many with padding, and how many without."""

    first: int
    units: int
    real: int


@Compiled
def run(
    part: int,
    parts: int,
    batch: BatchArguments,
    chunk_tokens: int,
    layer: ScanArguments,
    gates: GateInputs,
    states: RowStates,
    outputs: OutputArrays,
    scratch: int,
) -> None:
    """Encode part `part` of `parts` of a layer's units, in chunks of up to `chunk_tokens` tokens and groups of units. With weights,
    a group is one panel of each block.

    scratch: memory as `kernels.scan.cpu` computes it. Raises IndexError for a row outside of the table, before anything is written.
    """
    rows, tokens, form, group_units = batch.rows, batch.tokens, layer.form, layer.group_units
    if gates.numbers:
        check_rows(gates.numbers, gates.number_bytes, tokens * gates.taps, gates.first_row, gates.row_count)
    groups = layer.width // PANEL_COLUMNS
    first, end = groups * part // parts * PANEL_COLUMNS, groups * (part + 1) // parts * PANEL_COLUMNS
    own = Group(first, end - first, min(end, layer.hidden) - first)
    begin_of_rows = longs(scratch, rows + 1)
    for row in range(rows + 1):
        begin_of_rows[row] = number_at(batch.offsets, batch.offset_bytes, row)
    lists = longs(scratch + LONG_BYTES * (rows + 1), 3 * chunk_tokens)
    cells = scratch + LONG_BYTES * (rows + 1 + 3 * chunk_tokens)
    cells += -cells % 64
    memory = cells + FLOAT_BYTES * layer.width * rows
    early = memory
    late = early + FLOAT_BYTES * chunk_tokens * EARLY[form] * group_units
    late_blocks = LATE[form] + SKIP[form]
    room = Scratch(
        early,
        late,
        late + FLOAT_BYTES * chunk_tokens * LATE[form] * group_units,
        late + FLOAT_BYTES * chunk_tokens * late_blocks * group_units,
        lists[:chunk_tokens],
        lists[chunk_tokens : 2 * chunk_tokens],
    )
    _begin_rows(begin_of_rows, own, layer, states, cells, outputs)
    every = outputs.steps != 0 or outputs.mean != 0 or outputs.max != 0
    chunks = (tokens + chunk_tokens - 1) // chunk_tokens
    for number in range(chunks):
        begin = chunk_tokens * (chunks - 1 - number if batch.reverse else number)
        chunk_end = min(begin + chunk_tokens, tokens)
        row = int(np.searchsorted(begin_of_rows, begin, side="right")) - 1
        late_tokens = _late_tokens(begin_of_rows, batch.reverse, begin, chunk_end, row, every, lists[2 * chunk_tokens :])
        chunk = Chunk(begin_of_rows, batch.reverse, begin, chunk_end, row, late_tokens, every)
        rows_at, begins_at = _find_values(layer, gates, chunk, room) if layer.weights else (0, 0)
        for unit in range(first, end, group_units):
            units = min(group_units, end - unit)
            group = Group(unit, units, min(units, layer.hidden - unit))
            _gate_inputs(layer, gates, chunk, group, room, rows_at, begins_at)
            _scan_rows(layer, gates, chunk, group, room, cells, outputs)
    _end_rows(begin_of_rows, own, layer, states, cells, outputs)


@inner
def _begin_rows(offsets: Any, own: Group, layer: ScanArguments, states: RowStates, cells: int, outputs: OutputArrays) -> None:
    """Copy the cells that the rows start from, and prepare the outputs."""
    for row in range(len(offsets) - 1):
        cell = floats(cells + FLOAT_BYTES * (layer.width * row + own.first), own.units)
        if states.before == 0:
            cell[:] = 0.0
        else:
            slot = longs(states.sources, row + 1)[row] if states.sources else row
            cell[: own.real] = floats(states.before + FLOAT_BYTES * (layer.hidden * slot + own.first), own.real)
            cell[own.real :] = 0.0
        empty = offsets[row] == offsets[row + 1]
        if outputs.mean:
            _output(outputs.mean, outputs, row, own)[:] = 0.0
        if outputs.max:
            _output(outputs.max, outputs, row, own)[:] = 0.0 if empty else -np.inf
        if outputs.last and empty:
            _output(outputs.last, outputs, row, own)[:] = 0.0


@inner
def _end_rows(offsets: Any, own: Group, layer: ScanArguments, states: RowStates, cells: int, outputs: OutputArrays) -> None:
    """Copy the cells after the rows, and complete the outputs."""
    for row in range(len(offsets) - 1):
        slot = longs(states.slots, row + 1)[row] if states.slots else row
        cell = floats(cells + FLOAT_BYTES * (layer.width * row + own.first), own.real)
        floats(states.after + FLOAT_BYTES * (layer.hidden * slot + own.first), own.real)[:] = cell
        if outputs.mean:
            mean = _output(outputs.mean, outputs, row, own)
            steps = np.float32(max(offsets[row + 1] - offsets[row], 1))
            for unit in range(own.real):
                mean[unit] /= steps


@inner
def _output(address: int, outputs: OutputArrays, row: int, group: Group) -> Any:
    return floats(address + FLOAT_BYTES * (outputs.width * row + group.first), group.real)


@inner
def _late_tokens(offsets: Any, reverse: int, begin: int, end: int, row: int, every: bool, tokens: Any) -> Any:
    """Return the tokens of a chunk that need a hidden vector: all tokens, or the last token of each row."""
    count = 0
    if every:
        for token in range(begin, end):
            tokens[count] = token
            count += 1
        return tokens[:count]
    while row < len(offsets) - 1 and offsets[row] < end:
        final = offsets[row] if reverse else offsets[row + 1] - 1
        if offsets[row] < offsets[row + 1] and begin <= final < end:
            tokens[count] = final
            count += 1
        row += 1
    return tokens[:count]


@inner
def _find_values(layer: ScanArguments, gates: GateInputs, chunk: Chunk, room: Scratch) -> tuple[int, int]:
    """Return the rows of the chunk's products and where each begins. Writes where the rows of the late tokens begin."""
    tokens, begins = chunk.end - chunk.begin, longs(gates.begins, chunk.end if gates.begins else 0)
    for position in range(tokens):
        token = chunk.begin + position
        room.early_begins[position] = begins[token] if gates.begins else token * gates.columns
    early_at = room.early_begins.ctypes.data
    rows, begins_at = rows_of_product(layer.storage, gates.source, early_at, tokens, gates.depth, room.quantized)
    row_begins = longs(begins_at, tokens)
    for position in range(len(chunk.late)):
        room.late_begins[position] = row_begins[chunk.late[position] - chunk.begin]
    return rows, begins_at


@inner
def _gate_inputs(
    layer: ScanArguments, gates: GateInputs, chunk: Chunk, group: Group, room: Scratch, rows: int, begins: int
) -> None:
    """Write the blocks of a group of units: early blocks of all tokens, late blocks of the tokens that need a hidden vector.

    rows, begins: of `_find_values`.
    """
    early, tokens = EARLY[layer.form], chunk.end - chunk.begin
    late = LATE[layer.form] + (SKIP[layer.form] and not gates.skip)
    if layer.weights:
        panel_bytes = VECTORS * vector_bytes(layer.storage, gates.depth)
        panel = group.first // PANEL_COLUMNS * (early + late)
        weights, bias = layer.weights + panel_bytes * panel, layer.bias + FLOAT_BYTES * PANEL_COLUMNS * panel
        product(layer.storage, rows, begins, tokens, gates.depth, weights, bias, room.early, early * PANEL_COLUMNS)
        weights, bias = weights + panel_bytes * early, bias + FLOAT_BYTES * PANEL_COLUMNS * early
        late_at = room.late_begins.ctypes.data
        product(layer.storage, rows, late_at, len(chunk.late), gates.depth, weights, bias, room.late, late * PANEL_COLUMNS)
    else:
        for position in range(tokens):
            target = room.early + FLOAT_BYTES * early * group.units * position
            _gather(layer, gates, group, chunk.begin + position, 0, early, target)
        for position in range(len(chunk.late)):
            target = room.late + FLOAT_BYTES * late * group.units * position
            _gather(layer, gates, group, chunk.late[position], early, late, target)
    if gates.skip and group.real < group.units:
        for position in range(len(chunk.late)):
            columns = gates.skip + FLOAT_BYTES * (gates.skip_columns * chunk.late[position] + group.first)
            skip = floats(room.skip + FLOAT_BYTES * group.units * position, group.units)
            skip[: group.real] = floats(columns, group.real)
            skip[group.real :] = 0.0


@inner
def _gather(layer: ScanArguments, gates: GateInputs, group: Group, token: int, first: int, blocks: int, target: int) -> None:
    """Write `blocks` blocks of a token from the block `first` on: the sum of its rows and the bias."""
    for block in range(first, first + blocks):
        # The QRNN's input gate is its last block, but an early one.
        stored_block = 5 - block if layer.form == IFO and block >= 2 else block
        column = stored_block * layer.hidden + group.first
        base = layer.bias + FLOAT_BYTES * (layer.width * block + group.first)
        for tap in range(gates.taps):
            row = token
            if gates.numbers:
                row = gates.first_row + number_at(gates.numbers, gates.number_bytes, token * gates.taps + tap)
            place = tap * gates.tap_stride + row * gates.columns + column
            add_stored(layer.storage, gates.source + stored_bytes(layer.storage) * place, group.real, base, target)
            base = target
        if group.real < group.units:
            floats(target, group.units)[group.real :] = 0.0
        target += FLOAT_BYTES * group.units


@inner
def _scan_rows(
    layer: ScanArguments, gates: GateInputs, chunk: Chunk, group: Group, room: Scratch, cells: int, outputs: OutputArrays
) -> None:
    """Run a group of units over the steps of every row in the chunk."""
    early_width = EARLY[layer.form] * group.units
    late_width = (LATE[layer.form] + (SKIP[layer.form] and not gates.skip)) * group.units
    in_place = gates.skip != 0 and group.real == group.units
    skip, skip_width = room.late + FLOAT_BYTES * group.units, late_width
    if gates.skip:
        skip, skip_width = room.skip, group.units
    if in_place:
        skip, skip_width = gates.skip + FLOAT_BYTES * group.first, gates.skip_columns
    direction = -1 if chunk.reverse else 1
    row, finals = chunk.row, 0
    while row < len(chunk.offsets) - 1 and chunk.offsets[row] < chunk.end:
        begin, end = max(chunk.offsets[row], chunk.begin), min(chunk.offsets[row + 1], chunk.end)
        steps = end - begin
        if steps > 0:
            is_final = begin == chunk.offsets[row] if chunk.reverse else end == chunk.offsets[row + 1]
            quiet = 0 if chunk.every else steps - is_final
            start = end - 1 if chunk.reverse else begin
            late = start - chunk.begin if chunk.every else finals
            skip_row = start + direction * quiet if in_place else late
            early_at = room.early + FLOAT_BYTES * early_width * (start - chunk.begin)
            late_at, skip_at = room.late + FLOAT_BYTES * late_width * late, skip + FLOAT_BYTES * skip_width * skip_row
            factors, scale = layer.factors + FLOAT_BYTES * group.first, layer.factors + FLOAT_BYTES * 2 * layer.width
            scan(
                *(layer.form, quiet, steps, group.units, early_at, direction * early_width, late_at, direction * late_width),
                *(skip_at, direction * skip_width, factors, layer.width, scale),
                cells + FLOAT_BYTES * (layer.width * row + group.first),
            )
            if chunk.every:
                _add_steps(outputs, row, start, direction, steps, group, early_at, early_width)
            if is_final and outputs.last:
                final = early_at + FLOAT_BYTES * direction * early_width * (steps - 1)
                _output(outputs.last, outputs, row, group)[:] = floats(final, group.real)
            finals += is_final
        row += 1


@inner
def _add_steps(
    outputs: OutputArrays, row: int, start: int, direction: int, steps: int, group: Group, vectors: int, width: int
) -> None:
    """Add the hidden vectors of `steps` steps from the token `start` on to the outputs that grow with every step.

    vectors: the address of the first, `width` numbers from token to token.
    """
    for step in range(steps):
        vector = floats(vectors + FLOAT_BYTES * direction * width * step, group.real)
        # Loops and not slices: an assignment to a slice costs more than the copy of a few numbers.
        if outputs.steps:
            target = _output(outputs.steps, outputs, start + direction * step, group)
            for unit in range(group.real):
                target[unit] = vector[unit]
        if outputs.mean:
            total = _output(outputs.mean, outputs, row, group)
            for unit in range(group.real):
                total[unit] += vector[unit]
        if outputs.max:
            highest = _output(outputs.max, outputs, row, group)
            for unit in range(group.real):
                highest[unit] = vector[unit] if vector[unit] > highest[unit] else highest[unit]
