"""The sizes for which CUDA graphs are captured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.execution.graph_buckets import GROWTH, LEAST_TOKENS, MOST_GRAPHS, Bucket, GraphBuckets

SIZES = st.integers(1, 5000)
DEFAULT = GraphBuckets(max_rows=64, max_tokens=4096, max_steps=512)


@given(rows=st.integers(1, 600), tokens=SIZES, steps=SIZES)
def test_buckets_are_distinct_and_limited(rows: int, tokens: int, steps: int) -> None:
    buckets = GraphBuckets(rows, tokens, steps).buckets
    assert 0 < len(buckets) <= MOST_GRAPHS
    assert len(set(buckets)) == len(buckets)


@given(rows=st.integers(1, 64), tokens=st.integers(1, 4096))
def test_batch_gets_the_smallest_bucket_that_holds_it(rows: int, tokens: int) -> None:
    bucket = DEFAULT.bucket(rows, tokens)
    large_enough = [size for size in DEFAULT.buckets if size.rows >= rows and size.tokens >= tokens]
    assert bucket == min(large_enough, default=None)


@given(rows=st.integers(1, 600), tokens=SIZES, steps=SIZES)
def test_token_counts_grow_by_a_bounded_factor(rows: int, tokens: int, steps: int) -> None:
    buckets = GraphBuckets(rows, tokens, steps).buckets
    for count in {bucket.rows for bucket in buckets}:
        counts = sorted(bucket.tokens for bucket in buckets if bucket.rows == count)
        assert all(after <= GROWTH * before for before, after in pairwise(counts))


def test_full_batches_and_single_rows_have_buckets() -> None:
    assert DEFAULT.bucket(64, 4096) == Bucket(64, 4096)
    assert DEFAULT.bucket(1, 512) == Bucket(1, 512)
    assert DEFAULT.bucket(1, 1) == Bucket(1, LEAST_TOKENS)
    assert DEFAULT.bucket(2, 100) == Bucket(8, 112)


@pytest.mark.parametrize("rows, tokens", [(65, 100), (64, 4097)])
def test_batch_beyond_the_limits_has_no_bucket(rows: int, tokens: int) -> None:
    assert DEFAULT.bucket(rows, tokens) is None


def test_buckets_are_sorted_by_size() -> None:
    sizes = [bucket.tokens for bucket in DEFAULT.buckets]
    assert sizes == sorted(sizes)
