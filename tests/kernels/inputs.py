"""Arguments of the kernels and what they give: cut into rows, changed array by array, and compared within a tolerance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged

EVERYTHING = Outputs(steps=True, last=True, mean=True, max=True)
OUTPUTS = ("steps", "last", "mean", "max")
ZERO, SCRAP = 0, 1
"""Places where any number of rows begin, and end."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that a kernel did not write is NaN: in its deterministic mode torch fills what `empty` gives with it."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Given(NamedTuple):
    """The arguments of one call, in the order in which every backend takes them."""

    x: Ragged
    weights: Any
    state: Any

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Given:
        return Given(*(mapped(part, change) for part in self))


def ragged(data: Tensor, lengths: Sequence[int], offsets: torch.dtype = torch.int32) -> Ragged:
    return Ragged(data, torch.tensor([0, *accumulate(lengths)], dtype=offsets))


def joined(rows: Sequence[Tensor]) -> Ragged:
    """Rows laid end to end."""
    return ragged(torch.cat(list(rows)), [len(row) for row in rows])


def in_chunks(x: Ragged, *, chunks: int, multiple: int = 1, seed: int = 0) -> list[Ragged]:
    """Every row cut at random multiples, empty pieces included; the k-th chunk has the k-th piece of every row."""
    chance = random.Random(seed)
    pieces = []
    for row in rows(x):
        cuts = sorted(multiple * chance.randint(0, len(row) // multiple) for _ in range(chunks - 1))
        pieces.append([row[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(row)], strict=True)])
    laid = map(joined, zip(*pieces, strict=True))
    return [Ragged(chunk.data, chunk.offsets.to(x.offsets.device)) for chunk in laid]


def rows(x: Ragged) -> list[Tensor]:
    """Each row's tokens."""
    return list(torch.split(x.data, x.lengths.tolist()))


def longest(x: Ragged) -> int:
    return int(x.lengths.max(initial=0))


def arrays(values: Any) -> dict[str, Tensor]:
    """The arrays that a dataclass holds, by name; None holds none."""
    if values is None:
        return {}
    held = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def mapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclass with every array in it changed."""
    changed = {name: change(array) for name, array in arrays(values).items()}
    return replace(values, **changed) if changed else values


def in_slots(state: Any, slots: Tensor, places: int) -> Any:
    """The same state in these places; the others hold nines."""
    slabs = {name: array.new_full((places, *array.shape[1:]), 9) for name, array in arrays(state).items()}
    for name, slab in slabs.items():
        slab[slots.long()] = getattr(state, name)
    return replace(state, **slabs, slots=slots)


def begun_in_zeros(state: Any) -> Any:
    """Slabs with room for `from_place_to_place`: zeros in the place ZERO, and nines in the others."""
    slabs = {name: array.new_full((3 + 2 * len(array), *array.shape[1:]), 9) for name, array in arrays(state).items()}
    for slab in slabs.values():
        slab[ZERO] = 0
    return replace(state, **slabs)


def from_place_to_place(
    run: Callable[[Ragged, Any], Encoded], chunks: Sequence[Ragged], slabs: Any, index: torch.dtype = torch.int32
) -> tuple[Tensor, Any]:
    """The steps of all rows of four chunks, and the states after them, by row.

    All rows begin in ZERO, go on in slots of their own, then from there to other ones, and end in SCRAP; for the sake of the states, the
    last chunk goes to such slots, too. slabs: of a state, or a tuple of them.
    """
    first, second, third, last = chunks
    places = torch.arange(2, 2 + 2 * first.rows, dtype=index, device=first.offsets.device)
    here, there = places.view(first.rows, 2).flip(0).unbind(1)
    begun = run(first, placed(slabs, slots=here, sources=torch.full_like(here, ZERO)))
    encoded = [begun, run(second, begun.state), run(third, placed(slabs, slots=there, sources=here))]
    encoded.append(run(last, placed(slabs, slots=torch.full_like(here, SCRAP), sources=there)))
    after = run(last, placed(slabs, slots=here, sources=there)).state
    pieces = zip(*(steps_by_row(one, chunk) for one, chunk in zip(encoded, chunks, strict=True)), strict=True)
    by_row = tuple(state.by_row() for state in after) if isinstance(after, tuple) else after.by_row()
    return torch.cat([piece for row in pieces for piece in row]), by_row


def placed(slabs: Any, **places: Tensor) -> Any:
    """A state, or each of a tuple, in these slots and from these sources."""
    return tuple(replace(one, **places) for one in slabs) if isinstance(slabs, tuple) else replace(slabs, **places)


def assert_only_slots_were_written(slabs: Any) -> None:
    """Of `begun_in_zeros`."""
    for slab in arrays(slabs).values():
        assert not slab[ZERO].any()
        assert bool((slab[-1] == 9).all())


def from_shared_places(state: Any, index: torch.dtype = torch.int32) -> Any:
    """The same state in slabs that else hold nines, so that every second row goes on from the place of the row before it, and the last
    two rows write to one place."""
    one = next(iter(arrays(state).values()))
    rows, order = len(one), torch.arange(len(one), device=one.device)
    slabs = in_slots(state, order, places=2 * rows + 1)
    return replace(slabs, slots=(rows + order).clamp(max=2 * rows - 2).to(index), sources=(order - order % 2).to(index))


def assert_went_on_from_shared_places(after: Any, state: Any, expected: Any) -> None:
    """To the bit, but for the last two rows. after: what came of `from_shared_places` of `state`; expected: by row."""
    assert after.sources is None
    for name, array in arrays(expected).items():
        slab, rows = getattr(after, name), len(array)
        assert torch.equal(getattr(after.by_row(), name)[:-2].to(array.dtype), array[:-2]), name
        assert torch.equal(slab[:rows], getattr(state, name).to(slab.dtype)), f"{name}: nobody writes where others go on from"
        assert bool((slab[2 * rows - 1 :] == 9).all()), f"{name}: no row's places"


def widened(given: Given) -> Given:
    """The same values in float64."""
    return given.mapped(lambda array: array.double() if array.is_floating_point() else array)


def steps_by_row(encoded: Encoded, x: Ragged) -> list[Tensor]:
    """The steps that came out of each row of `x`."""
    assert encoded.steps is not None
    return rows(Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets))


def encoding(steps: Sequence[Tensor], state: Any) -> Encoded:
    """The encoding whose rows have these steps, pooled by hand."""

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
    """What `steps` steps in `dtype` may be off: a few roundings for the products, one more for each step."""
    return float(torch.finfo(dtype).eps) * (32 + steps)


def assert_close(actual: Tensor, expected: Tensor, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Equal within the rounding of `dtype` over `steps` steps, relative to the larger of 1 and the expected value."""
    tolerance = rounding(dtype, steps)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def assert_states_alike(actual: Any, expected: Any, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Every array of the state."""
    assert type(actual) is type(expected)
    for name, array in arrays(expected).items():
        assert_close(getattr(actual, name), array, steps=steps, dtype=dtype)


def assert_encodes_alike(actual: Encoded, expected: Encoded, *, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Every output that was expected, and the state."""
    for name in OUTPUTS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert_close(one, other, steps=steps, dtype=dtype)
    if expected.offsets is not None:
        assert actual.offsets is not None and actual.offsets.tolist() == expected.offsets.tolist()
    assert_states_alike(actual.state, expected.state, steps=steps, dtype=dtype)
