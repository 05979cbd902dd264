"""Blocks packed end to end in buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.ragged import Ragged
from service.engine.batch import Batch, rows_block
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT
from service.engine.execution.staging import PARALLEL_BYTES, Staging
from service.ipc.messages.inference import FEATURES, IDS
from service.ipc.messages.models import ModelKey

CPU = torch.device("cpu")
MODEL = ModelKey("words", "1")
ROWS, TOKENS = 5, 40


def stage(staging: Staging, staged: Batch) -> Ragged:
    assert staging.stage(staged).tolist() == list(
        accumulate(chain.from_iterable(block.lengths for block in staged.blocks), initial=0)
    )
    return staging.ragged(staged.rows, staged.tokens)


def batch(arrays: Sequence[NDArray[np.generic]]) -> Batch:
    return Batch(MODEL, [rows_block(MODEL, [len(array)], array.tobytes()) for array in arrays])


def numbers(*lengths: int, width: int | None = None) -> list[NDArray[np.generic]]:
    """Return ids, or features of this width, that count from 0 across all rows."""
    steps = sum(lengths)
    whole = np.arange(steps, dtype=IDS) if width is None else np.arange(steps * width, dtype=FEATURES).reshape(-1, width)
    return np.split(whole, np.cumsum(lengths)[:-1])


@given(st.none() | st.integers(1, 7), st.lists(st.integers(1, TOKENS // ROWS), min_size=1, max_size=ROWS))
@example(None, [TOKENS // ROWS] * ROWS)
def test_blocks_are_packed_end_to_end(width: int | None, lengths: list[int]) -> None:
    x = stage(Staging(ROWS, TOKENS, width, CPU), batch(numbers(*lengths, width=width)))
    assert x.data.dtype == (torch.int32 if width is None else torch.float32)
    assert x.data.tolist() == np.concatenate(numbers(*lengths, width=width)).tolist()
    assert x.offsets.dtype == torch.int32
    assert x.lengths.tolist() == lengths


@pytest.mark.parametrize("difference", [-4, 0, 4])
def test_large_parts_are_copied_whole(difference: int) -> None:
    steps = (PARALLEL_BYTES + difference) // 4
    values = np.random.default_rng(0).integers(1 << 30, size=steps).astype(IDS)
    first, last = (rows_block(MODEL, [count], np.arange(count, dtype=IDS).tobytes()) for count in (70, 5))
    for data in (values.tobytes(), memoryview(values.tobytes())):
        x = stage(Staging(ROWS, steps + 75, None, CPU), Batch(MODEL, [first, rows_block(MODEL, [steps], data), last]))
        assert x.data.numpy()[70:-5].tobytes() == values.tobytes()
        assert x.data[:70].tolist() + x.data[-5:].tolist() == [*range(70), *range(5)]


def test_staging_overwrites_a_longer_batch() -> None:
    staging = Staging(ROWS, TOKENS, None, CPU)
    staging.stage(batch(numbers(8, 8, 8)))
    x = stage(staging, batch(numbers(3, 1)))
    assert x.data.tolist() == [0, 1, 2, 3]
    assert x.offsets.tolist() == [0, 3, 4]


def test_values_may_be_views_of_a_larger_buffer() -> None:
    whole = memoryview(np.arange(9, dtype=IDS).tobytes())
    blocks = [rows_block(MODEL, [3], whole[8:20]), rows_block(MODEL, [1], whole[0:4])]
    assert stage(Staging(ROWS, TOKENS, None, CPU), Batch(MODEL, blocks)).data.tolist() == [2, 3, 4, 0]


@pytest.mark.parametrize("steps", [1, 3])
def test_block_whose_bytes_do_not_match_its_steps_fails(steps: int) -> None:
    with pytest.raises(ValueError, match="different"):
        Staging(ROWS, TOKENS, None, CPU).stage(Batch(MODEL, [rows_block(MODEL, [steps], bytes(8))]))


def slots(staging: Staging, rows: int) -> tuple[list[int], list[int]]:
    """Return the slots that rows read, and those that they write."""
    found = staging.row_slots(rows)
    return found.sources.tolist(), found.targets.tolist()


def with_slots(batch: Batch, read: Sequence[int], write: Sequence[int]) -> Batch:
    batch.read_slots, batch.write_slots = np.array(read, np.int32), np.array(write, np.int32)
    return batch


def test_rows_have_the_slots_of_their_batch_and_not_those_of_the_batch_before() -> None:
    """A row is a whole sequence, continues from a slot or begins, and empty rows may follow."""
    staging = Staging(ROWS, TOKENS, None, CPU)
    ids = np.array([5, 6, 7, 9, 9, 9, 9], IDS)
    blocks = [rows_block(MODEL, [2, 1], ids[:3].tobytes()), rows_block(MODEL, [2, 2], ids[3:].tobytes())]
    read, write = [ZERO_SLOT, ZERO_SLOT, 4, ZERO_SLOT], [DISCARD_SLOT, DISCARD_SLOT, 6, 7]
    begins = staging.stage(with_slots(Batch(MODEL, blocks), read, write), rows=ROWS)
    assert begins.tolist() == [0, 2, 3, 5, 7]
    assert staging.ragged(ROWS, 7).offsets.tolist() == [0, 2, 3, 5, 7, 7]
    assert staging.ragged(ROWS, 7).data.tolist() == ids.tolist()
    assert slots(staging, ROWS) == ([0, 0, 4, 0, 0], [1, 1, 6, 7, 1])
    staging.stage(with_slots(batch(numbers(2)), [ZERO_SLOT], [7]), rows=ROWS)
    assert slots(staging, ROWS) == ([0] * ROWS, [7, 1, 1, 1, 1])
    staging.stage_zeros([3, 1])
    assert slots(staging, ROWS) == ([0] * ROWS, [1] * ROWS)
    assert staging.ragged(2, 4).data.tolist() == [0] * 4


@pytest.mark.parametrize("rows", [21, 64])
def test_offsets_slots_and_data_of_a_full_buffer_do_not_overlap(rows: int) -> None:
    staging = Staging(rows, 2 * rows, None, CPU)
    read, write = list(range(300, 300 + rows)), list(range(400, 400 + rows))
    x = stage(staging, with_slots(batch([np.array([100 + row, 200 + row], IDS) for row in range(rows)]), read, write))
    assert x.data.view(rows, 2).T.tolist() == [[100 + row for row in range(rows)], [200 + row for row in range(rows)]]
    assert slots(staging, rows) == (read, write)


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
