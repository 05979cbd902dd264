"""Products of int8 weights on a CPU: exact where rows are whole numbers times a scale, and close to float32 elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.quantized import quantize
from kernels.ragged import Ragged
from tests.kernels.families import INT8_FORMS, Form, cpu_backends
from tests.kernels.inputs import OUTPUTS, Arguments, arrays, assert_encodings_close, map_arrays

COMPILED = [form for form in INT8_FORMS if "cpu" in cpu_backends(form.family)]
every_form = pytest.mark.parametrize("form", COMPILED, ids=str)
OVER_VECTORS = [form for form in COMPILED if not form.takes_ids]
ONE_PRODUCT = [form for form in COMPILED if not form.options.get("projection") and form.options.get("reset") != "before"]
"""Forms in which no product takes the result of another computation."""


def whole_rows(values: Tensor) -> Tensor:
    """Return values whose rows are whole numbers / 128, the largest number being 127."""
    return quantize(values.flatten(1).T)[0].T.reshape(values.shape) / 128.0


@pytest.mark.parametrize("form", ONE_PRODUCT, ids=str)
@pytest.mark.parametrize("hidden, width", [(1, 1), (5, 3), (33, 70), (64, 128)])
def test_step_over_whole_numbers_is_exact(form: Form, hidden: int, width: int) -> None:
    x, weights, state = form.arguments([1] * 9, hidden, width)
    x = x if form.takes_ids else Ragged(whole_rows(x.data), x.offsets)
    arguments = Arguments(x, weights, map_arrays(state, whole_rows))
    if form.family == "qrnn":  # a row of its product is a window
        window = whole_rows(torch.cat((arguments.state.left, x.data[:, None]), dim=1))
        arguments = Arguments(Ragged(window[:, -1], x.offsets), weights, replace(arguments.state, left=window[:, :-1]))
    assert_encodings_close(form.run(*arguments, backend="cpu"), form.exact(arguments), steps=1)


@every_form
@pytest.mark.parametrize(
    "lengths, hidden, width", [([7, 1, 3], 5, 3), ([129, 0, 4, 250], 33, 70), ([40] * 20, 151, 64)], ids=str
)
def test_outputs_are_close_to_float32(form: Form, lengths: list[int], hidden: int, width: int) -> None:
    arguments = form.arguments(lengths, hidden, width)
    encoded, exact = form.run(*arguments, backend="cpu"), form.exact(arguments)
    for name in OUTPUTS:
        error = (getattr(encoded, name) - getattr(exact, name)).abs()
        assert error.mean() < 0.01 * getattr(exact, name).abs().max(), name
        assert error.max() < 0.1 * getattr(exact, name).abs().max(), name


@every_form
def test_each_row_has_its_own_scale(form: Form) -> None:
    """A batch with one huge row: with a common scale, the numbers of the other rows would be zeros."""
    x, weights, state = form.arguments([5, 5], 33, 7)
    alone = form.run(
        Ragged(x.data[5:], torch.tensor([0, 5])), weights, map_arrays(state, lambda array: array[1:]), backend="cpu"
    )
    if not form.takes_ids:
        x.data[:5] *= 1e6
    state = map_arrays(state, lambda array: torch.cat((array[:1] * 100, array[1:])))
    together = form.run(x, weights, state, backend="cpu")
    assert torch.equal(one(together.steps)[5:], one(alone.steps))
    for name, array in arrays(alone.state).items():
        assert torch.equal(arrays(together.state)[name][1:], array), name


@pytest.mark.parametrize("form", OVER_VECTORS, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-31])
def test_row_of_tiny_values_counts_as_zeros(form: Form, size: float) -> None:
    x, weights, _ = form.arguments([5], 33, 7)
    zeros = form.run(Ragged(torch.zeros_like(x.data), x.offsets), weights, backend="cpu")
    tiny = form.run(Ragged(x.data * size, x.offsets), weights, backend="cpu")
    torch.testing.assert_close(tiny.steps, zeros.steps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", OVER_VECTORS, ids=str)
def test_value_that_is_not_a_number_is_not_hidden(form: Form) -> None:
    x, weights, _ = form.arguments([3], 33, 7)
    x.data[1, 2] = torch.nan
    assert bool(one(form.run(x, weights, backend="cpu").steps)[1:].isnan().all())


def one(steps: Tensor | None) -> Any:
    assert steps is not None
    return steps
