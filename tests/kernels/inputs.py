"""Arguments of the kernels and what they give: cut into rows, changed array by array, and compared within a tolerance."""

from __future__ import annotations

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
