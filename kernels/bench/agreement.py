"""Whether an answer is right: the float64 reference on a few rows, and what the dtype may be off."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from kernels.bench.given import Given
from kernels.contract import Ragged


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
    """The right answers of the first, the middle and the last row.

    A backend answers the whole workload, but the reference goes through a row one step at a time: all rows would take longer than
    the timing. Rows do not depend on each other, so that three of them stand for the others.
    """
    rows = sorted({0, len(given.lengths) // 2, len(given.lengths) - 1})
    offsets = [0, *accumulate(given.lengths)]
    tokens = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows]).to(given.x.data.device)
    lengths = [given.lengths[row] for row in rows]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens.device)
    x = Ragged(given.x.data[tokens].double(), ends)
    values = replace(given, x=x, lengths=lengths, weights=tuple(map(_wide, given.weights))).encoder("reference")()
    by_step = given.want == "steps"
    return Expected(
        at=tokens if by_step else torch.tensor(rows, device=tokens.device),
        values=values,
        shape=(offsets[-1] if by_step else len(given.lengths), values.shape[1]),
        tolerance=tolerance(given.x.data.dtype, max(given.lengths), max(map(_terms, given.weights))),
    )


def tolerance(dtype: torch.dtype, steps: int, terms: int) -> float:
    """What `steps` steps in `dtype` over float32 sums of `terms` terms may be off: roundings add up like a random walk."""
    one, sums = (float(torch.finfo(each).eps) for each in (dtype, torch.float32))
    return one * (8 + 2 * sqrt(steps)) + sums * 2 * sqrt(terms)


def _terms(weights: Any) -> int:
    """Terms of the longest sum; the last axis of a matrix is that of its outputs."""
    arrays = [getattr(weights, field.name) for field in fields(weights)]
    terms = [array.numel() // array.shape[-1] for array in arrays if isinstance(array, Tensor)]
    return max(terms)


def _wide(weights: Any) -> Any:
    """The same weights in float64."""
    arrays = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return replace(weights, **{name: array.double() for name, array in arrays.items() if isinstance(array, Tensor)})
