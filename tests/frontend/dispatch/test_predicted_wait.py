"""The wait that a frontend predicts for one engine. The time is an argument."""

from __future__ import annotations

import pytest

from service.frontend.dispatch.connection import PredictedWait


def test_idle_engine_has_no_wait() -> None:
    assert PredictedWait().seconds(now=5.0) == 0.0


def test_sent_requests_count_until_they_are_dropped() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.add(1, seconds=0.25)
    wait_at_engine.sent([1], frame=1)
    wait_at_engine.add(2, seconds=0.5)
    wait_at_engine.sent([2], frame=2)
    assert wait_at_engine.seconds(now=0.0) == wait_at_engine.seconds(now=60.0) == 0.75
    wait_at_engine.drop(1)
    assert wait_at_engine.seconds(now=60.0) == 0.5
    wait_at_engine.drop(1)
    wait_at_engine.drop(2)
    assert wait_at_engine.seconds(now=60.0) == 0.0


def test_report_does_not_include_a_request_that_has_not_left() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.add(1, seconds=0.25)
    wait_at_engine.report(2.0, frames=100, now=0.0)
    assert wait_at_engine.seconds(now=0.0) == 2.25


def test_report_shrinks_with_time_to_zero() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.report(3.0, frames=0, now=100.0)
    assert [wait_at_engine.seconds(now) for now in (100.0, 101.0, 103.0, 200.0)] == [3.0, 2.0, 0.0, 0.0]


def test_report_replaces_the_previous_one() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.report(3.0, frames=0, now=100.0)
    wait_at_engine.report(1.0, frames=0, now=100.5)
    assert wait_at_engine.seconds(now=100.5) == 1.0


@pytest.mark.parametrize("frames, wait", [(0, 2.75), (1, 2.5), (2, 2.5), (3, 2.0), (4, 2.0)])
def test_report_includes_the_frames_it_counts(frames: int, wait: float) -> None:
    """Frame 2 is not a request."""
    wait_at_engine = PredictedWait()
    wait_at_engine.add(1, seconds=0.25)
    wait_at_engine.sent([1], frame=1)
    wait_at_engine.add(2, seconds=0.5)
    wait_at_engine.sent([2], frame=3)
    wait_at_engine.report(2.0, frames, now=0.0)
    assert wait_at_engine.seconds(now=0.0) == wait
