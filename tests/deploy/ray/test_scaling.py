"""The autoscaler's policy brings the figures of the replicas to their targets, removing one replica at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploy.ray.metrics import Figures, reachable_peers
from deploy.ray.scaling import BACKLOG, BUSY, FiguresPolicy, wanted
from service.metrics import Metrics, render

TARGETS = {BACKLOG: 0.02, BUSY: 0.6}


@pytest.mark.parametrize(
    "replicas, backlogs, busy, expected",
    [
        (1, [0.1], [0.5], 5),
        (3, [0.01, 0.01, 0.01], [0.9, 0.9, 0.9], 5),
        (3, [0.0, 0.0, 0.0], [0.6, 0.63, 0.57], 3),
        (3, [0.0, 0.0, 0.0], [0.1, 0.1, 0.1], 2),
        (3, [], [], 3),
        (4, [0.03, 0.03], [0.6, 0.6], 4),
        (1, [0.0], [0.0], 0),
    ],
    ids=["backlog", "busy", "at the target", "one fewer", "no report", "new ones count as idle", "idle"],
)
def test_larger_answer_of_both_figures_counts(replicas: int, backlogs: list[float], busy: list[float], expected: int) -> None:
    assert wanted(replicas, {BACKLOG: backlogs, BUSY: busy}, TARGETS) == expected


def test_policy_reads_the_figures_of_each_replica() -> None:
    context = SimpleNamespace(
        target_num_replicas=2, aggregated_metrics={BACKLOG: {"a": 0.05, "b": 0.05}, BUSY: {"a": 0.2, "b": 0.2}}
    )
    assert FiguresPolicy(backlog_seconds=0.02, busy_share=0.6)(context) == (5, {})
    assert FiguresPolicy(backlog_seconds=1.0, busy_share=0.6)(
        SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)
    ) == (2, {})


def test_reachable_peers_come_from_the_text_of_the_metrics() -> None:
    metrics = Metrics()
    assert reachable_peers(render(metrics.snapshot()).decode()) == 0
    metrics.peers.set(2, "reachable")
    metrics.peers.set(1, "unreachable")
    assert reachable_peers(render(metrics.snapshot()).decode()) == 2


def test_figures_come_from_the_text_of_the_metrics() -> None:
    metrics = "\n".join(
        (
            "# TYPE seqserve_backlog_seconds gauge",
            'seqserve_backlog_seconds{engine="0"} 0.25',
            'seqserve_backlog_seconds{engine="1"} 1.5e-05',
            'seqserve_device_busy_seconds_total{engine="0"} 11',
            'seqserve_device_busy_seconds_total{engine="1"} 4',
        )
    )
    figures = Figures(_busy_seconds=5.0, _read_at=100.0)
    assert figures.read(metrics, now=110.0) == {BACKLOG: 0.25, BUSY: pytest.approx(0.5)}
    assert figures.read(metrics, now=120.0) == {BACKLOG: 0.25, BUSY: 0.0}
    assert figures.read("", now=130.0) == {BACKLOG: 0.0, BUSY: 0.0}, "an engine that restarts counts from 0"


def test_both_series_exist() -> None:
    names = {series.name for series in Metrics().series()}
    assert {"seqserve_backlog_seconds", "seqserve_device_busy_seconds"} <= names
