"""Every form of every kernel family on a GPU against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.inputs import TOLERANCE, agree, on_gpu, outputs, stored
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import OUTPUTS

# All but the last have so few inputs that they share a kernel, where kernels are specialised by their number.
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
def test_every_output_and_the_state_agree_with_the_reference(form: Form, storage: torch.dtype, data: torch.dtype) -> None:
    for lengths, hidden, width in SIZES:
        given = stored(form.given(lengths, hidden, width, storage=storage), data)
        actual, expected = form.run(*on_gpu(given)), form.exact(given)
        assert outputs(actual).keys() == outputs(expected).keys()
        agree(actual, expected, TOLERANCE[storage])


@every_form
def test_the_same_batch_gives_the_same_bits_again(form: Form) -> None:
    given = on_gpu(form.given([65, 0, 129, 3], 151, 303))
    first, again = (form.run(*given) for _ in range(2))
    differing = [name for name in OUTPUTS if not torch.equal(getattr(first, name), getattr(again, name))]
    assert not differing
