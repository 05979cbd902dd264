"""What a turn is expected to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.execution import model_runner
from service.engine.execution.cost_model import FARTHEST, Correction, Cost

SECONDS = st.floats(1e-7, 1e-2)


@given(fixed=SECONDS, per_step=SECONDS, per_token=SECONDS, rows=st.integers(1, 64), budget=st.floats(1e-4, 1.0))
def test_as_many_steps_fit_into_a_budget_as_take_no_longer(
    fixed: float, per_step: float, per_token: float, rows: int, budget: float
) -> None:
    cost = Cost(fixed, per_step, per_token)
    steps = cost.steps_within(budget, rows)
    rounding = 1e-9 * budget
    assert steps <= 0 or cost.of(steps, steps * rows) <= budget + rounding
    assert cost.of(steps + 1, (steps + 1) * rows) >= budget - rounding


def test_what_costs_nothing_a_step_is_never_cut() -> None:
    assert Cost(1.0, 0.0, 0.0).steps_within(0.5, 3) > 1 << 20


def test_warm_up_finds_the_cost_of_a_turn_a_step_and_a_token() -> None:
    real = Cost(3.0, 0.5, 0.25)
    encoder: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(input=SimpleNamespace(max_steps=1000)),
        trial=lambda rows, steps: real.of(steps, rows * steps),
    )
    found = model_runner._measured(encoder, rows=8, steps=4, tokens=500)
    assert found.of(1, 1) == pytest.approx(real.of(1, 1), rel=0.1)
    assert found.of(100, 800) == pytest.approx(real.of(100, 800), rel=0.1)


def test_a_model_of_one_size_alone_has_a_cost_too() -> None:
    encoder: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(input=SimpleNamespace(max_steps=4)),
        trial=lambda _, steps: 0.5 * steps,
    )
    assert model_runner._measured(encoder, rows=8, steps=4, tokens=500) == Cost(0.0, 0.5, 0.0)


def test_predictions_come_to_what_is_observed() -> None:
    correction = Correction()
    for _ in range(100):
        correction.observe(predicted=1.0, took=2.0)
    assert correction.factor == pytest.approx(2.0, rel=0.01)


def test_one_turn_that_was_held_up_changes_little_and_one_without_a_prediction_nothing() -> None:
    correction = Correction()
    correction.observe(predicted=1.0, took=1000.0)
    correction.observe(predicted=0.0, took=1.0)
    assert correction.factor < 1 + FARTHEST / 10
