"""Finds the activation of model.toml that a chain of elementwise operations computes.

Exporters write gelu as a division, erf, an addition and two products, in different orders. The operations are composed, and the result is
compared with the activations of model.toml on a dense grid of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.activations import FUNCTIONS
from service.importers.draft import Array
from service.modeling.spec.activations import PARAMETERS

Numbers = NDArray[np.float64]
TOLERANCE = 2e-6
"""Constants of float32, such as 1.4142135, move a function by about 1e-7 of its value."""
MONOTONE = (
    *("none", "sigmoid", "tanh", "relu", "relu6", "softplus", "softsign"),
    *("hard_sigmoid", "hard_tanh", "clip", "leaky_relu", "elu", "selu"),
)
"""Activations that keep the order of numbers, with positive parameters: a maximum may be taken before or after them."""
_NEAR_ZERO = np.geomspace(1e-9, 1e-2, 29)
_GRID = np.concatenate([np.linspace(-12, 12, 4801), np.linspace(-300, 300, 601), _NEAR_ZERO, -_NEAR_ZERO, [-3e38, 3e38]])
"""A step at zero does not match a steep activation: some numbers are close to zero."""
NO_BOUND = -3.4e38
"""The minimum of a clip without one: nearly the least number of float32."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function of every number of a vector.

    apply: (n, width) -> (n, width), in float64; activation: its name in model.toml, where the source names it; is_affine: whether it is
    a factor and an offset, which may differ by column if `by_column`; size: how many operations it takes.
    """

    apply: Callable[[Numbers], Numbers]
    activation: dict[str, Any] | None = None
    is_affine: bool = False
    by_column: bool = False
    size: int = 1

    def after(self, inner: Function) -> Function:
        """Return this function of the results of `inner`."""
        return Function(
            lambda x: self.apply(inner.apply(x)),
            is_affine=self.is_affine and inner.is_affine,
            by_column=self.by_column or inner.by_column,
            size=self.size + inner.size,
        )

    def factor_and_offset(self, width: int) -> tuple[Array, Array]:
        """Return the factor and the offset of an affine function, by column."""
        with np.errstate(all="ignore"):
            offset, total = self.apply(np.stack([np.zeros(width), np.ones(width)]))
            return total - offset, offset


IDENTITY = Function(lambda x: x, {"kind": "none"}, is_affine=True, size=0)


def named(kind: str, **parameters: float) -> Function:
    """Return an activation of model.toml."""
    return Function(lambda x: evaluate(kind, x, **parameters), {"kind": kind, **parameters})


def affine(factor: Array | float, offset: Array | float) -> Function:
    """Return x * factor + offset. factor, offset: numbers, or (width,)."""
    by_column = np.ndim(factor) > 0 or np.ndim(offset) > 0
    return Function(lambda x: x * factor + offset, is_affine=True, by_column=by_column)


def evaluate(kind: str, x: Numbers, **parameters: float) -> Numbers:
    """Return an activation of model.toml of every number. parameters: values that differ from the defaults."""
    values = {**PARAMETERS.get(kind, {}), **parameters}
    numbers: Numbers = FUNCTIONS[kind](torch.from_numpy(x), *values.values()).numpy()
    return numbers


def identify(function: Function) -> dict[str, Any] | None:
    """Return the activation of model.toml that a function computes, or None."""
    if function.activation is not None:
        return function.activation
    if function.by_column:
        return None
    with np.errstate(all="ignore"):
        actual = function.apply(_GRID[:, None])[:, 0]
    for activation in _candidates(function):
        if _agree(actual, _on_grid(**activation)):
            return activation
    return None


@lru_cache(maxsize=64)
def _on_grid(kind: str, **parameters: float) -> Numbers:
    """Return an activation of every number of the grid."""
    return evaluate(kind, _GRID, **parameters)


def as_written(activation: dict[str, Any]) -> str | dict[str, Any]:
    """Return an activation as model.toml writes it: a name if it has no parameters."""
    kind: str = activation["kind"]
    return kind if len(activation) == 1 else activation


def _agree(actual: Numbers, expected: Numbers) -> bool:
    if not np.isfinite(actual).all():  # exp overflows, in the source as in the model
        finite = np.abs(_GRID) < 80
        actual, expected = actual[finite], expected[finite]
    return bool((np.abs(actual - expected) <= TOLERANCE * (1 + np.abs(expected))).all())


def _candidates(function: Function) -> list[dict[str, Any]]:
    """Return the activations without parameters, and the others with the parameters that fit the function at some numbers."""
    with np.errstate(all="ignore"):
        low, below, zero, above, far = (
            float(y) for y in function.apply(np.array([[-300.0], [-1.0], [0.0], [1e-3], [300.0]]))[:, 0]
        )
    plain: list[dict[str, Any]] = [{"kind": kind} for kind in FUNCTIONS if kind not in PARAMETERS]
    fitted: list[dict[str, Any]] = [
        {"kind": "leaky_relu", "alpha": -below},
        {"kind": "elu", "alpha": -low},
        {"kind": "clip", "alpha": NO_BOUND if low == -300 else low, "beta": -NO_BOUND if far == 300 else far},
        {"kind": "hard_sigmoid", "alpha": (above - zero) * 1e3, "beta": zero},
        {
            "kind": "scaled_tanh",
            "alpha": far,
            "beta": math.atanh(above / far) * 1e3 if 0 < abs(above) < abs(far) < math.inf else 0.0,
        },
        {"kind": "affine", "alpha": zero - below, "beta": zero},
    ]
    finite = [each for each in fitted if all(math.isfinite(each.get(name, 0.0)) for name in ("alpha", "beta"))]
    written: list[dict[str, Any]] = [
        {name: shortest(value) if isinstance(value, float) else value for name, value in each.items()} for each in finite
    ]
    defaults = [{"kind": each["kind"], **PARAMETERS[each["kind"]]} for each in written]
    return plain + [
        {"kind": each["kind"]} if each == default else each for each, default in zip(written, defaults, strict=True)
    ]


def shortest(number: float) -> float:
    """Return a number of float32 as it was written: 0.2, and not 0.20000000298."""
    return float(str(np.float32(number)))
