"""Chunks on a real engine: each continues from the state slot that the chunk before it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from service.engine.batch import Batch, Chunk
from service.engine.batching.session_state import origin_of, pack, unpack
from service.engine.batching.state_slots import DISCARD_SLOT, FIRST_SLOT, ZERO_SLOT
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import ChunkResult
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


def make_engine(root: Path, layer: str, head: str, scale: float = 1.0, most: int = 4) -> tuple[ModelSpec, DeviceEngine]:
    """Return an engine with a model of random weights, multiplied by `scale`. most: sequences of a batch."""
    spec = models.made_up(root, "streamed", FLOATS, LAYERS[layer], head=HEADS[head])
    arrays = {name: scale * array for name, array in store.read_arrays(root / "streamed" / "1", spec).items()}
    encoder = Encoder(spec, arrays, torch.device("cpu"))
    return spec, DeviceEngine(
        {ModelKey("streamed", "1"): encoder}, Metrics(), max_batch_sequences=most, max_batch_tokens=16 * most
    )


def rows(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(STEPS, 3)).astype(FEATURES)


def run(engine: DeviceEngine, *chunks: Chunk) -> list[ChunkResult]:
    engine.launch(Batch(ModelKey("streamed", "1"), list(chunks)))
    return [result for _, result in engine.finished() if isinstance(result, ChunkResult)]


def chunk(
    data: np.ndarray[tuple[int, int], np.dtype[np.float32]], read_slot: int = ZERO_SLOT, write_slot: int = DISCARD_SLOT
) -> Chunk:
    return Chunk(data.tobytes(), len(data), EVERYTHING, None, read_slot, write_slot)


CASES = [(layer, head) for place, layer in enumerate(LAYERS) for head in list(HEADS)[place % 2 :: 2]]
"""Every second pair; tests/long has others."""


@pytest.mark.parametrize(("layer", "head"), CASES)
def test_chunks_give_the_result_of_the_whole_sequence(layer: str, head: str, tmp_path: Path) -> None:
    """Also if the state moves to the host and back: then it continues bit for bit."""
    spec, engine = make_engine(tmp_path, layer, head)
    key, data = ModelKey("streamed", "1"), [rows(seed) for seed in range(3)]
    whole = run(engine, *map(chunk, data))
    parts: list[list[ChunkResult]] = [[] for _ in data]
    for number, (begin, end) in enumerate(CUTS):
        slots = [ZERO_SLOT if begin == 0 else FIRST_SLOT + row for row in range(3)]
        chunks = [
            chunk(steps[begin:end], slot, FIRST_SLOT + row) for row, (steps, slot) in enumerate(zip(data, slots, strict=True))
        ]
        between = [chunk(rows(seed=9))] if number == 1 else []
        for part, result in zip(parts, run(engine, *chunks, *between), strict=False):
            part.append(result)
    for expected, part in zip(whole, parts, strict=True):
        for name in ("sequence", "picks" if head == "tag" else "sequence"):
            joined = np.concatenate([getattr(result, name) for result in part])
            assert_allclose(joined, getattr(expected, name), atol=ROUNDING)
        if head in ("last", "mean", "max"):
            assert part[-1].embedding is not None and expected.embedding is not None
            assert_allclose(part[-1].embedding, expected.embedding, atol=ROUNDING)
    file = session_file.read(pack(engine.save(key, FIRST_SLOT), origin_of(spec, key, STEPS)))
    assert file.origin == StateOrigin("streamed", "1", spec.sha256["weights.safetensors"], STEPS)
    engine.restore(key, FIRST_SLOT + 3, unpack(file.tensors, file.data, engine.save(key, ZERO_SLOT)))
    stayed, moved = (bits(run(engine, chunk(rows(4), slot))[0]) for slot in (FIRST_SLOT, FIRST_SLOT + 3))
    assert stayed == moved


def bits(result: ChunkResult) -> list[bytes | None]:
    """Return the arrays of a result as bytes."""
    return [None if array is None else array.tobytes() for array in result[:4]]


MATES = 31
BAD_VALUES = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0]
"""The last two are finite and harmless: a number too small for the normal form, and a negative zero."""
HUGE = np.full((2, 3), 3e38, FEATURES)


@pytest.mark.parametrize(("layer", "head"), list(zip(LAYERS, [*HEADS, "last"], strict=True)))
def test_bad_row_is_marked_and_31_mates_keep_every_bit(layer: str, head: str, tmp_path: Path) -> None:
    _, engine = make_engine(tmp_path, layer, head, most=MATES + 1, scale=100.0)
    key, data = ModelKey("streamed", "1"), [rows(seed) for seed in range(MATES + 1)]
    expected = [bits(result) for result in run(engine, *map(chunk, data))]
    for number, value in enumerate(BAD_VALUES):
        changed = [row.copy() for row in data]
        changed[5 * number][STEPS // 2, 1] = value
        results = [bits(result) for result in run(engine, *map(chunk, changed))]
        assert {row for row in range(MATES + 1) if results[row] != expected[row]} <= {5 * number}
    good, last, bad = run(
        engine, chunk(rows(1)[:5], write_slot=FIRST_SLOT), chunk(rows(2)), chunk(HUGE, write_slot=FIRST_SLOT + 1)
    )
    state_of_bad = [tensor.isfinite().all() for tensor in engine.save(key, FIRST_SLOT + 1).values()]
    outputs_of_bad = [np.isfinite(array).all() for array in bad[:4] if array is not None]
    assert bad.finite == all([*state_of_bad, *outputs_of_bad])
    assert not bad.finite or layer in ("lstm", "gru", "sru", "qrnn"), "gates limit the values of recurrent layers"
    assert good.finite and last.finite


def test_state_that_is_not_finite_marks_its_chunk(tmp_path: Path) -> None:
    """The outputs of this step are finite: the cell of an LSTM is not part of them, and its forget gate may close."""
    _, engine = make_engine(tmp_path, "lstm", "last")
    key = ModelKey("streamed", "1")
    run(engine, chunk(rows(1)[:5], write_slot=FIRST_SLOT))
    for value in (float("nan"), float("inf"), float("-inf")):
        state = {name: tensor.clone() for name, tensor in engine.save(key, FIRST_SLOT).items()}
        state["0.1.cell"][0] = value
        engine.restore(key, FIRST_SLOT + 1, state)
        poisoned, good = run(engine, chunk(rows(2), FIRST_SLOT + 1, FIRST_SLOT + 2), chunk(rows(2), FIRST_SLOT, FIRST_SLOT + 3))
        assert (poisoned.finite, good.finite) == (False, True)


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
