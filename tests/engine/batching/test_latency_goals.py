"""Long sequences do not delay short ones, and static batching is far behind: the goals of the scheduler, on a virtual clock."""

from __future__ import annotations

import pytest

from tests.engine.batching import simulation
from tests.engine.batching.simulation import Continuous, Static

BUDGET_SECONDS = 0.0005
LOAD, LONG_SHARE = 0.7, 0.01
"""Share of the capacity at which latencies are compared, and share of long sequences in the mixture."""


def continuous() -> Continuous:
    return Continuous(BUDGET_SECONDS)


@pytest.mark.slow
def test_short_sequences_meet_their_latency_goals() -> None:
    alone, mixed = (simulation.capacity(continuous, share, 400_000) for share in (0.0, LONG_SHARE))
    p99_alone = simulation.p99_of_short(continuous(), LOAD * alone, 0.0)
    p99_mixed = simulation.p99_of_short(continuous(), LOAD * mixed, LONG_SHARE)
    assert p99_mixed <= p99_alone + 1.5 * BUDGET_SECONDS


@pytest.mark.slow
def test_static_batching_takes_five_times_as_long() -> None:
    rate = LOAD * simulation.capacity(Static, LONG_SHARE, 20_000)
    ours, static = (simulation.p99_of_short(policy, rate, LONG_SHARE) for policy in (continuous(), Static()))
    assert static >= 5 * ours
