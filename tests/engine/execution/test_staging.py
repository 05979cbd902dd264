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
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.execution.staging import PARALLEL_BYTES, Staging
from service.ipc.messages.inference import FEATURES, IDS, Returns
from service.ipc.messages.models import ModelKey
from tests.engine.batching.harness import MODEL, NEVER, block, ids

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
    staged = batch([np.arange(70, dtype=IDS), values, np.arange(5, dtype=IDS)])
    for data in (staged.chunks[1].data, memoryview(staged.chunks[1].data)):
        chunks = [staged.chunks[0], replace(staged.chunks[1], data=data), staged.chunks[2]]
        x = stage(Staging(ROWS, steps + 75, None, CPU), Batch(staged.model, chunks))
        assert x.data.numpy()[70:-5].tobytes() == values.tobytes()
        assert x.data[:70].tolist() + x.data[-5:].tolist() == [*range(70), *range(5)]


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


def slots(staging: Staging, rows: int) -> tuple[list[int], list[int]]:
    """Return the slots that rows read, and those that they write."""
    found = staging.row_slots(rows)
    return found.sources.tolist(), found.targets.tolist()


def test_rows_have_the_slots_of_their_chunks_and_not_those_of_the_batch_before() -> None:
    """Blocks of whole sequences come first, and empty rows may follow."""
    staging = Staging(ROWS, TOKENS, None, CPU)
    first, second = (Chunk(np.full(2, 9, IDS).tobytes(), 2, Returns(), None, *slots) for slots in ((4, 6), (ZERO_SLOT, 7)))
    begins = staging.stage(Batch(MODEL, [first, second], blocks=[block([(1, NEVER, [2, 1])], ids([[5, 6, 7]]))]), rows=ROWS)
    assert begins.tolist() == [0, 2, 3, 5, 7]
    assert staging.ragged(ROWS, 7).offsets.tolist() == [0, 2, 3, 5, 7, 7]
    assert staging.ragged(ROWS, 7).data.tolist() == [5, 6, 7, 9, 9, 9, 9]
    assert slots(staging, ROWS) == ([0, 0, 4, 0, 0], [1, 1, 6, 7, 1])
    assert staging.written_slots(4).tolist() == [1, 1, 6, 7]
    staging.stage(Batch(MODEL, [second]), rows=ROWS)
    assert slots(staging, ROWS) == ([0] * ROWS, [7, 1, 1, 1, 1])
    staging.stage_zeros([3, 1])
    assert slots(staging, ROWS) == ([0] * ROWS, [1] * ROWS)
    assert staging.ragged(2, 4).data.tolist() == [0] * 4


@pytest.mark.parametrize("rows", [21, 64])
def test_offsets_slots_and_data_of_a_full_buffer_do_not_overlap(rows: int) -> None:
    staging = Staging(rows, 2 * rows, None, CPU)
    chunks = [Chunk(ids([[100 + row, 200 + row]]), 2, Returns(), None, 300 + row, 400 + row) for row in range(rows)]
    x = stage(staging, Batch(MODEL, chunks))
    assert x.data.view(rows, 2).T.tolist() == [[100 + row for row in range(rows)], [200 + row for row in range(rows)]]
    assert slots(staging, rows) == ([300 + row for row in range(rows)], [400 + row for row in range(rows)])


def test_batches_in_flight_have_a_buffer_each() -> None:
    staging = Staging(ROWS, TOKENS, None, CPU, in_flight=2)
    x = stage(staging, batch(numbers(3)))
    staging.stage(batch([np.full(3, 8, IDS)]), buffer=1)
    assert x.data.tolist() == [0, 1, 2]


def test_copy_to_the_device_has_offsets_slots_and_the_tokens_of_a_buffer() -> None:
    """Another array stands for the memory of the device."""
    staging = Staging(70, 301, None, CPU, in_flight=2)
    staging._device = staging._encoder_buffer = torch.zeros_like(staging._host[0])
    for buffer, values in enumerate((np.arange(300, dtype=IDS), np.full(300, 8, IDS))):
        staging.stage(batch([values]), buffer)
        target, source = (staging.copy(300, buffer) if buffer else staging.copy(300))._arrays
        target.copy_(source)
        assert staging.ragged(1, 301).data.tolist() == [*values.tolist(), 0]
