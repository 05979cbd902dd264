"""Which replica a session's chunks reach: the consistent hashing of proxies, over many keys at once.

A replica has points on a ring of 64-bit hashes. The owner of a key is the replica of the first point at or above the key's hash. Proxies
differ in the number of points. Envoy fixes the size of the ring and divides it by the number of healthy replicas, so that every change
of that number also adds or removes points of unchanged replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Replicas = NDArray[np.int64]

ENVOY_RING, ENVOY_MOST = 1024, 8 << 20
"""Envoy's defaults of minimum_ring_size and maximum_ring_size."""
LARGE_RING = 1 << 20
"""A minimum_ring_size with 100 points for each of 10,000 replicas."""
POINTS_SHIFT = np.uint64(32)


def mixed(values: Keys) -> Keys:
    """Return a hash of each value: splitmix64."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(count: int, seed: int) -> Keys:
    """Return the hashes of `count` session names in ascending order: only the order of keys on the ring matters."""
    return np.sort(mixed(mixed(np.arange(count, dtype=np.uint64)) ^ mixed(np.full(1, seed, np.uint64))))


@dataclass(frozen=True, slots=True)
class Hashing:
    """The hashing of one proxy. points: returns the points of each replica for a number of healthy replicas."""

    name: str
    points: Callable[[int], int]

    def owners(self, replicas: Replicas, keys: Keys) -> Replicas:
        """Return the replica of each key."""
        points = self.points(len(replicas))
        names = np.repeat(replicas.astype(np.uint64), points)
        numbers = np.tile(np.arange(points, dtype=np.uint64), len(replicas))
        positions = mixed(mixed(names + np.uint64(1)) ^ (numbers << POINTS_SHIFT))
        order = np.argsort(positions)
        return _owners(positions[order], np.repeat(replicas, points)[order], keys)


def envoy(ring: int) -> Hashing:
    """Return Envoy's RING_HASH with this minimum_ring_size, for replicas of equal weight."""
    return Hashing(f"Envoy, ring {ring}", lambda replicas: min(-(-ring // replicas), max(1, ENVOY_MOST // replicas)))


def fixed(name: str, points: int) -> Hashing:
    """Return the hashing of a proxy that gives each replica the same points for every number of replicas."""
    return Hashing(name, lambda _: points)


HASHINGS = (
    envoy(ENVOY_RING),
    envoy(LARGE_RING),
    fixed("nginx, consistent", 160),
    fixed("HAProxy, consistent", 16),
    fixed("Ray Serve, 100 virtual nodes", 100),
)
"""nginx has 160 points for each unit of weight, HAProxy 16. A HAProxy server with `weight 10` has the same number as a server of nginx."""


def _owners(positions: Keys, replicas: Replicas, keys: Keys) -> Replicas:
    """Return the replica of the first position at or above each key. Both are in ascending order, so the keys of a point are neighbours."""
    ends = np.searchsorted(keys, positions, side="right")
    owned: Replicas = np.repeat(replicas, np.diff(ends, prepend=0))
    beyond_the_last = np.full(len(keys) - len(owned), replicas[0])
    return np.concatenate([owned, beyond_the_last])


@dataclass(frozen=True, slots=True)
class Moves:
    """Sessions whose owner changes. others: sessions that neither leave a removed replica nor reach an added replica."""

    sessions: int
    others: int


def moves(before: Replicas, after: Replicas, changed: Replicas) -> Moves:
    """Compare the owners of the same keys before and after a change of the replicas `changed`."""
    moved = before != after
    others = moved & ~np.isin(before, changed) & ~np.isin(after, changed)
    return Moves(int(moved.sum()), int(others.sum()))
