"""The sizes for which CUDA graphs are captured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.execution.graph_buckets import (
    LEAST_TOKENS,
    MOST_GRAPHS,
    TOKEN_PADDING,
    GraphBuckets,
    TokenCost,
    row_counts,
    token_limits,
)

MICROSECOND = 1e-6
SIZES = st.integers(1, 5000)
TIMES = st.floats(0, 1e-2)


def cost(rows: int, *, per_token: float = 0.01, padded: float = 0.004, fixed: float = 20.0) -> TokenCost:
    """Return the cost of graphs with the default limits. Times are in microseconds."""
    least, most = token_limits(rows, 4096, 512)
    shortest, longest = (MICROSECOND * (fixed + per_token * tokens) for tokens in (least, most))
    return TokenCost(rows, least, most, shortest, longest, MICROSECOND * padded)


DEFAULT = GraphBuckets([cost(rows) for rows in (64, 8, 1)])


@st.composite
def random_costs(draw: st.DrawFn) -> list[TokenCost]:
    most_rows, max_tokens, max_steps = draw(st.integers(1, 600)), draw(SIZES), draw(SIZES)
    rows = draw(st.lists(st.sampled_from(row_counts(most_rows)), min_size=1, unique=True))
    return [
        TokenCost(count, *token_limits(count, max_tokens, max_steps), draw(TIMES), draw(TIMES), draw(st.floats(-1e-6, 1e-5)))
        for count in rows
    ]


@given(random_costs())
def test_buckets_are_distinct_and_limited(costs: list[TokenCost]) -> None:
    buckets = GraphBuckets(costs).buckets
    assert len(costs) <= len(buckets) <= MOST_GRAPHS
    assert len(set(buckets)) == len(buckets)
    for each in costs:
        tokens = [bucket.tokens for bucket in buckets if bucket.rows == each.rows]
        assert (tokens[0], tokens[-1]) == (each.least, each.most)
    assert [bucket.tokens for bucket in buckets] == sorted(bucket.tokens for bucket in buckets)


@given(rows=st.integers(1, 66), tokens=st.integers(1, 4200))
def test_batch_gets_the_smallest_bucket_that_holds_it(rows: int, tokens: int) -> None:
    bucket = DEFAULT.bucket(rows, tokens)
    large_enough = [size for size in DEFAULT.buckets if size.rows >= rows and size.tokens >= tokens]
    assert bucket == min(large_enough, default=None)
    assert (bucket is None) == (rows > 64 or tokens > 4096)


@pytest.mark.parametrize("padded", [0.0, 0.001, 0.004, 0.01])
def test_padding_takes_at_most_its_share_of_a_batch(padded: float) -> None:
    costs = [cost(rows, padded=padded) for rows in (64, 1)]
    buckets = GraphBuckets(costs).buckets
    for each in costs:
        for smaller, larger in pairwise(bucket.tokens for bucket in buckets if bucket.rows == each.rows):
            seconds = MICROSECOND * (20 + 0.01 * (smaller + 1))
            assert (larger - smaller - 1) * each.padded <= TOKEN_PADDING * seconds * (1 + 1e-9)


def test_padding_is_the_share_of_the_time_that_a_batch_takes() -> None:
    """Between the smallest and the largest graph the time grows with the tokens. Half the share of the tokens is always allowed."""
    costs = TokenCost(rows=8, least=100, most=1100, shortest=0.010, longest=0.030, padded=0.0001)
    assert [costs.padding(tokens, 0.5) for tokens in (100, 600, 1100)] == [50, 150, 275]
    assert costs._replace(shortest=0.100).padding(100, 0.5) == 500
    assert costs._replace(padded=0.0).padding(100, 0.5) == costs.most == costs._replace(shortest=9.0).padding(100, 0.5)


@pytest.mark.parametrize("most, counts", [(2, [2, 1]), (100, [100, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1])])
def test_row_counts_are_at_most_half_as_large_again(most: int, counts: list[int]) -> None:
    assert row_counts(most) == counts


def test_token_limits_depend_on_the_rows() -> None:
    assert token_limits(1, 4096, 512) == (LEAST_TOKENS, 512)
    assert token_limits(64, 4096, 512) == (64, 4096)
    assert token_limits(64, 40, 512) == (40, 40)
    assert token_limits(1, 4096, 3) == (3, 3)
