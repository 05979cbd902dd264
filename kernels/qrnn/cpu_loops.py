"""Where the windows of a QRNN are in memory, for the loops of `kernels.scan` on the CPU, and the steps that the next chunk of
each row needs."""

from __future__ import annotations

from typing import Any

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.launch import BatchArguments, RowStates
from kernels.cpu.rows import check_rows, floats, longs, number_at, row_ends
from kernels.cpu.vectors import FLOAT_BYTES, LONG_BYTES


@Compiled
def find_rows(
    ids: int,
    id_bytes: int,
    first: int,
    row_count: int,
    batch: BatchArguments,
    taps: int,
    lefts: RowStates,
    numbers: int,
) -> None:
    """Write the table rows of each token's window, (tokens, taps), the present step first, and those before the next chunk of
    each row.

    ids: id n is row `first` + n of `row_count` rows; lefts: (slots or rows, taps - 1).
    Raises IndexError, before anything is written, for another row.
    """
    before, reverse = taps - 1, batch.reverse
    check_rows(ids, id_bytes, batch.tokens, first, row_count)
    if lefts.before:
        for row in range(batch.rows):
            slot = longs(lefts.sources, row + 1)[row] if lefts.sources else row
            check_rows(lefts.before + LONG_BYTES * before * slot, LONG_BYTES, before, 0, row_count)
    for row in range(batch.rows):
        begin, end = row_ends(batch, row)
        slot = longs(lefts.sources, row + 1)[row] if lefts.sources else row
        left = longs(lefts.before + LONG_BYTES * before * slot if lefts.before else 0, before if lefts.before else 0)
        for step in range(end - begin):
            token = end - 1 - step if reverse else begin + step
            windows = longs(numbers + LONG_BYTES * taps * token, taps)
            for tap in range(taps):
                earlier = token + tap if reverse else token - tap
                if step >= tap:
                    windows[tap] = first + number_at(ids, id_bytes, earlier)
                else:
                    windows[tap] = left[before + step - tap] if lefts.before else 0
        slot = longs(lefts.slots, row + 1)[row] if lefts.slots else row
        after = longs(lefts.after + LONG_BYTES * before * slot, before)
        for place in range(before):
            step = end - begin - before + place
            if step >= 0:
                after[place] = first + number_at(ids, id_bytes, end - 1 - step if reverse else begin + step)
            else:
                after[place] = left[before + step] if lefts.before else 0


@Compiled
def find_windows(
    data: int,
    columns: int,
    batch: BatchArguments,
    taps: int,
    lefts: RowStates,
    edges: int,
    begins: int,
) -> None:
    """Write where the values of each token's window begin, (tokens,), and the steps before the next chunk of each row.

    A window is consecutive in memory: it is part of the data, except for the first steps of a row. These are copied together
    with the steps before the row: edges: (rows, 2 x (taps - 1), columns). Backward, windows begin with the present step.
    lefts: (slots or rows, taps - 1, columns).
    """
    before, reverse = taps - 1, batch.reverse
    step_bytes = FLOAT_BYTES * columns
    for row in range(batch.rows):
        begin, end = row_ends(batch, row)
        found = longs(begins, batch.tokens)[begin:end]
        slot = longs(lefts.sources, row + 1)[row] if lefts.sources else row
        left = lefts.before + step_bytes * before * slot if lefts.before else 0
        edge = edges + step_bytes * 2 * before * row
        edge_begins = (edge - data) // FLOAT_BYTES
        for place in range(before):
            target = floats(edge + step_bytes * (2 * before - 1 - place if reverse else place), columns)
            _copy_step(left + step_bytes * place if left else 0, target)
        for step in range(end - begin):
            token = end - 1 - step if reverse else begin + step
            if step < before:
                place = before - 1 - step if reverse else before + step
                _copy_step(data + step_bytes * token, floats(edge + step_bytes * place, columns))
                found[token - begin] = edge_begins + columns * (place if reverse else step)
            else:
                found[token - begin] = columns * (token if reverse else token - before)
        slot = longs(lefts.slots, row + 1)[row] if lefts.slots else row
        for place in range(before):
            target = floats(lefts.after + step_bytes * (before * slot + place), columns)
            step = end - begin - before + place
            if step >= 0:
                _copy_step(data + step_bytes * (end - 1 - step if reverse else begin + step), target)
            else:
                _copy_step(left + step_bytes * (before + step) if left else 0, target)


@inner
def _copy_step(source: int, target: Any) -> None:
    """Copy a step, or zeros if its address is 0."""
    if source:
        target[:] = floats(source, len(target))
    else:
        target[:] = 0.0
