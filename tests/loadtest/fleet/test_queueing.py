"""Waiting times match the closed forms of queueing theory, and the scheduler on its virtual clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.fleet.queueing import BatchServer, mean_wait, probability_of_waiting, waits
from loadtest.simulation import figures, policies
from loadtest.simulation.figures import SimulationCase
from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.execution.cost_model import Cost

SECONDS = 0.002


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_simulated_waits_have_the_mean_of_an_m_d_1_queue(load: float) -> None:
    source = np.random.default_rng(0)
    between = source.exponential(SECONDS / load, 400_000)
    simulated = waits(between, np.full_like(between, SECONDS))
    assert simulated.mean() == pytest.approx(mean_wait(load, SECONDS), rel=0.05)


def test_simulated_waits_have_the_probability_of_an_m_m_1_queue() -> None:
    source = np.random.default_rng(1)
    between, service = source.exponential(1.0, 400_000), source.exponential(0.7, 400_000)
    assert (waits(between, service) > 0).mean() == pytest.approx(probability_of_waiting(0.7, 1), rel=0.03)


def test_waits_of_a_few_arrivals_are_those_by_hand() -> None:
    """Arrivals at 0, 1, 2 and 10 with 3 s each wait 0, 2, 4 and 0 s."""
    assert list(waits(np.array([0.0, 1.0, 1.0, 8.0]), np.full(4, 3.0))) == [0, 2, 4, 0]


@pytest.mark.parametrize("load, servers, expected", [(0.5, 1, 0.5), (1.0, 2, 1 / 3), (8.0, 10, 0.4092), (3.0, 3, 1.0)])
def test_probability_of_waiting_matches_erlang_c(load: float, servers: int, expected: float) -> None:
    assert probability_of_waiting(load, servers) == pytest.approx(expected, abs=0.0001)


def test_more_load_than_capacity_waits_without_end() -> None:
    assert mean_wait(1.0, 1.0) == math.inf
    assert BatchServer(1.0, 0.1).latency(10.0, 0.5) == math.inf


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_batch_law_predicts_the_scheduler_on_the_virtual_clock(share: float) -> None:
    """With sequences of 10 steps, the scheduler's p50 and p99 match the closed form within a tenth."""
    cost, steps, rows = Cost(26.21e-6, 0.596e-6, 0.01281e-6), 10, 64
    server = BatchServer(cost.of(steps, 0), cost.per_token * steps, rows)
    limits = SchedulerLimits(1 << 40, rows, 4096, 0.0005)
    rate = share * server.capacity
    run = figures.run(SimulationCase(cost, "short", 20_000), lambda: policies.make("continuous", cost, limits, 0.0001), rate)
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
        assert run.short[name] == pytest.approx(server.latency(rate, quantile), rel=0.1)


def test_server_is_as_fast_as_its_measurements() -> None:
    server = BatchServer.of(alone_seconds=0.001, rate=5000)
    assert server.fixed + server.each == pytest.approx(0.001)
    assert server.capacity == pytest.approx(5000, rel=0.001)
    assert server.latency(1.0, 0.0) == pytest.approx(0.001)
