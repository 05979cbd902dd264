"""The autoscaler decides as Kubernetes does, and replicas come and go after their delays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from loadtest.fleet.autoscaling import HorizontalPodAutoscaler, Policy, run
from loadtest.fleet.machines import Machine

MACHINE = Machine("test", "test", "2026-11-24", "session", 1000.0, 0.001, 1e-4, 1e-4, ((700.0, 0.01),), 1, 2)
BUSY = Policy("busy", backlog_target=None, busy_target=0.5, down_window=300, down_pods=1, down_seconds=120, start_seconds=60)


@pytest.mark.parametrize(
    "replicas, ratio, expected",
    [(4, 1.5, 6), (4, 1.05, 4), (4, 0.95, 4), (1, 100.0, 5), (10, 100.0, 20)],
    ids=["ratio", "tolerance above", "tolerance below", "four pods", "twice as many"],
)
def test_answers_are_those_of_kubernetes(replicas: int, ratio: float, expected: int) -> None:
    assert HorizontalPodAutoscaler(BUSY).desired(0, replicas, replicas, [ratio]) == expected


def test_largest_answer_of_several_metrics_counts() -> None:
    assert HorizontalPodAutoscaler(BUSY).desired(0, 4, 4, [0.1, 1.5]) == 6


def test_starting_replicas_count_as_idle() -> None:
    """Six of ten replicas are ready and have a third more than their target: eight would do, so the number does not change."""
    assert HorizontalPodAutoscaler(BUSY).desired(0, 10, 6, [4 / 3]) == 10


def test_scaling_down_waits_for_the_window_and_removes_one_at_a_time() -> None:
    autoscaler, replicas, removals = HorizontalPodAutoscaler(BUSY), 4, []
    assert autoscaler.desired(0, replicas, replicas, [1.0]) == 4
    for now in range(15, 1000, 15):
        wanted = autoscaler.desired(now, replicas, replicas, [0.25])
        if wanted < replicas:
            removals.append((now, wanted))
        replicas = wanted
    assert removals[0] == (300, 3)
    assert [after - before for (before, _), (after, _) in itertools.pairwise(removals)] == [120] * (len(removals) - 1)


def test_steady_load_keeps_its_replicas() -> None:
    trace = run(MACHINE, BUSY, np.full(1200, 2000.0), 4, {}, 1024)
    assert (trace.ready == 4).all() and not trace.refused.any()


def test_new_replicas_are_ready_after_their_start() -> None:
    """The metric is the mean of a minute, so too many replicas are added at first. They leave in turn."""
    offered = np.where(np.arange(3600) < 100, 1000.0, 3000.0)
    trace = run(MACHINE, BUSY, offered, 2, {}, 1024)
    risen = int(np.argmax(trace.ready > 2))
    assert 160 <= risen <= 175 + BUSY.window
    assert trace.ready[600] > trace.ready[-1] == 6


def test_lost_replicas_return_and_excess_is_refused() -> None:
    """Two of four replicas fail under a load of three: half a queue fills, then a third is refused until they return."""
    trace = run(MACHINE, Policy("none", backlog_target=1000.0, least=4), np.full(400, 3000.0), 4, {100: 0.5}, 1024)
    assert trace.ready[99] == 4 and trace.ready[100] == 2 and trace.ready[160] == 4
    assert trace.refused[:100].sum() == 0
    assert trace.refused.sum() == pytest.approx(60 * 1000 - 2 * 1024, rel=0.01)


def test_backlog_beyond_the_queue_never_reaches_its_target() -> None:
    """1024 waiting sequences are one second of work here. A target of two seconds is never reached, whatever is refused."""
    trace = run(MACHINE, Policy("high", backlog_target=2.0), np.full(600, 5000.0), 1, {}, 1024)
    assert (trace.ready == 1).all()
    assert trace.refused.sum() > 0.7 * trace.offered.sum()
    low = run(MACHINE, Policy("low", backlog_target=0.5), np.full(600, 5000.0), 1, {}, 1024)
    assert low.ready[-1] >= 5
