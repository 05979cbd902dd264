"""Tests of every form of every kernel family on a GPU against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.inputs import TOLERANCE, agree, on_gpu, outputs, stored
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import OUTPUTS

# Kernels are specialised by the number of inputs. All sizes except the last share a kernel.
SIZES: tuple[tuple[list[int], int, int], ...] = (
    ([1], 1, 1),
    ([7, 0, 3, 12], 33, 27),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([65, 129], 151, 303),
)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@every_form
@pytest.mark.parametrize(
    "storage, data",
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_outputs_and_state_match_the_reference(form: Form, storage: torch.dtype, data: torch.dtype) -> None:
    for lengths, hidden, width in SIZES:
        arguments = stored(form.arguments(lengths, hidden, width, storage=storage), data)
        actual, expected = form.run(*on_gpu(arguments)), form.exact(arguments)
        assert outputs(actual).keys() == outputs(expected).keys()
        agree(actual, expected, TOLERANCE[storage])


@every_form
def test_same_batch_gives_the_same_bits_again(form: Form) -> None:
    arguments = on_gpu(form.arguments([65, 0, 129, 3], 151, 303))
    first, again = (form.run(*arguments) for _ in range(2))
    differing = [name for name in OUTPUTS if not torch.equal(getattr(first, name), getattr(again, name))]
    assert not differing
