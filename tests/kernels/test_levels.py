"""Tests of several levels of an LSTM or a GRU in one call, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.ragged import ContractError, Outputs, Ragged
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, OUTPUTS, arrays

FORMS = [Form("lstm"), Form("gru", reset="before"), Form("lstm", projection=True)]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)
LENGTHS = [3, 0, 5]


def three_levels(form: Form) -> tuple[Ragged, list[Any], list[Any]]:
    """Return the data, and the weights and states of each level."""
    first = form.arguments(LENGTHS, 8, 6)
    above = [form.arguments(LENGTHS, 8, first.weights.vector, seed=seed) for seed in (1, 2)]
    return first.x, [level.weights for level in (first, *above)], [level.state for level in (first, *above)]


@pytest.mark.parametrize(
    "form, backend",
    [(FORMS[0], "cpu"), *((form, backend) for form in FORMS for backend in ("framework", "reference"))],
    ids=str,
)
@pytest.mark.parametrize("starts", [True, False], ids=["states", "zeros"])
def test_levels_equal_calls_one_after_the_other(form: Form, backend: str, starts: bool) -> None:
    x, weights, states = three_levels(form)
    encoded = form.levels(x, weights, states if starts else None, backend=backend)
    for layer, before, after in zip(weights, states, encoded.state, strict=True):
        expected = form.run(x, layer, before if starts else None, backend=backend)
        assert expected.steps is not None
        x = Ragged(expected.steps, x.offsets)
        assert all(torch.equal(array, getattr(expected.state, name)) for name, array in arrays(after).items())
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)


@every_form
def test_only_wanted_outputs_are_returned(form: Form) -> None:
    encoded = form.levels(*three_levels(form), want=Outputs(last=True))
    assert encoded.last is not None and (encoded.steps, encoded.mean, encoded.max) == (None, None, None)


@every_form
def test_level_that_does_not_take_the_outputs_below_is_refused(form: Form) -> None:
    x, weights, states = three_levels(form)
    narrow = form.arguments(LENGTHS, 8, 5).weights
    width = weights[0].vector
    with pytest.raises(ContractError, match=rf"x.data has the shape \(8, {width}\), expected \(8, 5\)"):
        form.levels(x, [weights[0], narrow, weights[2]], states)


def test_table_above_the_first_level_is_refused() -> None:
    x, weights, states = three_levels(FORMS[0])
    folded = replace(weights[1], input=None, bias=None, table=torch.zeros(9, 32))
    with pytest.raises(ContractError, match=r"weights\[1\].input is None, expected a matrix"):
        FORMS[0].levels(x, [weights[0], folded, weights[2]], states)


def test_state_of_another_number_of_rows_is_refused() -> None:
    x, weights, states = three_levels(FORMS[0])
    short = replace(states[1], hidden=states[1].hidden[:2], cell=states[1].cell[:2])
    with pytest.raises(ContractError, match=r"state.hidden has the shape \(2, 8\), expected \(3, 8\)"):
        FORMS[0].levels(x, weights, [states[0], short, states[2]], want=EVERYTHING)
