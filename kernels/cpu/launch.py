"""What every CPU backend does in Python around its compiled loop: addresses, output arrays and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged, RunKernel, with_state_slots, without_sources

FLOAT_BYTES, LONG_BYTES, ALIGNED_BYTES = 4, 8, 64
TILE_BYTES = 2048
"""The sums of the largest tile: eight rows of four vectors of 64 bytes."""


Arguments = tuple[int, ...]
"""Arguments of a compiled loop that it receives as a named tuple of this module. A call makes a plain tuple, which takes less time."""


class BatchArguments(NamedTuple):
    """The rows of a batch: the address of its offsets, the bytes of an offset, and 1 for the backward direction."""

    offsets: int
    offset_bytes: int
    rows: int
    tokens: int
    reverse: int = 0


class RowStates(NamedTuple):
    """The addresses of an array of the state: before the batch, or 0 for zeros, with the slots that the rows start from, and after
    it, with the slots that the rows write. The slots are 0 if a row's slot is its number."""

    before: int = 0
    sources: int = 0
    after: int = 0
    slots: int = 0


class OutputArrays(NamedTuple):
    """The addresses of the outputs, 0 for outputs that are not requested, and the distance between two rows or two steps of
    each."""

    steps: int
    last: int
    mean: int
    max: int
    width: int


@cache
def loops(module: str) -> Any:
    """Return a module of compiled loops. The first import of Numba takes half a second."""
    return import_module(module)


def as_floats(values: Tensor) -> Tensor:
    """Return values as compiled loops read them: contiguous float32."""
    return values.float().contiguous()


def as_longs(numbers: Tensor) -> Tensor:
    """Return offsets, slots or ids as compiled loops read them: contiguous int64."""
    return numbers.long().contiguous()


OutputTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The steps, last, mean and max of `Encoded`."""


def empty_outputs(x: Ragged, want: Outputs, width: int) -> OutputTensors:
    """Return unwritten arrays for the wanted outputs."""
    rows = x.rows
    return (
        torch.empty(x.data.shape[0], width) if want.steps else None,
        torch.empty(rows, width) if want.last else None,
        torch.empty(rows, width) if want.mean else None,
        torch.empty(rows, width) if want.max else None,
    )


def output_arguments(outputs: OutputTensors, width: int, column: int = 0) -> Arguments:
    """Return the addresses of the outputs from a column on, 0 for outputs that are not wanted, and the width of their rows."""
    return (*[0 if array is None else array.data_ptr() + FLOAT_BYTES * column for array in outputs], width)


def row_states(
    kind: Callable[..., Any], names: Sequence[str], state: Any, rows: int, hidden: int
) -> tuple[list[Arguments], Any, tuple[Tensor, ...]]:
    """Return the `RowStates` of each array of a state, the state after the batch, and other arrays that the addresses refer to.

    kind: the class of the state; names: its arrays, (rows or slots, hidden).
    """
    if state is not None and state.slots is not None:
        slots = as_longs(state.slots)
        sources = slots if state.sources is None else as_longs(state.sources)
        read, written = sources.data_ptr(), slots.data_ptr()
        caches = [getattr(state, name).data_ptr() for name in names]
        return [(cache, read, cache, written) for cache in caches], without_sources(state), (slots, sources)
    after = [torch.empty(rows, hidden) for _ in names]
    if state is None:
        return [(0, 0, array.data_ptr(), 0) for array in after], kind(*after), ()
    before = tuple([as_floats(getattr(state, name)) for name in names])
    pairs = zip(before, after, strict=True)
    return [(old.data_ptr(), 0, new.data_ptr(), 0) for old, new in pairs], kind(*after), before


def backend_functions(run_direction: Callable[..., Any]) -> tuple[RunKernel, RunKernel]:
    """Return the functions of a backend for one direction and for both.

    run_direction: from (x, weights, state, outputs, reverse) to the state after the batch, where outputs are the addresses that it writes
    and reverse is 1 for the backward direction. It runs from state slots only if `updates_in_place`.
    """

    def after(x: Ragged, weights: Any, state: Any, outputs: Arguments, reverse: int) -> Any:
        if state is None or updates_in_place(state):
            return run_direction(x, weights, state, outputs, reverse)

        def by_row(x: Ragged, weights: Any, state: Any, *, want: Outputs | None) -> Encoded:
            return Encoded(run_direction(x, weights, state, outputs, reverse))

        return with_state_slots(by_row)(x, weights, state, want=None).state

    def run(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        hidden = weights.hidden
        outputs = empty_outputs(x, want, hidden)
        return Encoded(after(x, weights, state, output_arguments(outputs, hidden), 0), *outputs)

    def run_both(x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None, *, want: Outputs) -> Encoded:
        width = 2 * weights[0].hidden
        outputs = empty_outputs(x, want, width)
        both = [
            after(x, layer, state, output_arguments(outputs, width, direction * layer.hidden), direction)
            for direction, (layer, state) in enumerate(zip(weights, states or (None, None), strict=True))
        ]
        return Encoded(tuple(both), *outputs)

    return run, run_both


def updates_in_place(state: Any) -> bool:
    """Return whether a compiled loop can run from this state: it has no slots, or caches that a loop can read and write."""
    if state.slots is None:
        return True
    caches = [getattr(state, field.name) for field in fields(state) if field.name not in ("slots", "sources")]
    return all(cache.is_contiguous() and cache.dtype in (torch.float32, torch.int64) for cache in caches)


def aligned(size: int) -> int:
    """Return a number of bytes rounded up, so that the bytes after it are aligned."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def scratch_bytes(rows: int, tokens: int, *, state_floats: int, token_floats: int) -> int:
    """Return the bytes of scratch memory for a call. state_floats, token_floats: numbers that the loop keeps for a row and for
    a token, with its quantized row."""
    orders, row_offsets = LONG_BYTES * (2 * rows + 2 * tokens + 3), LONG_BYTES * rows
    floats = FLOAT_BYTES * (rows * state_floats + tokens * token_floats)
    rounding = 6 * ALIGNED_BYTES  # of both, and of quantized rows: two arrays of a step and two of all tokens
    return orders + row_offsets + TILE_BYTES + floats + rounding
