"""Tests of the vector operations that compiled loops are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from kernels.cpu.compiled import inner
from kernels.cpu.vectors import LANES, Vectors, index, vector_code

Emit = Callable[[Vectors, ir.Value], ir.Value]


def on_array(emit: Emit) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return a function that applies an operation to an array of a multiple of LANES numbers."""

    @vector_code
    def operation(code: Vectors, source: ir.Value, target: ir.Value) -> None:
        code.store(emit(code, code.load(code.pointer(source), index(0))), code.pointer(target), index(0))

    @inner
    def run(source: int, target: int, count: int) -> None:
        for first in range(0, count, LANES):
            operation(source + 4 * first, target + 4 * first)

    def apply(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        results = np.empty_like(values)
        run(values.ctypes.data, results.ctypes.data, len(values))
        return results

    return apply


VALUES = np.concatenate(
    [np.linspace(-100, 100, 4000), np.linspace(-1, 1, 4000), np.geomspace(1e-30, 1, 4000), [0.0, -0.0, 1e30, -1e30] * 20]
).astype(np.float32)
VALUES = VALUES[: len(VALUES) // LANES * LANES]


@pytest.mark.parametrize(
    "emit, exact, relative",
    [(Vectors.sigmoid, lambda x: 1 / (1 + np.exp(-x)), False), (Vectors.tanh, np.tanh, True)],
    ids=["sigmoid", "tanh"],
)
def test_function_is_exact_to_a_few_bits(emit: Emit, exact: Callable[[Any], Any], relative: bool) -> None:
    with np.errstate(over="ignore"):
        expected = exact(VALUES.astype(np.float64))
    on_values = on_array(emit)
    assert np.isnan(on_values(np.full(LANES, np.nan, np.float32))).all()
    errors = np.abs(on_values(VALUES) - expected)
    assert (errors <= 4e-7 * (np.abs(expected) if relative else 1)).all()
