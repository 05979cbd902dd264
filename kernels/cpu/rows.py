"""The rows of a ragged batch inside compiled code: their order, their tokens step by step, their state and their outputs.

All parameters are numbers and addresses. A state array or an output is float32 and contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from kernels.cpu.compiled import inner
from kernels.cpu.launch import ALIGNED_BYTES, BatchArguments, OutputArrays, RowStates
from kernels.cpu.launch import aligned as aligned_size
from kernels.cpu.vectors import FLOAT_BYTES, LONG_BYTES, pointer_at


class Batch(NamedTuple):
    """The rows that a call computes, in the order in which it computes them: longest first.

    offsets: (batch rows + 1,); order: the rows' numbers in the batch; steps: of the longest row; tokens: of all rows.
    """

    offsets: Any
    order: Any
    steps: int
    tokens: int


aligned = inner(aligned_size)


@inner
def floats(address: int, count: int) -> Any:
    """Return the float32 numbers at an address as an array."""
    return carray(pointer_at(address), (count,), np.float32)


@inner
def longs(address: int, count: int) -> Any:
    """Return the int64 numbers at an address as an array."""
    return carray(pointer_at(address), (count,), np.int64)


@inner
def number_at(numbers: int, number_bytes: int, position: int) -> int:
    """Return the int32 or int64 number at a position of an array."""
    if number_bytes == LONG_BYTES:
        return longs(numbers, position + 1)[position]  # type: ignore[no-any-return]
    return np.int64(floats(numbers, position + 1).view(np.int32)[position])  # type: ignore[return-value]


@inner
def row_ends(batch: BatchArguments, row: int) -> tuple[int, int]:
    """Return the offsets of a row: its first token, and the token after its last."""
    return number_at(batch.offsets, batch.offset_bytes, row), number_at(batch.offsets, batch.offset_bytes, row + 1)


@inner
def table_row(numbers: int, number_bytes: int, position: int, first: int, row_count: int) -> int:
    """Return `first` plus a number. Raises IndexError unless it is a row of a table of `row_count` rows."""
    row = first + number_at(numbers, number_bytes, position)
    if row < 0 or row >= row_count:
        raise IndexError("a token id is outside of the table")
    return row


@inner
def check_rows(numbers: int, number_bytes: int, count: int, first: int, row_count: int) -> None:
    """Raise IndexError unless `first` and each of the numbers add up to a row of a table of `row_count` rows."""
    for position in range(count):
        table_row(numbers, number_bytes, position, first, row_count)


@inner
def row_steps(batch: Batch, position: int) -> int:
    """Return the steps of the row at this position of the order."""
    row = batch.order[position]
    return batch.offsets[row + 1] - batch.offsets[row]  # type: ignore[no-any-return]


@inner
def longest_first(offsets: Any, order: Any, begins: Any, part: int, parts: int) -> Batch:
    """Return every `parts`-th row from `part` on, longest first, which gives each part about as many tokens.

    order: receives the rows; begins: scratch memory for two numbers more than the batch has tokens.
    """
    rows = len(order)
    longest = 0
    for row in range(rows):
        longest = max(longest, offsets[row + 1] - offsets[row])
    # A counting sort: begins[n] is the position of the next row with n steps.
    begins[: longest + 1] = 0
    for row in range(rows):
        begins[offsets[row + 1] - offsets[row]] += 1
    position = 0
    for steps in range(longest, -1, -1):
        count = begins[steps]
        begins[steps] = position
        position += count
    for row in range(rows):
        steps = offsets[row + 1] - offsets[row]
        order[begins[steps]] = row
        begins[steps] += 1
    kept = (rows - part + parts - 1) // parts
    tokens = 0
    for position in range(kept):
        row = order[part + position * parts]
        order[position] = row
        tokens += offsets[row + 1] - offsets[row]
    steps = offsets[order[0] + 1] - offsets[order[0]] if kept else 0
    return Batch(offsets, order[:kept], steps, tokens)


@inner
def order_batch(call: BatchArguments, part: int, parts: int, scratch: int) -> tuple[Batch, Any, Any, int]:
    """Return a part of a batch, its tokens step by step, an array for a number of each token, and where the scratch memory goes
    on."""
    rows, tokens = call.rows, call.tokens
    begins = longs(scratch, rows + 1)
    for row in range(rows + 1):
        begins[row] = number_at(call.offsets, call.offset_bytes, row)
    numbers = longs(scratch + LONG_BYTES * (rows + 1), rows + 2 * tokens + 2)
    batch = longest_first(begins, numbers[:rows], numbers[rows + tokens :], part, parts)
    step_tokens = numbers[rows : rows + tokens]
    tokens_by_step(batch, call.reverse, step_tokens)
    rest = numbers.ctypes.data + LONG_BYTES * len(numbers)
    return batch, step_tokens, numbers[rows + tokens :], rest + -rest % ALIGNED_BYTES


@inner
def tokens_by_step(batch: Batch, reverse: int, tokens: Any) -> None:
    """Write the numbers of the tokens step by step, longest row first. reverse: the rows run from their last step to their
    first."""
    running = len(batch.order)
    written = 0
    for step in range(batch.steps):
        running = still_running(batch, running, step)
        for row in batch.order[:running]:
            tokens[written] = batch.offsets[row + 1] - 1 - step if reverse else batch.offsets[row] + step
            written += 1


@inner
def still_running(batch: Batch, running: int, step: int) -> int:
    """Return how many rows have this step. running: how many have the step before it."""
    while row_steps(batch, running - 1) <= step:
        running -= 1
    return running


@inner
def load_state(batch: Batch, states: RowStates, hidden: int, target: int, width: int) -> None:
    """Copy the rows' state, rows of `hidden` numbers, to rows of `width` numbers."""
    for position in range(len(batch.order)):
        values = floats(target + FLOAT_BYTES * width * position, width)
        values[hidden:] = 0.0
        if states.before == 0:
            values[:hidden] = 0.0
        else:
            slot = slot_of(batch, states.sources, position)
            values[:hidden] = floats(states.before + FLOAT_BYTES * hidden * slot, hidden)


@inner
def store_state(batch: Batch, position: int, values: Any, states: RowStates) -> None:
    """Copy the state of the row at a position to its slot."""
    hidden = len(values)
    floats(states.after + FLOAT_BYTES * hidden * slot_of(batch, states.slots, position), hidden)[:] = values


@inner
def slot_of(batch: Batch, slots: int, position: int) -> int:
    """Return the slot of the row at a position. slots: the address of the slots of the batch's rows, or 0 if a row's slot is
    its number."""
    row = batch.order[position]
    return longs(slots, row + 1)[row] if slots else row  # type: ignore[no-any-return]


@inner
def begin_outputs(batch: Batch, outputs: OutputArrays, hidden: int) -> None:
    """Prepare the outputs that grow with every step."""
    for row in batch.order:
        if outputs.mean:
            _output(outputs.mean, outputs, row, hidden)[:] = 0.0
        if outputs.max:
            _output(outputs.max, outputs, row, hidden)[:] = -np.inf


@inner
def add_step(batch: Batch, outputs: OutputArrays, running: int, tokens: Any, hidden: int, values: int, width: int) -> None:
    """Add a step's hidden vectors to the outputs. values: rows of `width` numbers; tokens: the rows' tokens of this step."""
    for position in range(running):
        vector = floats(values + FLOAT_BYTES * width * position, hidden)
        row = batch.order[position]
        if outputs.steps:
            _output(outputs.steps, outputs, tokens[position], hidden)[:] = vector
        if outputs.mean:
            total = _output(outputs.mean, outputs, row, hidden)
            for unit in range(hidden):
                total[unit] += vector[unit]
        if outputs.max:
            highest = _output(outputs.max, outputs, row, hidden)
            for unit in range(hidden):
                highest[unit] = vector[unit] if vector[unit] > highest[unit] else highest[unit]


@inner
def end_rows(
    batch: Batch, outputs: OutputArrays, hidden: int, width: int, states: int, capacity: int, written: RowStates
) -> None:
    """Write the outputs and the hidden states of the rows after their last step.

    states: two arrays of hidden states, (capacity, width), which the steps use in turn; the first has the states before the
    first step.
    """
    for position in range(len(batch.order)):
        buffer = row_steps(batch, position) % 2
        state = floats(states + FLOAT_BYTES * width * (position + capacity * buffer), hidden)
        store_state(batch, position, state, written)
        end_outputs(batch, outputs, position, state)


@inner
def end_outputs(batch: Batch, outputs: OutputArrays, position: int, last: Any) -> None:
    """Complete the outputs of the row at a position. last: its hidden vector after the last step."""
    row, steps, hidden = batch.order[position], row_steps(batch, position), len(last)
    if outputs.last:
        _output(outputs.last, outputs, row, hidden)[:] = last
    if outputs.mean and steps:
        mean = _output(outputs.mean, outputs, row, hidden)
        for unit in range(hidden):
            mean[unit] /= np.float32(steps)
    if outputs.max and not steps:
        _output(outputs.max, outputs, row, hidden)[:] = 0.0


@inner
def _output(address: int, outputs: OutputArrays, row: int, hidden: int) -> Any:
    return floats(address + FLOAT_BYTES * outputs.width * row, hidden)
