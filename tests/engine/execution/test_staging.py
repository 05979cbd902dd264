"""Chunks packed end to end in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import example, given
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


def numbers(*lengths: int, width: int | None = None) -> list[NDArray[np.generic]]:
    """Return ids, or features of this width, that count from 0 across all chunks."""
    steps = sum(lengths)
    whole = np.arange(steps, dtype=IDS) if width is None else np.arange(steps * width, dtype=FEATURES).reshape(-1, width)
    return np.split(whole, np.cumsum(lengths)[:-1])


@given(st.none() | st.integers(1, 7), st.lists(st.integers(1, TOKENS // ROWS), min_size=1, max_size=ROWS))
@example(None, [TOKENS // ROWS] * ROWS)
def test_chunks_are_packed_end_to_end(width: int | None, lengths: list[int]) -> None:
    x = stage(Staging(ROWS, TOKENS, width, CPU), batch(numbers(*lengths, width=width)))
    assert x.data.dtype == (torch.int32 if width is None else torch.float32)
    assert x.data.tolist() == np.concatenate(numbers(*lengths, width=width)).tolist()
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


def test_staging_overwrites_a_longer_batch() -> None:
    staging = Staging(ROWS, TOKENS, None, CPU)
    staging.stage(batch(numbers(8, 8, 8)))
    x = stage(staging, batch(numbers(3, 1)))
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
