"""How long a request would wait at one engine, as a front reckons it. The time is an argument."""

from __future__ import annotations

import pytest

from service.frontend.dispatch.connection import PredictedWait


def test_nobody_waits_for_an_engine_that_was_asked_nothing() -> None:
    assert PredictedWait().seconds(now=5.0) == 0.0


def test_what_was_sent_is_waited_for_until_it_is_answered_or_given_up() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.add(1, frame=1, seconds=0.25)
    wait_at_engine.add(2, frame=2, seconds=0.5)
    assert wait_at_engine.seconds(now=0.0) == wait_at_engine.seconds(now=60.0) == 0.75
    wait_at_engine.drop(1)
    assert wait_at_engine.seconds(now=60.0) == 0.5
    wait_at_engine.drop(1)
    wait_at_engine.drop(2)
    assert wait_at_engine.seconds(now=60.0) == 0.0


def test_a_report_grows_old_and_is_never_less_than_nothing() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.report(3.0, frames=0, now=100.0)
    assert [wait_at_engine.seconds(now) for now in (100.0, 101.0, 103.0, 200.0)] == [3.0, 2.0, 0.0, 0.0]


def test_a_report_takes_the_place_of_the_one_before() -> None:
    wait_at_engine = PredictedWait()
    wait_at_engine.report(3.0, frames=0, now=100.0)
    wait_at_engine.report(1.0, frames=0, now=100.5)
    assert wait_at_engine.seconds(now=100.5) == 1.0


@pytest.mark.parametrize("frames, wait", [(0, 2.75), (1, 2.5), (2, 2.5), (3, 2.0), (4, 2.0)])
def test_a_report_counts_what_the_engine_had_read_and_nothing_that_came_later(frames: int, wait: float) -> None:
    """Frame 2 was a word about another request."""
    wait_at_engine = PredictedWait()
    wait_at_engine.add(1, frame=1, seconds=0.25)
    wait_at_engine.add(2, frame=3, seconds=0.5)
    wait_at_engine.report(2.0, frames, now=0.0)
    assert wait_at_engine.seconds(now=0.0) == wait
