"""Chunks packed end to end in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.ragged import Ragged
from service.engine.batch import Batch, Chunk
from service.engine.execution.staging import PARALLEL_BYTES, Staging
from service.ipc.messages import FEATURES, IDS, ModelKey, Returns

CPU = torch.device("cpu")
ROWS, TOKENS = 5, 40


def stage(staging: Staging, staged: Batch) -> Ragged:
    assert staging.stage(staged).tolist() == list(accumulate([chunk.steps for chunk in staged.chunks], initial=0))
    return staging.ragged(staged.rows, staged.tokens)


def batch(arrays: Sequence[NDArray[np.generic]]) -> Batch:
    return Batch(ModelKey("words", "1"), [Chunk(array.tobytes(), len(array), Returns(), None) for array in arrays])


def ids(*lengths: int) -> list[NDArray[np.int32]]:
    """Return ids that count from 0 across all chunks."""
    return np.split(np.arange(sum(lengths), dtype=IDS), np.cumsum(lengths)[:-1])


def features(width: int, *lengths: int) -> list[NDArray[np.float32]]:
    numbers = np.arange(sum(lengths) * width, dtype=FEATURES).reshape(-1, width)
    return np.split(numbers, np.cumsum(lengths)[:-1])


@given(st.lists(st.integers(1, TOKENS // ROWS), min_size=1, max_size=ROWS))
def test_ids_are_packed_end_to_end(lengths: list[int]) -> None:
    x = stage(Staging(ROWS, TOKENS, None, CPU), batch(ids(*lengths)))
    assert x.data.dtype == torch.int32
    assert x.data.tolist() == list(range(sum(lengths)))
    assert x.offsets.dtype == torch.int32
    assert x.lengths.tolist() == lengths


@pytest.mark.parametrize("difference", [-4, 0, 4])
def test_large_parts_are_copied_whole(difference: int) -> None:
    steps = (PARALLEL_BYTES + difference) // 4
    values = np.random.default_rng(0).integers(1 << 30, size=steps).astype(IDS)
    staged = batch([np.arange(3, dtype=IDS), values, np.arange(5, dtype=IDS)])
    for data in (staged.chunks[1].data, memoryview(staged.chunks[1].data)):
        chunks = [staged.chunks[0], replace(staged.chunks[1], data=data), staged.chunks[2]]
        x = stage(Staging(ROWS, steps + 8, None, CPU), Batch(staged.model, chunks))
        assert x.data.numpy()[3:-5].tobytes() == values.tobytes()
        assert x.data[:3].tolist() + x.data[-5:].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@given(st.integers(1, 7), st.lists(st.integers(1, TOKENS // ROWS), min_size=1, max_size=ROWS))
def test_features_are_packed_end_to_end(width: int, lengths: list[int]) -> None:
    x = stage(Staging(ROWS, TOKENS, width, CPU), batch(features(width, *lengths)))
    assert x.data.dtype == torch.float32
    assert x.data.tolist() == np.concatenate(features(width, *lengths)).tolist()
    assert x.lengths.tolist() == lengths


def test_full_batch_fits() -> None:
    x = stage(Staging(ROWS, TOKENS, None, CPU), batch(ids(*[TOKENS // ROWS] * ROWS)))
    assert x.lengths.tolist() == [TOKENS // ROWS] * ROWS


def test_staging_overwrites_a_longer_batch() -> None:
    staging = Staging(ROWS, TOKENS, None, CPU)
    staging.stage(batch(ids(8, 8, 8)))
    x = stage(staging, batch(ids(3, 1)))
    assert x.data.tolist() == [0, 1, 2, 3]
    assert x.offsets.tolist() == [0, 3, 4]


def test_chunks_may_be_views_of_a_larger_buffer() -> None:
    whole = memoryview(np.arange(9, dtype=IDS).tobytes())
    pieces = [Chunk(whole[8:20], 3, Returns(), None), Chunk(whole[0:4], 1, Returns(), None)]
    assert stage(Staging(ROWS, TOKENS, None, CPU), Batch(ModelKey("words", "1"), pieces)).data.tolist() == [2, 3, 4, 0]


@pytest.mark.parametrize("steps", [1, 3])
def test_chunk_whose_bytes_do_not_match_its_steps_fails(steps: int) -> None:
    wrong = Batch(ModelKey("words", "1"), [Chunk(bytes(8), steps, Returns(), None)])
    with pytest.raises(ValueError, match="different"):
        Staging(ROWS, TOKENS, None, CPU).stage(wrong)
