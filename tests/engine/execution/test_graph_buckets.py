"""The sizes of which graphs are made."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.execution.graph_buckets import GROWTH, LEAST_TOKENS, MOST_GRAPHS, Bucket, GraphBuckets

SIZES = st.integers(1, 5000)
DEFAULT = GraphBuckets(most_rows=64, most_tokens=4096, most_steps=512)


@given(rows=st.integers(1, 600), tokens=SIZES, steps=SIZES)
def test_there_are_no_more_graphs_than_may_be_and_none_twice(rows: int, tokens: int, steps: int) -> None:
    buckets = GraphBuckets(rows, tokens, steps).buckets
    assert 0 < len(buckets) <= MOST_GRAPHS
    assert len(set(buckets)) == len(buckets)


@given(rows=st.integers(1, 64), tokens=st.integers(1, 4096))
def test_a_turn_gets_the_smallest_bucket_that_has_room_for_it(rows: int, tokens: int) -> None:
    bucket = DEFAULT.bucket(rows, tokens)
    roomy = [one for one in DEFAULT.buckets if one.rows >= rows and one.tokens >= tokens]
    assert bucket == min(roomy, default=None)


@given(rows=st.integers(1, 600), tokens=SIZES, steps=SIZES)
def test_tokens_of_a_like_number_of_rows_are_close_together(rows: int, tokens: int, steps: int) -> None:
    buckets = GraphBuckets(rows, tokens, steps).buckets
    for count in {bucket.rows for bucket in buckets}:
        rungs = sorted(bucket.tokens for bucket in buckets if bucket.rows == count)
        assert all(after <= GROWTH * before for before, after in pairwise(rungs))


def test_full_turns_and_single_rows_are_served_whole() -> None:
    assert DEFAULT.bucket(64, 4096) == Bucket(64, 4096)
    assert DEFAULT.bucket(1, 512) == Bucket(1, 512)
    assert DEFAULT.bucket(1, 1) == Bucket(1, LEAST_TOKENS)
    assert DEFAULT.bucket(2, 100) == Bucket(8, 112)


@pytest.mark.parametrize("rows, tokens", [(65, 100), (64, 4097)])
def test_what_is_larger_than_a_turn_has_no_bucket(rows: int, tokens: int) -> None:
    assert DEFAULT.bucket(rows, tokens) is None


def test_the_smallest_come_first() -> None:
    sizes = [bucket.tokens for bucket in DEFAULT.buckets]
    assert sizes == sorted(sizes)
