"""Whether an answer is right: the float64 reference on a few rows, and what the dtype may be off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from kernels.bench.gates import GATES
from kernels.bench.given import Given
from kernels.contract import STORAGE, Ragged

STEPS = 4096
"""So many are compared: of three rows that are not too long, else of fewer."""


class DisagreesError(Exception):
    """An answer is further from the reference than its dtype explains, or not finite, or of another shape."""


@dataclass(frozen=True, slots=True)
class Expected:
    """at: the rows, or the tokens, that `values` are the right answers of; shape: that of a whole answer."""

    at: Tensor
    values: Tensor
    shape: tuple[int, int]
    tolerance: float

    def error(self, answer: Tensor) -> float:
        """The largest error, relative to the larger of 1 and the expected value; raises DisagreesError when it is too large."""
        if answer.shape != self.shape:
            raise DisagreesError(f"the answer has the shape {tuple(answer.shape)}, expected {self.shape}")
        if not bool(answer.isfinite().all()):
            raise DisagreesError("the answer is not finite")
        off = (answer[self.at].double() - self.values).abs() / self.values.abs().clamp(min=1)
        error = float(off.max())
        if error > self.tolerance:
            raise DisagreesError(f"the answer is off by {error:.1e}, at most {self.tolerance:.1e} comes from rounding")
        return error


def expected(given: Given) -> Expected:
    """The right answers of the last, the first and the middle row, or where these have too many steps, of the first ones of them.

    A backend answers the whole workload, but the reference goes through a row one step at a time: all rows would take longer than
    the timing. Rows do not depend on each other, so that a few of them stand for the others.
    """
    steps, count = max(given.lengths), len(given.lengths)
    rows = sorted({*(count - 1, 0, count // 2)[: max(1, STEPS // steps)]})
    offsets = [0, *accumulate(given.lengths)]
    device = given.x.data.device
    tokens = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows]).to(device)
    lengths = [given.lengths[row] for row in rows]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    values = _answers(replace(given, x=Ragged(given.x.data[tokens], ends), lengths=lengths)).to(device)
    by_step = given.want == "steps"
    return Expected(
        at=tokens if by_step else torch.tensor(rows, device=device),
        values=values,
        shape=(offsets[-1] if by_step else count, values.shape[1]),
        tolerance=tolerance(STORAGE[given.workload.dtype], steps, _terms(given.weights)),
    )


def _answers(given: Given) -> Tensor:
    """The reference's, in float64."""
    if given.workload.family not in GATES:
        data = given.x.data.double() if given.x.data.is_floating_point() else given.x.data
        return replace(given, x=Ragged(data, given.x.offsets), weights=_wide(given.weights)).encoder("reference")()
    (layer,) = given.weights
    gates, weights = GATES[given.workload.family](torch.split(given.x.data, given.lengths), layer)
    x = Ragged(gates.cpu(), given.x.offsets.cpu())
    return replace(given, x=x, weights=(_wide(weights, torch.device("cpu")),)).encoder("reference")()


def tolerance(dtype: torch.dtype, steps: int, terms: int) -> float:
    """What `steps` steps in `dtype` over float32 sums of `terms` terms may be off: roundings add up like a random walk."""
    one, sums = (float(torch.finfo(each).eps) for each in (dtype, torch.float32))
    return one * (8 + 2 * sqrt(steps)) + sums * 2 * sqrt(terms)


def _terms(weights: Any) -> int:
    """Terms of the longest sum; the last axis of a matrix is that of its outputs."""
    return max(array.numel() // array.shape[-1] for array in _multiplied(weights))


def _multiplied(weights: Any) -> Iterator[Tensor]:
    """Every array of some layers but tables and embeddings, of which rows are taken and none are multiplied."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for one in weights:
            yield from _multiplied(one)
    elif is_dataclass(weights):
        for field in fields(weights):
            if not field.name.startswith(("table", "embedding")):
                yield from _multiplied(getattr(weights, field.name))


def _wide(weights: Any, device: torch.device | None = None) -> Any:
    """The same layers in float64, where they are or on a device; what several of them share they share again."""
    made: dict[int, Tensor] = {}

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made:
                made[id(value)] = value.to(device, torch.float64)
            return made[id(value)]
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: wide(getattr(value, field.name)) for field in fields(value)})
        return value

    return wide(weights)
