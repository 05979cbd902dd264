"""Predicted times of batches, and their measurement."""

from __future__ import annotations

import itertools
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
def test_steps_within_fills_the_budget(fixed: float, per_step: float, per_token: float, rows: int, budget: float) -> None:
    cost = Cost(fixed, per_step, per_token)
    steps = cost.steps_within(budget, rows)
    rounding = 1e-9 * budget
    assert steps <= 0 or cost.of(steps, steps * rows) <= budget + rounding
    assert cost.of(steps + 1, (steps + 1) * rows) >= budget - rounding


def test_steps_without_cost_are_unlimited() -> None:
    assert Cost(1.0, 0.0, 0.0).steps_within(0.5, 3) > 1 << 20


def test_warm_up_measures_the_cost_of_batch_step_and_token() -> None:
    actual = Cost(3.0, 0.5, 0.25)
    encoder: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(input=SimpleNamespace(max_steps=1000)),
        time_batch=lambda rows, steps: actual.of(steps, rows * steps),
    )
    measured = model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500)
    assert measured.of(1, 1) == pytest.approx(actual.of(1, 1), rel=0.1)
    assert measured.of(100, 800) == pytest.approx(actual.of(100, 800), rel=0.1)


def test_warm_up_measures_a_model_of_one_size() -> None:
    encoder: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(input=SimpleNamespace(max_steps=4)),
        time_batch=lambda _, steps: 0.5 * steps,
    )
    assert model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500) == Cost(0.0, 0.5, 0.0)
    trials = itertools.count(1)
    encoder.time_batch = lambda _, steps: 0.5 * steps * next(trials)
    assert model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500).per_step > 0, (
        "each trial takes longer than the last"
    )


def test_correction_converges_to_the_observed_times() -> None:
    correction = Correction()
    for _ in range(100):
        correction.observe(predicted=1.0, seconds=2.0)
    assert correction.factor == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("seconds", [0.05, 30.0])
def test_correction_follows_a_device_that_stays_far_from_its_warm_up(seconds: float) -> None:
    correction = Correction()
    for _ in range(100):
        correction.observe(predicted=1.0, seconds=seconds)
    assert correction.factor == pytest.approx(seconds, rel=0.05)


def test_outlier_changes_the_correction_little() -> None:
    correction = Correction()
    correction.observe(predicted=1.0, seconds=1000.0)
    correction.observe(predicted=0.0, seconds=1.0)
    assert correction.factor < 1 + FARTHEST / 10
