"""Expected answers: the float64 reference on a few rows, with a tolerance derived from the dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from kernels.bench.case import BenchCase
from kernels.bench.gates import GATES
from kernels.bench.workload import INT8
from kernels.ragged import STORAGE, Ragged

STEPS = 4096
"""Limit of the compared steps: three rows are compared if they are short enough, else fewer."""


ROUNDING = STORAGE | {INT8: torch.bfloat16}
"""The dtype with the rounding of a workload's dtype: a row in int8 is rounded like its largest value in bfloat16."""


class DisagreesError(Exception):
    """An answer has a larger error than its dtype explains, is not finite, or has another shape."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """at: rows or tokens with the expected `values`; shape: shape of a whole answer."""

    at: Tensor
    values: Tensor
    shape: tuple[int, int]
    tolerance: float

    def error(self, answer: Tensor) -> float:
        """Return the largest error, relative to the larger of 1 and the expected value. Raises DisagreesError when it is too large."""
        if answer.shape != self.shape:
            raise DisagreesError(f"the answer has the shape {tuple(answer.shape)}, expected {self.shape}")
        if not bool(answer.isfinite().all()):
            raise DisagreesError("the answer is not finite")
        errors = (answer[self.at].double() - self.values).abs() / self.values.abs().clamp(min=1)
        error = float(errors.max())
        if error > self.tolerance:
            raise DisagreesError(f"the answer has an error of {error:.1e}, rounding explains at most {self.tolerance:.1e}")
        return error


def expected_answer(case: BenchCase) -> ExpectedAnswer:
    """Return the expected answers of the last, the first and the middle row, or of the first of these if rows are long.

    A backend answers the whole workload, but the reference takes one step at a time: all rows would take longer than the timing. Rows
    are independent, so a few represent all.
    """
    steps, count = max(case.lengths), len(case.lengths)
    rows = sorted({*(count - 1, 0, count // 2)[: max(1, STEPS // steps)]})
    offsets = [0, *accumulate(case.lengths)]
    device = case.x.data.device
    tokens = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows]).to(device)
    lengths = [case.lengths[row] for row in rows]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    state = case.state and replace(case.state, slots=case.state.slots[rows], sources=case.state.sources[rows]).by_row()
    values = _reference(replace(case, x=Ragged(case.x.data[tokens], ends), lengths=lengths, state=state)).to(device)
    by_step, terms = case.want == "steps", max(array.numel() // array.shape[-1] for array in _multiplied(case.weights))
    return ExpectedAnswer(
        at=tokens if by_step else torch.tensor(rows, device=device),
        values=values,
        shape=(offsets[-1] if by_step else count, values.shape[1]),
        tolerance=tolerance(ROUNDING[case.workload.dtype], steps * case.workload.depth, terms),
    )


def _reference(case: BenchCase) -> Tensor:
    """Return the answers of the reference in float64."""
    of_layer = next((GATES[kind] for kind in GATES if isinstance(case.weights[0], kind)), None)
    if of_layer is None:
        data = case.x.data.double() if case.x.data.is_floating_point() else case.x.data
        x, layers, state = Ragged(data, case.x.offsets), _float64(case.weights), _float64(case.state)
        return replace(case, x=x, weights=layers, state=state).encoder("reference")()
    (layer,) = case.weights
    gates, weights = of_layer(case.x, layer)
    x = Ragged(gates.cpu(), case.x.offsets.cpu())
    return replace(case, x=x, weights=(_float64(weights, torch.device("cpu")),)).encoder("reference")()


def tolerance(dtype: torch.dtype, steps: int, terms: int) -> float:
    """Return the allowed error of `steps` steps in `dtype` over float32 sums of `terms` terms: roundings add up like a random walk."""
    step, sums = (float(torch.finfo(each).eps) for each in (dtype, torch.float32))
    return step * (8 + 2 * sqrt(steps)) + sums * 2 * sqrt(terms)


def _multiplied(weights: Any) -> Iterator[Tensor]:
    """Yield every array of some layers except tables and embeddings: their rows are copied. The last axis is that of the outputs."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for each in weights:
            yield from _multiplied(each)
    elif is_dataclass(weights):
        for field in fields(weights):
            if not field.name.startswith(("table", "embedding")):
                yield from _multiplied(getattr(weights, field.name))


def _float64(weights: Any, device: torch.device | None = None) -> Any:
    """Return the same layers or state in float64. Arrays that layers share stay shared."""
    converted: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in converted:
                converted[id(value)] = value.to(device, torch.float64)
            return converted[id(value)]
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: convert(getattr(value, field.name)) for field in fields(value)})
        return value

    return convert(weights)
