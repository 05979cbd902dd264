"""Helpers for the arguments and outputs of kernels: split them into rows, change their arrays, and compare them within a tolerance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged

EVERYTHING = Outputs(steps=True, last=True, mean=True, max=True)
OUTPUTS = ("steps", "last", "mean", "max")
ZERO_SLOT, SCRAP_SLOT = 0, 1
"""The slots that several rows start from, and that several rows end in."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill unwritten memory with NaN: in deterministic mode torch fills the arrays of `empty`."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Arguments(NamedTuple):
    """The arguments of one call, in the order of every backend's parameters."""

    x: Ragged
    weights: Any
    state: Any

    def map_arrays(self, change: Callable[[Tensor], Tensor]) -> Arguments:
        return Arguments(*(map_arrays(part, change) for part in self))


def ragged(data: Tensor, lengths: Sequence[int], offsets: torch.dtype = torch.int32) -> Ragged:
    return Ragged(data, torch.tensor([0, *accumulate(lengths)], dtype=offsets))


def joined(rows: Sequence[Tensor]) -> Ragged:
    """Return rows packed end to end."""
    return ragged(torch.cat(list(rows)), [len(row) for row in rows])


def in_chunks(x: Ragged, *, chunks: int, multiple: int = 1, seed: int = 0) -> list[Ragged]:
    """Split every row at random multiples of `multiple`; pieces may be empty. The k-th chunk has the k-th piece of every row."""
    chance = random.Random(seed)
    pieces = []
    for row in rows(x):
        cuts = sorted(multiple * chance.randint(0, len(row) // multiple) for _ in range(chunks - 1))
        pieces.append([row[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(row)], strict=True)])
    laid = map(joined, zip(*pieces, strict=True))
    return [Ragged(chunk.data, chunk.offsets.to(x.offsets.device)) for chunk in laid]


def rows(x: Ragged) -> list[Tensor]:
    """Return the tokens of each row."""
    return list(torch.split(x.data, x.lengths.tolist()))


def longest(x: Ragged) -> int:
    return int(x.lengths.max(initial=0))


def arrays(values: Any) -> dict[str, Tensor]:
    """Return the arrays of a dataclass by name; None has no arrays."""
    if values is None:
        return {}
    held = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def map_arrays(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the dataclass with `change` applied to every array."""
    changed = {name: change(array) for name, array in arrays(values).items()}
    return replace(values, **changed) if changed else values


def put_in_slots(state: Any, slots: Tensor, places: int) -> Any:
    """Return the state in these slots of state caches with `places` slots; the other slots contain nines."""
    caches = {name: array.new_full((places, *array.shape[1:]), 9) for name, array in arrays(state).items()}
    for name, cache in caches.items():
        cache[slots.long()] = getattr(state, name)
    return replace(state, **caches, slots=slots)


def caches_with_zero_slot(state: Any) -> Any:
    """Return state caches for `run_from_slot_to_slot`: zeros in ZERO_SLOT, and nines in the other slots."""
    caches = {name: array.new_full((3 + 2 * len(array), *array.shape[1:]), 9) for name, array in arrays(state).items()}
    for cache in caches.values():
        cache[ZERO_SLOT] = 0
    return replace(state, **caches)


def run_from_slot_to_slot(
    run: Callable[[Ragged, Any], Encoded], chunks: Sequence[Ragged], caches: Any, index: torch.dtype = torch.int32
) -> tuple[Tensor, Any]:
    """Run four chunks from slot to slot; return the steps of all rows and the states after them, by row.

    All rows start from ZERO_SLOT, continue in their own slots, then from there in other slots, and end in SCRAP_SLOT. To return the states,
    the last chunk also runs into the rows' own slots. caches: of a state, or a tuple of them.
    """
    first, second, third, last = chunks
    places = torch.arange(2, 2 + 2 * first.rows, dtype=index, device=first.offsets.device)
    here, there = places.view(first.rows, 2).flip(0).unbind(1)
    begun = run(first, with_slots(caches, slots=here, sources=torch.full_like(here, ZERO_SLOT)))
    encoded = [begun, run(second, begun.state), run(third, with_slots(caches, slots=there, sources=here))]
    encoded.append(run(last, with_slots(caches, slots=torch.full_like(here, SCRAP_SLOT), sources=there)))
    after = run(last, with_slots(caches, slots=here, sources=there)).state
    pieces = zip(*(steps_by_row(one, chunk) for one, chunk in zip(encoded, chunks, strict=True)), strict=True)
    by_row = tuple(state.by_row() for state in after) if isinstance(after, tuple) else after.by_row()
    return torch.cat([piece for row in pieces for piece in row]), by_row


def with_slots(caches: Any, **places: Tensor) -> Any:
    """Return a state, or each of a tuple, with these slots and sources."""
    return tuple(replace(cache, **places) for cache in caches) if isinstance(caches, tuple) else replace(caches, **places)


def assert_reserved_slots_unchanged(caches: Any) -> None:
    """Assert that no row wrote ZERO_SLOT or the last slot of `caches_with_zero_slot`."""
    for cache in arrays(caches).values():
        assert not cache[ZERO_SLOT].any()
        assert bool((cache[-1] == 9).all())


def as_float64(arguments: Arguments) -> Arguments:
    """Return the same values in float64."""
    return arguments.map_arrays(lambda array: array.double() if array.is_floating_point() else array)


def steps_by_row(encoded: Encoded, x: Ragged) -> list[Tensor]:
    """Return the output steps of each row of `x`."""
    assert encoded.steps is not None
    return rows(Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets))


def encoding(steps: Sequence[Tensor], state: Any) -> Encoded:
    """Return the encoding whose rows have these steps, pooled row by row."""

    def by_row(pool: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([pool(row) if len(row) else row.new_zeros(row.shape[1]) for row in steps])

    return Encoded(
        state,
        steps=torch.cat(list(steps)),
        last=by_row(lambda row: row[-1]),
        mean=by_row(lambda row: row.mean(0)),
        max=by_row(lambda row: row.amax(0)),
    )


def rounding(dtype: torch.dtype, steps: int) -> float:
    """Return the tolerance of `steps` steps in `dtype`: a few roundings for the products, and a rounding for each step."""
    return float(torch.finfo(dtype).eps) * (32 + steps)


def assert_close(actual: Tensor, expected: Tensor, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Assert equality within the rounding of `dtype` over `steps` steps, relative to the larger of 1 and the expected value."""
    tolerance = rounding(dtype, steps)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def assert_states_close(actual: Any, expected: Any, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Assert that every array of the state is close."""
    assert type(actual) is type(expected)
    for name, array in arrays(expected).items():
        assert_close(getattr(actual, name), array, steps=steps, dtype=dtype)


def assert_encodings_close(actual: Encoded, expected: Encoded, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Assert that every expected output and the state are close."""
    for name in OUTPUTS:
        output, expected_output = getattr(actual, name), getattr(expected, name)
        assert (output is None) == (expected_output is None), name
        if output is not None:
            assert_close(output, expected_output, steps=steps, dtype=dtype)
    if expected.offsets is not None:
        assert actual.offsets is not None and actual.offsets.tolist() == expected.offsets.tolist()
    assert_states_close(actual.state, expected.state, steps=steps, dtype=dtype)
