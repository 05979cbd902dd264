"""Tests of several levels of an LSTM or a GRU in one launch. test_promises.py has the tests that do not depend on the levels."""

from __future__ import annotations

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
from tests.gpu.cases import LSTM, ONE_PRODUCT, Layers, levels
from tests.gpu.comparisons import agree, close, same
from tests.gpu.inputs import FLOAT32, HALF, HALVES, RAGGED, TOLERANCE, random_lengths, tf32_products
from tests.kernels.families import Form
from tests.kernels.inputs import Arguments, arrays, as_float64

pytestmark = pytest.mark.usefixtures("poisoned")

every_form = pytest.mark.parametrize("form", ONE_PRODUCT, ids=str)


def exact(form: Form, problem: Layers) -> Encoded:
    """Return the reference's encoding of these values in float64."""
    each = [as_float64(Arguments(problem.x, *level)) for level in zip(problem.weights, problem.states, strict=True)]
    return form.levels(each[0].x, [level.weights for level in each], [level.state for level in each], backend="reference")


def apart(form: Form, problem: Layers, backend: str) -> Encoded:
    return form.levels(problem.x, problem.weights, problem.states, backend=backend)


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
@pytest.mark.parametrize("hidden, number", [(64, 2), (128, 8), (192, 3), (256, 4), (512, 4), (768, 2), (1024, 2)])
@pytest.mark.parametrize("storage", HALVES, ids=str)
def test_outputs_and_states_match_the_reference(form: Form, hidden: int, number: int, storage: torch.dtype) -> None:
    problem = levels(form, hidden, number, 32, storage=storage).made(RAGGED)
    with counted() as counts:
        encoded = problem.encoded()
    assert counts == [number]
    agree(encoded, exact(form, problem), TOLERANCE[storage] * number / 2)  # errors grow from level to level


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 31, 65, 256, 700])
def test_any_number_of_rows(tile: int, rows: int) -> None:
    form = ONE_PRODUCT[(rows + tile // 16) % 3]
    problem = levels(form, 256, 3, tile).made(random_lengths(rows, 40))
    with counted() as counts:
        encoded = problem.encoded()
    assert counts == [3]
    agree(encoded, apart(form, problem, "grid"), TOLERANCE[HALF])


@every_form
def test_tiles_of_any_size_give_the_same_bits(form: Form) -> None:
    first, *others = (levels(form, 128, 4, tile).made(random_lengths(150, 9)).encoded() for tile in (16, 32, 64, 128))
    for other in others:
        same(other, first)


def test_level_that_runs_ahead_waits_for_the_number() -> None:
    """The first level multiplies half as much as the others, so it overtakes them by as many steps as there are buffers."""
    problem = levels(LSTM, 512, 4, 64).made([400, 399, 3, 0, 250])
    agree(problem.encoded(), apart(LSTM, problem, "grid"), TOLERANCE[HALF])


@every_form
def test_more_levels_than_fit_run_in_groups(form: Form) -> None:
    problem = levels(form, 512, 7, 16).made(RAGGED)
    with counted() as counts:
        encoded = problem.encoded()
    assert counts == [4, 3]
    agree(encoded, exact(form, problem), TOLERANCE[HALF])


def test_pinned_backend_runs_one_level_after_the_other() -> None:
    problem = levels(LSTM, 512, 2, 0).made([3] * 33)
    with counted() as counts:
        problem.encoded()
        assert counts == [2]
        pinned = apart(LSTM, problem, PINNED)
    assert counts == [2]
    same(pinned, apart(LSTM, problem, "persistent"))


@every_form
def test_states_move_between_one_launch_and_several_at_chunk_borders(form: Form) -> None:
    x, weights, states = (problem := levels(form, 256, 3, 32).made([12] * 40))[1:]
    steps = x.data.view(40, 12, -1)
    for first, until, at_once in ((0, 5, True), (5, 9, False), (9, 12, True)):
        offsets = torch.arange(41, dtype=torch.int32, device="cuda") * (until - first)
        chunk = Ragged(steps[:, first:until].reshape(-1, steps.shape[2]), offsets)
        encoded = problem.run(chunk, states) if at_once else form.levels(chunk, weights, states, backend="persistent")
        states = encoded.state
    for number, (after, expected) in enumerate(zip(states, exact(form, problem).state, strict=True)):
        for name, array in arrays(after).items():
            close(array, getattr(expected, name), TOLERANCE[HALF], f"{name} {number}")


@every_form
def test_first_level_may_read_ids_or_gate_inputs(form: Form) -> None:
    problem = levels(form, 128, 3, 32).made(RAGGED)
    ids = torch.randint(50, (len(problem.x.data),), dtype=torch.int32, device="cuda")
    below, *above = problem.weights
    table = torch.randn(50, below.input.shape[1], device="cuda").half()
    over_gates = replace(below, input=None, bias=None)
    over_ids = replace(over_gates, table=table)
    with counted() as counts:
        from_ids = problem._replace(weights=(over_ids, *above), x=Ragged(ids, problem.x.offsets)).encoded()
        gates = Ragged(table[ids.long()].float(), problem.x.offsets)
        from_gates = problem._replace(weights=(over_gates, *above), x=gates).encoded()
    assert counts == [3, 3]
    agree(from_gates, from_ids, TOLERANCE[HALF])


@every_form
def test_tf32_runs_levels_at_once(form: Form) -> None:
    problem = levels(form, 128, 3, 32, storage=FLOAT32).made(RAGGED)
    with counted() as counts:
        with tf32_products():
            encoded = problem.encoded()
        problem.encoded()
    assert counts == [3], "float32 products have no room for several levels"
    agree(encoded, exact(form, problem), 2e-3)
