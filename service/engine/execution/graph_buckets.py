"""The sizes for which CUDA graphs are captured. Pure: nothing here knows a device.

A graph is captured for a number of rows and tokens and serves every batch up to these numbers. Its other rows are empty, and its other
tokens belong to no row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

GROWTH = 1.25
"""Largest factor from one token count to the next."""
LEAST_TOKENS = 16
MOST_GRAPHS = 64
FEW_ROWS = 8
"""A row count between one row and a full batch."""


class Bucket(NamedTuple):
    """The size of one graph."""

    rows: int
    tokens: int


class GraphBuckets:
    """The buckets of one model, at most MOST_GRAPHS."""

    def __init__(self, max_rows: int, max_tokens: int, max_steps: int) -> None:
        """max_steps: of one row."""
        token_counts: dict[int, Sequence[int]] = {}
        remaining = MOST_GRAPHS
        # Full batches and single rows get all their token counts. FEW_ROWS gets what remains, smallest first.
        for rows in dict.fromkeys((max_rows, 1, min(FEW_ROWS, max_rows))):
            counts = _token_counts(max(LEAST_TOKENS, rows), min(max_tokens, rows * max_steps))
            token_counts[rows] = counts[:remaining]
            remaining -= len(token_counts[rows])
        self._token_counts = dict(sorted(token_counts.items()))

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, smallest first: small batches are the most frequent, and capturing may run out of time."""
        buckets = [Bucket(rows, tokens) for rows, counts in self._token_counts.items() for tokens in counts]
        return sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.rows))

    def bucket(self, rows: int, tokens: int) -> Bucket | None:
        """Return the smallest bucket that holds a batch: the fewest rows, then the fewest tokens."""
        for bucket_rows, counts in self._token_counts.items():
            if rows <= bucket_rows and counts and tokens <= counts[-1]:
                return Bucket(bucket_rows, counts[bisect_left(counts, tokens)])
        return None


def _token_counts(least: int, most: int) -> Sequence[int]:
    """Return token counts from `least` to `most`, each at most GROWTH times its predecessor."""
    counts = [min(least, most)]
    while counts[-1] < most:
        counts.append(min(most, int(counts[-1] * GROWTH)))
    return counts
