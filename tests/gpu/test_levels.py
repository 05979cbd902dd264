"""Tests of several levels of an LSTM or a GRU in one launch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kernels.backend import PINNED
from kernels.persistent import launch
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import TOLERANCE, agree, close, made, outputs, same, tf32_products
from tests.gpu.sanitizer import assert_no_findings
from tests.kernels.families import Form
from tests.kernels.inputs import (
    OUTPUTS,
    SCRAP_SLOT,
    ZERO_SLOT,
    Arguments,
    arrays,
    as_float64,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    caches_with_zero_slot,
    with_shared_slots,
)
from tests.kernels.shapes import fresh_shape_caches

pytestmark = pytest.mark.usefixtures("poisoned")

LSTM, GRU, PEEPHOLES = Form("lstm"), Form("gru", reset="after"), Form("lstm", peepholes=True)
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
every_form = pytest.mark.parametrize("form", [LSTM, GRU, PEEPHOLES], ids=str)

Levels = tuple[Ragged, list[Any], list[Any]]
"""The data, and the weights and states of each level."""


def made_levels(
    form: Form, lengths: Sequence[int], hidden: int, levels: int, *, storage: torch.dtype = torch.float16, seed: int = 0
) -> Levels:
    first, *above = (
        made(form, lengths, hidden, width, storage=storage, seed=seed + level)
        for level, width in enumerate([24, *[hidden] * (levels - 1)])
    )
    return first.x, [level.weights for level in (first, *above)], [level.state for level in (first, *above)]


def exact(form: Form, problem: Levels) -> Encoded:
    """Return the reference's encoding of these values in float64."""
    x, weights, states = problem
    each = [as_float64(Arguments(x, *level)) for level in zip(weights, states, strict=True)]
    return form.levels(each[0][0], [level[1] for level in each], [level[2] for level in each], backend="reference")


@contextmanager
def together(tile: int) -> Iterator[None]:
    """Run as many levels at once as the device has room for, in tiles of this many rows."""
    tuned = launch._tuned
    with patch.object(launch, "_tuned", lambda variant: {**tuned(variant), "levels": [{"tile": tile}]}), fresh_shape_caches():
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Record the number of levels of each launch of several levels."""
    counts: list[int] = []
    run = launch._encode_together

    def encode(family: Any, x: Ragged, weights: Sequence[Any], states: Sequence[Any], want: Outputs) -> Encoded:
        counts.append(len(weights))
        return run(family, x, weights, states, want)

    with patch.object(launch, "_encode_together", encode):
        yield counts


@every_form
@pytest.mark.parametrize("hidden, levels", [(64, 2), (128, 8), (192, 3), (256, 4), (512, 4), (768, 2), (1024, 2)])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_states_match_the_reference(form: Form, hidden: int, levels: int, storage: torch.dtype) -> None:
    problem = made_levels(form, RAGGED, hidden, levels, storage=storage)
    with together(32), counted() as counts:
        encoded = form.levels(*problem)
    assert counts == [levels]
    agree(encoded, exact(form, problem), TOLERANCE[storage] * levels / 2)  # errors grow from level to level


@every_form
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 31, 65, 256, 700])
def test_any_number_of_rows(form: Form, tile: int, rows: int) -> None:
    chance = random.Random(rows)
    problem = made_levels(form, [chance.randint(0, 6) for _ in range(rows)], 256, 3)
    with together(tile), counted() as counts:
        encoded = form.levels(*problem)
    assert counts == [3]
    agree(encoded, form.levels(*problem, backend="grid"), TOLERANCE[torch.float16])


@every_form
def test_tiles_of_any_size_give_the_same_bits(form: Form) -> None:
    chance = random.Random(0)
    problem = made_levels(form, [chance.randint(0, 9) for _ in range(150)], 128, 4)
    encoded = []
    for tile in (16, 32, 64, 128):
        with together(tile):
            encoded.append(form.levels(*problem))
    for other in encoded[1:]:
        same(other, encoded[0])


def test_level_that_runs_ahead_waits_for_the_levels_above() -> None:
    """The first level multiplies half as much as the others, so it overtakes them by as many steps as there are buffers."""
    problem = made_levels(LSTM, [400, 399, 3, 0, 250], 512, 4)
    with together(64):
        encoded = LSTM.levels(*problem)
    agree(encoded, LSTM.levels(*problem, backend="grid"), TOLERANCE[torch.float16])


@every_form
def test_more_levels_than_fit_run_in_groups(form: Form) -> None:
    problem = made_levels(form, RAGGED, 512, 7)
    with together(16), counted() as counts:
        encoded = form.levels(*problem)
    assert counts == [4, 3]
    agree(encoded, exact(form, problem), TOLERANCE[torch.float16])


def test_number_of_rows_decides_whether_levels_run_at_once() -> None:
    for rows, hidden, levels, expected in ((32, 512, 2, []), (33, 512, 2, [2]), (1, 512, 4, [4]), (64, 1024, 2, [])):
        problem = made_levels(LSTM, [3] * rows, hidden, levels)
        with counted() as counts:
            LSTM.levels(*problem)
            assert counts == expected
            pinned = LSTM.levels(*problem, backend=PINNED)
        assert counts == expected, "a pinned backend runs one level after the other"
        same(pinned, LSTM.levels(*problem, backend="persistent"))


@every_form
def test_states_move_between_one_launch_and_several_at_chunk_borders(form: Form) -> None:
    x, weights, states = problem = made_levels(form, [12] * 40, 256, 3)
    steps, expected = x.data.view(40, 12, -1), exact(form, problem)
    before: Sequence[Any] = states
    for first, until, at_once in ((0, 5, True), (5, 9, False), (9, 12, True)):
        chunk = Ragged(
            steps[:, first:until].reshape(-1, steps.shape[2]),
            torch.arange(41, dtype=torch.int32, device="cuda") * (until - first),
        )
        with together(32):
            encoded = form.levels(chunk, weights, before, backend="adaptive" if at_once else "persistent")
        before = encoded.state
    for after, state in zip(before, expected.state, strict=True):
        for name, array in arrays(after).items():
            close(array, getattr(state, name), TOLERANCE[torch.float16], name)


@every_form
def test_rows_start_from_sources_and_write_to_slots(form: Form) -> None:
    x, weights, states = made_levels(form, RAGGED, 128, 3)
    caches = [with_shared_slots(state, torch.int64) for state in states]
    with together(32):
        expected = form.levels(x, weights, [cache.by_row() for cache in caches])
        encoded = form.levels(x, weights, caches)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for after, before, without_slots in zip(encoded.state, states, expected.state, strict=True):
        assert_shared_slots_result(after, before, without_slots)


@every_form
def test_cuda_graph_serves_other_lengths_and_values(form: Form) -> None:
    x, weights, states = made_levels(form, [5, 9, 0, 30], 192, 3)
    other = made_levels(form, [20, 0, 18, 6], 192, 3, seed=9)[0]
    read = Ragged(torch.zeros_like(x.data), x.offsets.clone())
    slots, sources = (torch.tensor(places, dtype=torch.int32, device="cuda") for places in ([3, 4, 5, 6], [ZERO_SLOT] * 4))
    caches = [replace(caches_with_zero_slot(state), slots=slots, sources=sources) for state in states]
    with together(32):
        form.levels(read, weights, caches)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            encoded = form.levels(read, weights, caches)
        before = None
        for data, origins, ends in ((x, [ZERO_SLOT] * 4, [5, 3, 2, 7]), (other, [5, 3, 2, 7], [SCRAP_SLOT] * 4)):
            read.data.copy_(data.data)
            read.offsets.copy_(data.offsets)
            slots.copy_(torch.tensor(ends))
            sources.copy_(torch.tensor(origins))
            graph.replay()
            expected = form.levels(data, weights, before)
            assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
            before = expected.state
    for cache in caches:
        assert_reserved_slots_unchanged(replace(cache, slots=None, sources=None))


@every_form
def test_nan_in_other_rows_does_not_reach_a_row(form: Form) -> None:
    x, weights, states = made_levels(form, [4, 2, 0, 7, 7, 1], 128, 3)
    data = x.data.clone()
    data[4:6], data[-1:] = torch.nan, torch.inf
    with together(16):
        clean = outputs(form.levels(x, weights, states))
        encoded = outputs(form.levels(Ragged(data, x.offsets), weights, states))
    for name in set(clean) - {"steps"}:
        assert torch.equal(encoded[name][[0, 2, 3, 4]], clean[name][[0, 2, 3, 4]])
        assert not encoded[name][1].isfinite().any() or name == "max"


@every_form
def test_ids_and_gate_inputs_of_the_first_level(form: Form) -> None:
    x, weights, states = made_levels(form, RAGGED, 128, 3)
    ids = torch.randint(50, (len(x.data),), dtype=torch.int32, device="cuda")
    table = torch.randn(50, weights[0].input.shape[1], device="cuda").half()
    folded = replace(weights[0], input=None, bias=None, table=table)
    over_gates = replace(weights[0], input=None, bias=None)
    with together(32), counted() as counts:
        from_table = form.levels(Ragged(ids, x.offsets), [folded, *weights[1:]], states)
        from_gates = form.levels(Ragged(table[ids.long()].float(), x.offsets), [over_gates, *weights[1:]], states)
    assert counts == [3, 3]
    agree(from_gates, from_table, TOLERANCE[torch.float16])


@every_form
def test_tf32_runs_levels_at_once(form: Form) -> None:
    problem = made_levels(form, RAGGED, 128, 3, storage=torch.float32)
    with together(32), counted() as counts, tf32_products():
        encoded = form.levels(*problem)
    assert counts == [3]
    agree(encoded, exact(form, problem), 2e-3)
    with together(32), counted() as counts:
        form.levels(*problem)
    assert not counts, "true float32 has no room for several levels"


@every_form
def test_batch_without_rows(form: Form) -> None:
    x, weights, states = made_levels(form, [], 128, 3)
    with together(32):
        encoded = form.levels(x, weights, states)
    assert len(encoded.state) == 3
    assert encoded.last is not None and encoded.last.shape == (0, 128)


def test_accesses_stay_within_their_arrays() -> None:
    assert_no_findings("memcheck", "tests.gpu.small_levels")
