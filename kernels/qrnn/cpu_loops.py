"""Where the windows of a QRNN are in memory, for the loops of `kernels.scan` on the CPU, and the steps that the next chunk of
each row needs."""

from __future__ import annotations

from typing import Any

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.rows import check_rows, floats, longs, number_at
from kernels.cpu.vectors import FLOAT_BYTES, LONG_BYTES


@Compiled
def find_rows(
    ids: int,
    id_bytes: int,
    first: int,
    row_count: int,
    offsets: int,
    offset_bytes: int,
    rows: int,
    tokens: int,
    reverse: int,
    taps: int,
    left_before: int,
    sources: int,
    left_after: int,
    slots: int,
    numbers: int,
) -> None:
    """Write the table rows of each token's window, (tokens, taps), the present step first, and those before the next chunk of
    each row.

    ids: id n is row `first` + n of `row_count` rows; left_before, left_after: (slots or rows, taps - 1), or 0 for zeros.
    Raises IndexError, before anything is written, for another row.
    """
    before = taps - 1
    check_rows(ids, id_bytes, tokens, first, row_count)
    if left_before:
        for row in range(rows):
            slot = longs(sources, row + 1)[row] if sources else row
            check_rows(left_before + LONG_BYTES * before * slot, LONG_BYTES, before, 0, row_count)
    for row in range(rows):
        begin, end = number_at(offsets, offset_bytes, row), number_at(offsets, offset_bytes, row + 1)
        slot = longs(sources, row + 1)[row] if sources else row
        left = longs(left_before + LONG_BYTES * before * slot if left_before else 0, before if left_before else 0)
        for step in range(end - begin):
            token = end - 1 - step if reverse else begin + step
            windows = longs(numbers + LONG_BYTES * taps * token, taps)
            for tap in range(taps):
                earlier = token + tap if reverse else token - tap
                if step >= tap:
                    windows[tap] = first + number_at(ids, id_bytes, earlier)
                else:
                    windows[tap] = left[before + step - tap] if left_before else 0
        slot = longs(slots, row + 1)[row] if slots else row
        after = longs(left_after + LONG_BYTES * before * slot, before)
        for place in range(before):
            step = end - begin - before + place
            if step >= 0:
                after[place] = first + number_at(ids, id_bytes, end - 1 - step if reverse else begin + step)
            else:
                after[place] = left[before + step] if left_before else 0


@Compiled
def find_windows(
    data: int,
    columns: int,
    offsets: int,
    offset_bytes: int,
    rows: int,
    tokens: int,
    reverse: int,
    taps: int,
    left_before: int,
    sources: int,
    left_after: int,
    slots: int,
    edges: int,
    begins: int,
) -> None:
    """Write where the values of each token's window begin, (tokens,), and the steps before the next chunk of each row.

    A window is consecutive in memory: it is part of the data, except for the first steps of a row. These are copied together
    with the steps before the row: edges: (rows, 2 x (taps - 1), columns). Backward, windows begin with the present step.
    left_before, left_after: (slots or rows, taps - 1, columns), or 0 for zeros.
    """
    before = taps - 1
    step_bytes = FLOAT_BYTES * columns
    for row in range(rows):
        begin, end = number_at(offsets, offset_bytes, row), number_at(offsets, offset_bytes, row + 1)
        found = longs(begins, tokens)[begin:end]
        slot = longs(sources, row + 1)[row] if sources else row
        left = left_before + step_bytes * before * slot if left_before else 0
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
        slot = longs(slots, row + 1)[row] if slots else row
        for place in range(before):
            target = floats(left_after + step_bytes * (before * slot + place), columns)
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
