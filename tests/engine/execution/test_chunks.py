"""Chunks on a real engine: each continues from the state slot that the chunk before it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from service.engine.batch import Batch, rows_block
from service.engine.batching.session_state import origin_of, pack, unpack
from service.engine.batching.state_slots import DISCARD_SLOT, FIRST_SLOT, ZERO_SLOT
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BatchArrays, BlockResult, InFlightBatch
from service.engine.execution.state_check import finite_rows, host_finite_rows
from service.ipc import session_file
from service.ipc.messages.inference import FEATURES, Returns
from service.ipc.messages.models import ModelKey
from service.ipc.session_file import StateOrigin
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models

STEPS = 12
CUTS = [(0, 5), (5, 6), (6, 12)]
ROUNDING = 1e-5
FLOATS = {"kind": "features", "features": 3, "max_steps": 64}
LAYERS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": "lstm", "hidden": 5, "depth": 2},
    "gru": {"kind": "gru", "hidden": 5},
    "sru": {"kind": "sru", "hidden": 4, "depth": 2},
    "qrnn": {"kind": "qrnn", "hidden": 5, "window": 2},
    "tcn": {"kind": "tcn", "filters": 4, "width": 3, "levels": 2},
    "conv": {"kind": "conv", "filters": 4, "width": 3, "padding": "causal", "dilation": 2},
}
HEADS: dict[str, dict[str, Any]] = {
    "last": {"kind": "classify", "pool": "last", "labels": models.LABELS},
    "mean": {"kind": "regress", "pool": "mean", "outputs": 2},
    "max": {"kind": "embed", "pool": "max"},
    "tag": {"kind": "tag", "labels": models.LABELS},
    "sequence": {"kind": "sequence"},
}
EVERYTHING = Returns(embedding=True, sequence=True)
KEY = ModelKey("streamed", "1")


def make_engine(root: Path, layer: str, head: str, scale: float = 1.0, most: int = 4) -> tuple[ModelSpec, DeviceEngine]:
    """Return an engine with a model of random weights, multiplied by `scale`. most: sequences of a batch."""
    spec = models.made_up(root, "streamed", FLOATS, LAYERS[layer], head=HEADS[head])
    arrays = {name: scale * array for name, array in store.read_arrays(root / "streamed" / "1", spec).items()}
    encoder = Encoder(spec, arrays, torch.device("cpu"))
    return spec, DeviceEngine({KEY: encoder}, Metrics(), max_batch_sequences=most, max_batch_tokens=16 * most)


def rows(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(STEPS, 3)).astype(FEATURES)


class Chunk(NamedTuple):
    """Steps of a sequence, as a block of one row."""

    data: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    read_slot: int = ZERO_SLOT
    write_slot: int = DISCARD_SLOT


def run(engine: DeviceEngine, *chunks: Chunk) -> tuple[list[BlockResult], list[bool]]:
    """Run chunks in one batch. Returns their results, and whether each is finite."""
    batch = Batch(KEY, [rows_block(KEY, [len(chunk.data)], chunk.data.tobytes(), EVERYTHING) for chunk in chunks])
    slots = np.array([chunk[1:] for chunk in chunks], np.int32)
    if (slots != (ZERO_SLOT, DISCARD_SLOT)).any():
        batch.read_slots, batch.write_slots = slots.T
    engine.launch(batch)
    [ended] = engine.finished()
    return ended.results, [True] * len(chunks) if ended.finite is None else ended.finite.tolist()


CASES = [(layer, head) for place, layer in enumerate(LAYERS) for head in list(HEADS)[place % 2 :: 2]]
"""Every second pair; tests/long has others."""


@pytest.mark.parametrize(("layer", "head"), CASES)
def test_chunks_give_the_result_of_the_whole_sequence(layer: str, head: str, tmp_path: Path) -> None:
    """Also if the state moves to the host and back: then it continues bit for bit."""
    spec, engine = make_engine(tmp_path, layer, head)
    data = [rows(seed) for seed in range(3)]
    whole, _ = run(engine, *map(Chunk, data))
    parts: list[list[BlockResult]] = [[] for _ in data]
    for number, (begin, end) in enumerate(CUTS):
        slots = [ZERO_SLOT if begin == 0 else FIRST_SLOT + row for row in range(3)]
        chunks = [
            Chunk(steps[begin:end], slot, FIRST_SLOT + row) for row, (steps, slot) in enumerate(zip(data, slots, strict=True))
        ]
        between = [Chunk(rows(seed=9))] if number == 1 else []
        for part, result in zip(parts, run(engine, *chunks, *between)[0], strict=False):
            part.append(result)
    for expected, part in zip(whole, parts, strict=True):
        for name in ("sequence", "picks" if head == "tag" else "sequence"):
            joined = np.concatenate([getattr(result, name) for result in part])
            assert_allclose(joined, getattr(expected, name), atol=ROUNDING)
        if head in ("last", "mean", "max"):
            assert part[-1].embedding is not None and expected.embedding is not None
            assert_allclose(part[-1].embedding, expected.embedding, atol=ROUNDING)
    file = session_file.read(pack(engine.save(KEY, FIRST_SLOT), origin_of(spec, KEY, STEPS)))
    assert file.origin == StateOrigin("streamed", "1", spec.sha256["weights.safetensors"], STEPS)
    engine.restore(KEY, FIRST_SLOT + 3, unpack(file.tensors, file.data, engine.save(KEY, ZERO_SLOT)))
    stayed, moved = (bits(run(engine, Chunk(rows(4), slot))[0][0]) for slot in (FIRST_SLOT, FIRST_SLOT + 3))
    assert stayed == moved


def bits(result: BlockResult) -> list[bytes | None]:
    """Return the arrays of a result as bytes."""
    return [None if array is None else array.tobytes() for array in result[:4]]


MATES = 31
BAD_VALUES = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0]
"""The last two are finite and harmless: a number too small for the normal form, and a negative zero."""
HUGE = np.full((2, 3), 3e38, FEATURES)


@pytest.mark.parametrize(("layer", "head"), list(zip(LAYERS, [*HEADS, "last"], strict=True)))
def test_bad_row_is_marked_and_31_mates_keep_every_bit(layer: str, head: str, tmp_path: Path) -> None:
    _, engine = make_engine(tmp_path, layer, head, most=MATES + 1, scale=100.0)
    data = [rows(seed) for seed in range(MATES + 1)]
    expected = [bits(result) for result in run(engine, *map(Chunk, data))[0]]
    for number, value in enumerate(BAD_VALUES):
        changed = [row.copy() for row in data]
        changed[5 * number][STEPS // 2, 1] = value
        results = [bits(result) for result in run(engine, *map(Chunk, changed))[0]]
        assert {row for row in range(MATES + 1) if results[row] != expected[row]} <= {5 * number}
    chunks = Chunk(rows(1)[:5], write_slot=FIRST_SLOT), Chunk(rows(2)), Chunk(HUGE, write_slot=FIRST_SLOT + 1)
    (*_, bad), finite = run(engine, *chunks)
    state_of_bad = [tensor.isfinite().all() for tensor in engine.save(KEY, FIRST_SLOT + 1).values()]
    outputs_of_bad = [np.isfinite(array).all() for array in bad[:4] if array is not None]
    assert finite == [True, True, all([*state_of_bad, *outputs_of_bad])]
    assert not finite[2] or layer in ("lstm", "gru", "sru", "qrnn"), "gates limit the values of recurrent layers"


def test_state_that_is_not_finite_marks_its_chunk(tmp_path: Path) -> None:
    """The outputs of this step are finite: the cell of an LSTM is not part of them, and its forget gate may close."""
    _, engine = make_engine(tmp_path, "lstm", "last")
    run(engine, Chunk(rows(1)[:5], write_slot=FIRST_SLOT))
    for value in (float("nan"), float("inf"), float("-inf")):
        state = {name: tensor.clone() for name, tensor in engine.save(KEY, FIRST_SLOT).items()}
        state["0.1.cell"][0] = value
        engine.restore(KEY, FIRST_SLOT + 1, state)
        poisoned, good = Chunk(rows(2), FIRST_SLOT + 1, FIRST_SLOT + 2), Chunk(rows(2), FIRST_SLOT, FIRST_SLOT + 3)
        assert run(engine, Chunk(rows(2)), poisoned, good)[1] == [True, False, True]


@pytest.mark.parametrize("per_step", [False, True])
def test_row_is_marked_for_the_outputs_that_its_block_returns(per_step: bool) -> None:
    """The first rows return scores only. The state of a row that keeps none, and lines behind the batch, count for nothing."""
    blocks = [rows_block(KEY, [1, 2], b""), rows_block(KEY, [2, 1], b"", EVERYTHING)]
    slots = np.array([DISCARD_SLOT, 2, 3, 4], np.int32)
    begins, states = np.array([0, 1, 3, 5, 6], np.int32), np.array([False, True, True, True, False])
    scores, embedding, sequence = np.zeros((9, 1)), np.zeros((5, 2)), np.zeros((9, 2))
    arrays = BatchArrays(scores, None, embedding, sequence, None, per_step)
    batch = Batch(KEY, blocks, read_slots=slots, write_slots=slots)
    in_flight = InFlightBatch(batch, begins, arrays, 0.1, 0.0, 0.0, 0.0, finite_states=states)
    embedding[[1, 4]], sequence[[0, 1, 8]], scores[8] = np.nan, np.inf, np.nan
    assert in_flight.finite() is None
    sequence[4, 1] = np.nan
    finite = in_flight.finite()
    assert finite is not None and finite.tolist() == [True, True, False, True]
    scores[2], embedding[3, 0] = -np.inf, np.inf
    finite = in_flight.finite()
    assert finite is not None and finite.tolist() == [True, not per_step, False, False]


def test_states_move_to_other_slots(tmp_path: Path) -> None:
    _, engine = make_engine(tmp_path, "lstm", "mean")
    run(engine, *[Chunk(rows(row), write_slot=FIRST_SLOT + row) for row in range(3)])
    slots = np.array([FIRST_SLOT + 2, FIRST_SLOT], np.int32)
    for slot in slots.tolist():
        engine.restore(KEY, slot + 3, engine.save(KEY, slot))
    assert engine.state_vectors(KEY, slots + 3) == engine.state_vectors(KEY, slots)
    vectors = [engine.state_vectors(KEY, slots[place : place + 1]) for place in range(2)]
    assert b"".join(vectors) == engine.state_vectors(KEY, slots) and vectors[0] != vectors[1]


@pytest.mark.parametrize(
    "check", [lambda slabs, slots: host_finite_rows([slab.numpy() for slab in slabs], slots.numpy()), finite_rows]
)
def test_large_finite_states_are_not_marked(check: Callable[[list[torch.Tensor], torch.Tensor], Any]) -> None:
    """Their sum is beyond float32. The second check is the check of a GPU."""
    states = torch.full((5, 3), 3e38)
    states[3, 1] = -torch.inf
    slabs = [torch.zeros(5, 2), states, torch.zeros(5, 0), torch.full((5, 1), 6e4, dtype=torch.float16)]
    finite = check(slabs, torch.tensor([1, 3, 2], dtype=torch.int32))
    assert finite.tolist() == [True, False, True]
    slabs[0][2] = torch.nan
    assert check(slabs, torch.tensor([3, 2, 1], dtype=torch.int32)).tolist() == [False, False, True]
    finite = check(slabs, torch.tensor([4, 1], dtype=torch.int32))
    assert finite is None or finite.tolist() == [True, True]
