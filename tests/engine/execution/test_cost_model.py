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


@pytest.mark.parametrize("actual, max_steps", [(Cost(3.0, 0.5, 0.25), 1000), (Cost(0.0, 0.5, 0.0), 4)])
def test_warm_up_measures_the_cost_of_batch_step_and_token(actual: Cost, max_steps: int) -> None:
    """A model of one size has a cost of each step, also if each trial takes longer than the last."""
    trials = itertools.repeat(1.0)
    encoder: Any = SimpleNamespace(
        device=torch.device("cpu"),
        spec=SimpleNamespace(input=SimpleNamespace(max_steps=max_steps)),
        time_batch=lambda rows, steps: actual.of(steps, rows * steps) * next(trials),
    )
    measured = model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500)
    for rows, steps in ((1, 1), (8, 100)):
        assert measured.of(steps, rows * steps) == pytest.approx(actual.of(steps, rows * steps), rel=0.1)
    trials = itertools.count(1.0)  # type: ignore[assignment]
    assert model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500).per_step > 0


PREDICTED = Cost(1.0, 0.5, 0.25)


def corrected(seconds: float, device: tuple[float, float]) -> Correction:
    """Return the correction after many batches of predicted.of(8, 32) seconds."""
    correction = Correction()
    for _ in range(400):
        correction.observe(PREDICTED.of(8, 32), seconds, device)
    return correction


@pytest.mark.parametrize("times", [0.05, 30.0])
def test_correction_follows_a_device_that_stays_far_from_its_warm_up(times: float) -> None:
    seconds = times * PREDICTED.of(8, 32)
    correction = corrected(seconds, (seconds, seconds))
    assert correction.of(PREDICTED) == pytest.approx([times * part for part in PREDICTED], rel=0.05)


@pytest.mark.parametrize("seconds", [20.0, 400.0])
def test_time_of_the_host_is_expected_once_for_each_batch(seconds: float) -> None:
    """The host sees the end of every batch late, so the device may have taken all the time."""
    device = PREDICTED.of(8, 32)
    correction = corrected(seconds, (0.0, seconds))
    assert correction.seconds(device) == pytest.approx(seconds, rel=0.05)
    assert correction.of(PREDICTED) == pytest.approx(PREDICTED._replace(fixed=1.0 + seconds - device), rel=0.05)


def test_device_within_its_bounds_keeps_the_factor() -> None:
    correction = Correction(2.0)
    correction.observe(1.0, 5.0, (1.5, 2.5))
    assert correction.factor == 2.0
    correction.observe(1.0, 5.0, (2.5, 3.0))
    assert 2.0 < correction.factor < 2.5
    correction.observe(1.0, 5.0, (0.5, 1.0))
    assert correction.factor < 2.0


def test_end_seen_late_is_made_up_for_by_the_batch_behind() -> None:
    """The host sees the ends of two batches together, so the second seems to take no time."""
    correction = Correction()
    for _ in range(400):
        correction.observe(1.0, 6.0, (0.0, 6.0))
        correction.observe(1.0, 0.0, (0.0, 6.0))
    assert correction.seconds(1.0) == pytest.approx(3.0, rel=0.1)
    assert correction.factor == 1.0


def test_factor_falls_while_batches_take_less_than_it_expects() -> None:
    """The device was slow for a while, and the host now sees the end of each batch late."""
    correction = Correction(2.0)
    for _ in range(400):
        correction.observe(1.0, 1.2, (0.2, 2.2))
    assert correction.seconds(1.0) == pytest.approx(1.2, rel=0.05)


def test_outlier_changes_the_correction_little() -> None:
    correction = Correction()
    correction.observe(1.0, 1000.0, (1000.0, 1000.0))
    assert correction.seconds(1.0) < 1 + 2 * FARTHEST / 10
    correction.observe(0.0, 1.0, (1.0, 1.0))
    assert correction.seconds(1.0) < 1 + 2 * FARTHEST / 10
