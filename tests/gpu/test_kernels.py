"""Every form of every kernel family on a GPU against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.contract import Ragged
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import OUTPUTS, Given, arrays

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def on_gpu(given: Given) -> Given:
    return given.mapped(torch.Tensor.cuda)


@every_form
@pytest.mark.parametrize("storage", TOLERANCE, ids=str)
@pytest.mark.parametrize("data", [torch.float32, None], ids=["data in float32", "data as stored"])
def test_every_output_and_the_state_agree_with_the_reference(
    form: Form, storage: torch.dtype, data: torch.dtype | None
) -> None:
    for lengths, hidden, width in (([1], 1, 1), ([7, 0, 3, 12], 33, 67), ([0, 0], 3, 5), ([], 3, 5), ([65, 129], 151, 303)):
        x, weights, state = form.given(lengths, hidden, width, storage=storage)
        given = Given(Ragged(x.data.to(data or storage), x.offsets), weights, state)
        actual, expected = form.run(*on_gpu(given)), form.exact(given)
        pairs = [(getattr(actual, name), getattr(expected, name)) for name in OUTPUTS]
        pairs += [(getattr(actual.state, name), array) for name, array in arrays(expected.state).items()]
        for one, other in pairs:
            torch.testing.assert_close(one.cpu().double(), other, rtol=TOLERANCE[storage], atol=2 * TOLERANCE[storage])


@every_form
def test_the_same_batch_gives_the_same_bits_again(form: Form) -> None:
    given = on_gpu(form.given([65, 0, 129, 3], 151, 303))
    first, again = (form.run(*given) for _ in range(2))
    differing = [name for name in OUTPUTS if not torch.equal(getattr(first, name), getattr(again, name))]
    assert not differing
