"""The sizes of which CUDA graphs are made. Pure: nothing here knows a device.

A graph is made for so many rows and tokens and serves every turn that has no more of either: its other rows are empty, and its other
tokens belong to none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

GROWTH = 1.25
"""From one number of tokens to the next, at most."""
LEAST_TOKENS = 16
MOST_GRAPHS = 64
FEW_ROWS = 8
"""Between one row and as many as a turn may have."""


class Bucket(NamedTuple):
    """The size of one graph."""

    rows: int
    tokens: int


class GraphBuckets:
    """The buckets of one model, at most MOST_GRAPHS."""

    def __init__(self, most_rows: int, most_tokens: int, most_steps: int) -> None:
        """most_steps: of one row."""
        self._rungs: dict[int, Sequence[int]] = {}
        left = MOST_GRAPHS
        # A full turn and a single row are served whole; few rows have what is left, the shortest turns first.
        for rows in dict.fromkeys((most_rows, 1, min(FEW_ROWS, most_rows))):
            found = _rungs(max(LEAST_TOKENS, rows), min(most_tokens, rows * most_steps))
            self._rungs[rows] = found[:left]
            left -= len(self._rungs[rows])
        self._rungs = dict(sorted(self._rungs.items()))

    @property
    def buckets(self) -> list[Bucket]:
        """The smallest first: those are asked for most, and are there if time is too short for all."""
        every = [Bucket(rows, tokens) for rows, rungs in self._rungs.items() for tokens in rungs]
        return sorted(every, key=lambda bucket: (bucket.tokens, bucket.rows))

    def bucket(self, rows: int, tokens: int) -> Bucket | None:
        """The smallest that has room for a turn: the fewest rows, then the fewest tokens."""
        for count, rungs in self._rungs.items():
            if rows <= count and rungs and tokens <= rungs[-1]:
                return Bucket(count, rungs[bisect_left(rungs, tokens)])
        return None


def _rungs(least: int, most: int) -> Sequence[int]:
    """Numbers of tokens, each at most GROWTH times the one before."""
    rungs = [min(least, most)]
    while rungs[-1] < most:
        rungs.append(min(most, int(rungs[-1] * GROWTH)))
    return rungs
