"""The sizes for which CUDA graphs are captured, chosen by what padding costs. Pure: nothing here knows a device.

A graph is captured for a number of rows and tokens and serves every batch up to these numbers. Its other rows are empty, and its other
tokens belong to no row. Both take time, and each graph takes time and memory at the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

LEAST_TOKENS = 16
MOST_GRAPHS = 64
ROW_PADDING = 0.05
"""A row count gets no graphs if the graphs of the next larger row count take at most this share longer for its batches."""
TOKEN_PADDING = 0.1
"""Largest share of a batch's time that its padded tokens take. Batches of all sizes together lose half of it."""


class Bucket(NamedTuple):
    """The size of one graph."""

    rows: int
    tokens: int


class TokenCost(NamedTuple):
    """The measured time of the graphs with one row count.

    least, most: the fewest and the most tokens of a graph. shortest, longest: seconds of full batches of these sizes.
    padded: seconds for each token that belongs to no row.
    """

    rows: int
    least: int
    most: int
    shortest: float
    longest: float
    padded: float

    def padding(self, tokens: int, share: float) -> int:
        """Return how many padded tokens take a share of the time of a batch: at least half that share of its tokens."""
        filled = (tokens - self.least) / max(1, self.most - self.least)
        seconds = self.shortest + filled * max(0.0, self.longest - self.shortest)
        affordable = min(self.most, share * seconds / self.padded) if self.padded > 0 else self.most
        return int(max(affordable, share / 2 * tokens))


class GraphBuckets:
    """The buckets of one model, at most MOST_GRAPHS."""

    def __init__(self, costs: Sequence[TokenCost]) -> None:
        """costs: of each row count that has graphs."""
        share = TOKEN_PADDING
        self._token_counts = _token_counts(costs, share)
        while sum(map(len, self._token_counts.values())) > MOST_GRAPHS:
            share *= 1.25
            self._token_counts = _token_counts(costs, share)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, smallest first: small batches are the most frequent, and capturing may run out of time."""
        buckets = [Bucket(rows, tokens) for rows, counts in self._token_counts.items() for tokens in counts]
        return sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.rows))

    def bucket(self, rows: int, tokens: int) -> Bucket | None:
        """Return the smallest bucket that holds a batch: the fewest rows, then the fewest tokens."""
        for bucket_rows, counts in self._token_counts.items():
            if rows <= bucket_rows and tokens <= counts[-1]:
                return Bucket(bucket_rows, counts[bisect_left(counts, tokens)])
        return None


def row_counts(most: int) -> list[int]:
    """Return the row counts that may have graphs, largest first: `most`, and below it the powers of two and three times these."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({most, *(rows for power in powers for rows in (power, 3 * power) if rows < most)}, reverse=True)


def token_limits(rows: int, max_tokens: int, max_steps: int) -> tuple[int, int]:
    """Return the fewest and the most tokens of graphs with `rows` rows. max_steps: of one row."""
    most = min(max_tokens, rows * max_steps)
    return min(max(LEAST_TOKENS, rows), most), most


def _token_counts(costs: Sequence[TokenCost], share: float) -> dict[int, list[int]]:
    """Return the token counts by row count, both rising, so that padded tokens take at most `share` of a batch's time."""
    token_counts = {}
    for cost in sorted(costs):
        counts = [cost.least]
        while counts[-1] < cost.most:
            smallest = counts[-1] + 1
            counts.append(min(cost.most, smallest + cost.padding(smallest, share)))
        token_counts[cost.rows] = counts
    return token_counts
