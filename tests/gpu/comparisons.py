"""Comparisons of outputs of kernels on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kernels.ragged import Encoded
from tests.gpu.inputs import joined
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, OUTPUTS, Arguments, arrays, map_arrays


def outputs(encoded: Encoded) -> dict[str, Tensor]:
    """Return all outputs by name, including the arrays of the state, or of several states, and the scores of a text CNN."""
    requested = {name: array for name in (*OUTPUTS, "scores") if (array := getattr(encoded, name)) is not None}
    if not isinstance(encoded.state, tuple):
        return requested | arrays(encoded.state)
    states = enumerate(encoded.state)
    return requested | {f"{name} {number}": array for number, state in states for name, array in arrays(state).items()}


def agree(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    """Assert that the outputs are close, and the offsets equal. `expected` may have more outputs."""
    for name, array in outputs(actual).items():
        close(array, outputs(expected)[name], tolerance, name)
    assert (actual.offsets is None) == (expected.offsets is None)
    if actual.offsets is not None and expected.offsets is not None:
        assert actual.offsets.tolist() == expected.offsets.tolist()


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Assert that two arrays are close, whatever their devices and dtypes are."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=2 * tolerance, msg=lambda text: f"{name}: {text}"
    )


def same(actual: Encoded, expected: Encoded) -> None:
    """Assert that the outputs and the state are bit-equal. `expected` may have more outputs."""
    differing = [name for name, array in outputs(actual).items() if not torch.equal(array, outputs(expected)[name])]
    assert not differing


def same_outputs(actual: Encoded, expected: Encoded) -> None:
    """Assert that the outputs are bit-equal, whatever places the states have."""
    assert [name for name in OUTPUTS if getattr(actual, name) is not None] == [
        name for name in OUTPUTS if getattr(expected, name) is not None
    ]
    for name in (*OUTPUTS, "scores"):
        array, expected_array = getattr(actual, name), getattr(expected, name)
        assert array is None or torch.equal(array, expected_array), name


def same_state(actual: Any, expected: Any) -> None:
    """Assert equal states. A state cache may have a wider dtype."""
    for name, array in arrays(expected).items():
        assert torch.equal(getattr(actual, name).to(array.dtype), array), name


def assert_any_rows_match(run: Callable[..., Encoded], form: Form, arguments: Arguments, tolerance: float) -> None:
    """Compare up to 40 random rows with the reference."""
    x, weights, state = arguments
    encoded = outputs(run(x, weights, state, want=EVERYTHING))
    some = sorted(random.Random(x.rows).sample(range(x.rows), min(x.rows, 40)))
    each = inputs.rows(x)
    sampled = Arguments(joined([each[row] for row in some]), weights, map_arrays(state, itemgetter(some)))
    expected = outputs(exact(form, sampled))
    for name in encoded.keys() - {"steps"}:
        close(encoded[name][some], expected[name], tolerance, name)


def exact(form: Form, arguments: Arguments) -> Encoded:
    """Return the reference's encoding in float64. That of a convolution takes less time on a CPU, and that of a large layer on the GPU."""
    return form.exact(arguments.map_arrays(Tensor.cpu) if form.family == "conv" else arguments)
