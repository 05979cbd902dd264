"""The wait that a frontend predicts for one engine. The time is an argument."""

from __future__ import annotations

import pytest

from service.frontend.dispatch.connection import PredictedWait


def test_sent_requests_count_until_they_are_dropped() -> None:
    wait = PredictedWait()
    assert wait.seconds(now=5.0) == 0.0
    for request, seconds in ((1, 0.25), (2, 0.5)):
        wait.add(request, seconds)
        wait.sent([request], frame=request)
    assert wait.seconds(now=0.0) == wait.seconds(now=60.0) == 0.75
    for request, rest in ((1, 0.5), (1, 0.5), (2, 0.0)):
        wait.drop(request)
        assert wait.seconds(now=60.0) == rest


def test_report_shrinks_with_time_to_zero_and_replaces_the_previous_one() -> None:
    wait = PredictedWait()
    wait.report(3.0, frames=0, now=100.0)
    assert [wait.seconds(now) for now in (100.0, 101.0, 103.0, 200.0)] == [3.0, 2.0, 0.0, 0.0]
    wait.report(1.0, frames=0, now=100.5)
    assert wait.seconds(now=100.5) == 1.0


@pytest.mark.parametrize("frames, seconds", [(0, 2.75), (1, 2.5), (2, 2.5), (3, 2.0), (4, 2.0)])
def test_report_includes_the_frames_it_counts(frames: int, seconds: float) -> None:
    """Frame 2 is not a request. A request that has not left is in no report."""
    wait = PredictedWait()
    wait.add(1, seconds=0.25)
    wait.sent([1], frame=1)
    wait.add(2, seconds=0.5)
    wait.sent([2], frame=3)
    wait.add(3, seconds=0.125)
    wait.report(2.0, frames, now=0.0)
    assert wait.seconds(now=0.0) == seconds + 0.125
