"""Frontends count the use of keys, and their connections, in the memory that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ipc import quota_counts
from service.ipc.connection_counts import NOT_ACCEPTING, ConnectionCounts, Port
from service.ipc.quota_counts import QuotaCounts, Used


@pytest.fixture
def frontends() -> Iterator[list[QuotaCounts]]:
    """Return the counts as two frontends see them, each from a separate descriptor."""
    shared = QuotaCounts.create(2)
    opened = [QuotaCounts.open(os.dup(shared.descriptor), place) for place in range(2)]
    yield opened
    for counts in (shared, *opened):
        os.close(counts.descriptor)


def test_frontends_see_the_same_use(frontends: list[QuotaCounts]) -> None:
    first, second = (counts.of_key("reader") for counts in frontends)
    first.begin(3, 100, now=10.0)
    second.begin(2, 50, now=10.5)
    assert first.total(10.5) == second.total(10.5) == Used(5, 2, 150)
    first.end(3)
    assert second.total(10.5).in_flight == 2
    assert [second.total(now).requests for now in (10.9, 11.0, 11.25, 11.75, 12.0, 99.0)] == [2, 2, 1.5, 0.5, 0, 0]
    others = [frontends[number % 2].of_key(f"key-{number}") for number in range(20)]
    for number, use in enumerate(others):
        use.begin(number, 0, now=1.0)
    totals = [frontends[1].of_key(f"key-{number}").total(1.0) for number in range(20)]
    assert totals == [Used(number, 1, 0) for number in range(20)]


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 5)), max_size=40))
def test_estimate_lies_between_half_open_windows(steps: list[tuple[float, int]]) -> None:
    """The estimate has at least the requests of this second of the clock, and at most the requests of two seconds."""
    use, now, times = QuotaCounts.private().of_key("reader"), 5.0, list[float]()
    for passed, count in steps:
        now += passed
        for _ in range(count):
            use.begin(1, 0, now)
            times.append(now)
        estimate = use.total(now).requests
        assert sum(int(time) == int(now) for time in times) <= estimate <= sum(int(time) >= int(now) - 1 for time in times)


def test_frontend_that_ended_holds_nothing(frontends: list[QuotaCounts]) -> None:
    uses = [counts.of_key("reader") for counts in frontends]
    for use in uses:
        use.begin(4, 0, now=1.0)
    frontends[0].remove(1)
    assert uses[0].total(1.0).in_flight == 4
    uses[1].begin(1, 0, now=1.0)
    assert uses[0].total(1.0).in_flight == 5, "the next frontend in this place counts from zero"


def test_too_many_keys_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_counts, "MAX_KEYS", 3)
    counts = QuotaCounts.private()
    for name in "abcab":
        counts.of_key(name)
    with pytest.raises(RuntimeError, match="3 keys"):
        counts.of_key("d")


def test_every_process_sees_the_numbers_of_all_frontends() -> None:
    supervisor = ConnectionCounts.create(3)
    frontend = ConnectionCounts(os.dup(supervisor.descriptor))
    assert frontend.on_port(Port.HTTP).tolist() == frontend.on_port(Port.GRPC).tolist() == [NOT_ACCEPTING] * 3
    for place in range(3):
        frontend.on_port(Port.HTTP)[place] = place
        frontend.on_port(Port.GRPC)[place] = 10 + place
    assert supervisor.on_port(Port.HTTP).tolist() == [0, 1, 2]
    supervisor.remove(1)
    assert frontend.on_port(Port.HTTP).tolist() == [0, NOT_ACCEPTING, 2]
    assert frontend.on_port(Port.GRPC).tolist() == [10, NOT_ACCEPTING, 12]
