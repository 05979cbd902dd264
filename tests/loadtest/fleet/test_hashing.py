"""Consistent hashing moves as few sessions as each proxy's rules allow."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.fleet import hashing
from loadtest.fleet.hashing import HASHINGS, Hashing, envoy
from loadtest.fleet.sizing import imbalance

KEYS = hashing.keys(100_000, seed=1)
FIXED = [each for each in HASHINGS if "Envoy" not in each.name]


@pytest.mark.parametrize("proxy", HASHINGS, ids=lambda proxy: proxy.name)
def test_owner_is_the_first_point_at_or_above_the_key(proxy: Hashing) -> None:
    """The fast search over sorted keys agrees with a search for each key."""
    replicas = np.array([5, 2, 9])
    owners = proxy.owners(replicas, KEYS)
    points = proxy.points(3)
    alone = [proxy.owners(replicas, KEYS[at : at + 1])[0] for at in range(0, len(KEYS), 9973)]
    assert points > 0 and set(owners) == {2, 5, 9}
    assert alone == list(owners[::9973])


@pytest.mark.parametrize("proxy", FIXED, ids=lambda proxy: proxy.name)
@pytest.mark.parametrize("count", [2, 10, 50])
def test_added_replica_takes_its_share_and_nothing_else_moves(proxy: Hashing, count: int) -> None:
    """The expected share is 1 / (n + 1), with the deviation of as many gaps as the replica has points."""
    new = np.array([count])
    before, after = proxy.owners(np.arange(count), KEYS), proxy.owners(np.arange(count + 1), KEYS)
    moved = hashing.moves(before, after, new)
    share = 1 / (count + 1)
    assert moved.others == 0
    assert moved.sessions / len(KEYS) == pytest.approx(share, abs=4 * share / np.sqrt(proxy.points(count)))


def test_removed_replica_gives_back_exactly_what_it_took() -> None:
    proxy = FIXED[0]
    before, with_one_more = proxy.owners(np.arange(7), KEYS), proxy.owners(np.arange(8), KEYS)
    moved = hashing.moves(with_one_more, before, np.array([7]))
    assert (moved.sessions, moved.others) == (int((with_one_more == 7).sum()), 0)


def test_envoy_moves_sessions_between_unchanged_replicas() -> None:
    """Three replicas have 342 points each and two have 512, so the loss of a replica moves other sessions too: 25 of 200 in reality."""
    proxy = envoy(1024)
    assert [proxy.points(count) for count in (2, 3, 100, 101, 2000)] == [512, 342, 11, 11, 1]
    moved = hashing.moves(proxy.owners(np.arange(3), KEYS), proxy.owners(np.arange(2), KEYS), np.array([2]))
    assert 0.05 < moved.others / (len(KEYS) - (moved.sessions - moved.others)) < 0.25


def test_envoy_limits_its_ring() -> None:
    assert envoy(1 << 30).points(10) * 10 <= hashing.ENVOY_MOST


@pytest.mark.parametrize("count", [3, 30, 300])
def test_fullest_replica_is_within_the_estimate(count: int) -> None:
    """The estimate of docs/sizing.md for nginx's 160 points is above the simulated maximum, and at most a seventh."""
    [proxy] = [each for each in HASHINGS if each.points(count) == 160]
    fullest = np.bincount(proxy.owners(np.arange(count), hashing.keys(300_000, 0))).max() * count / 300_000
    assert fullest <= imbalance(count, 160) <= 1.15 * fullest


def test_keys_depend_only_on_the_seed() -> None:
    assert (hashing.keys(100, 3) == hashing.keys(100, 3)).all()
    assert (hashing.keys(100, 3) != hashing.keys(100, 4)).any()
    assert (np.diff(KEYS.astype(float)) >= 0).all()
