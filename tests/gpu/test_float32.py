"""Tests of LSTMs and GRUs in float32 on tensor cores: as exact as float32 arithmetic, with the bits of a row alone in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernels.backend import explain
from kernels.directions import compose_directions
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import (
    TOLERANCE,
    agree,
    assert_any_rows_match,
    assert_rows_are_independent,
    gates,
    made,
    outputs,
    same,
    tf32_products,
)
from tests.kernels.families import Form
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    Arguments,
)

pytestmark = pytest.mark.usefixtures("poisoned")

FORMS = [Form("lstm"), Form("lstm", peepholes=True), Form("gru", reset="after")]
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
FLOAT32 = torch.float32

every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def run(form: Form, x: Ragged, weights: Any, state: Any, *, want: Outputs = EVERYTHING) -> Encoded:
    return form.run(x, weights, state, want=want, backend="cluster")


def error_of(encoded: Encoded, expected: Encoded) -> float:
    """Return the root of the mean squared error of the steps."""
    assert encoded.steps is not None and expected.steps is not None
    return float((encoded.steps.double() - expected.steps.double()).square().mean().sqrt())


@every_form
@pytest.mark.parametrize("hidden", [1, 33, 100, 128, 151, 256, 300, 400, 512])
def test_outputs_and_state_match_the_reference(form: Form, hidden: int) -> None:
    problem = made(form, RAGGED, hidden, storage=FLOAT32)
    agree(run(form, *problem), form.exact(problem), TOLERANCE[FLOAT32])


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=str)
@pytest.mark.parametrize("factor", [0.0, 1e-6, 1.0, 8.0])
def test_error_is_at_most_twice_that_of_float32_products(form: Form, factor: float) -> None:
    x, weights, state = gates(form, [100, 60, 80, 7], 512, storage=FLOAT32)
    problem = Arguments(x, replace(weights, recurrent=weights.recurrent * factor), state)
    exact = form.exact(problem)
    plain, ours = error_of(form.run(*problem, backend="framework"), exact), error_of(run(form, *problem), exact)
    assert ours <= 2 * plain, f"{ours:.3g}, and {plain:.3g} with float32 products"


@every_form
@pytest.mark.parametrize("rows, hidden", [(7, 72), (256, 72), (700, 200), (70, 512)])
def test_any_number_of_rows(form: Form, rows: int, hidden: int) -> None:
    chance = random.Random(rows)
    problem = made(form, [chance.randint(0, 4) for _ in range(rows)], hidden, storage=FLOAT32)
    assert_any_rows_match(form, "cluster", problem, TOLERANCE[FLOAT32])


@every_form
@pytest.mark.parametrize("hidden", [40, 131, 500])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(form: Form, hidden: int) -> None:
    assert_rows_are_independent(form, "cluster", gates(form, [3, 41, 0, 8, 19, *[5] * 90], hidden, storage=FLOAT32))


@every_form
@pytest.mark.parametrize("hidden", [33, 512])
def test_each_direction_has_the_bits_that_it_has_alone(form: Form, hidden: int) -> None:
    forward, backward = (gates(form, RAGGED, hidden, storage=FLOAT32, seed=seed) for seed in (0, 1))
    weights, states = (forward.weights, backward.weights), (forward.state, backward.state)
    encoded = form.bidirectional(forward.x, weights, states, backend="cluster")
    same(encoded, compose_directions(partial(run, form))(forward.x, weights, states, want=EVERYTHING))


@every_form
def test_cuda_graph_serves_other_lengths_and_values(form: Form) -> None:
    first, second = (made(form, lengths, 161, storage=FLOAT32, seed=0) for lengths in ([5, 9, 0, 30], [20, 0, 18, 6]))
    x = Ragged(first.x.data.clone(), first.x.offsets.clone())
    run(form, x, first.weights, None)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(run(form, x, first.weights, None))
    x.data.copy_(second.x.data)
    x.offsets.copy_(second.x.offsets)
    graph.replay()
    expected = run(form, second.x, first.weights, None)
    assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)


@pytest.fixture
def tf32() -> Iterator[None]:
    with tf32_products():
        yield


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("form", [*FORMS, Form("gru", reset="before"), Form("lstm", projection=True)], ids=str)
@pytest.mark.parametrize("backend", ["adaptive", "persistent", "cluster", "grid"])
@pytest.mark.parametrize("hidden", [40, 512, 768])
def test_tf32_matches_the_reference_with_eleven_bits(form: Form, backend: str, hidden: int) -> None:
    for lengths in (RAGGED, [3, 0, 8, *[5] * 90]):
        problem = made(form, lengths, hidden, storage=FLOAT32)
        agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[torch.float16])


@pytest.mark.usefixtures("tf32")
def test_tf32_has_kernels_for_large_layers() -> None:
    chosen = explain("lstm", device="cuda:0", dtype="float32", hidden=1024).splitlines()[-1]
    assert chosen.startswith("adaptive: chosen")


def test_explain_names_the_kernel_and_the_reasons() -> None:
    for family in ("lstm", "gru"):
        within = explain(family, device="cuda:0", dtype="float32", hidden=512)
        assert within.splitlines()[1:] == ["persistent: chosen (clusters of 16 blocks)"]
        beyond = explain(family, device="cuda:0", dtype="float32", hidden=1024).splitlines()
        assert beyond[1] == "persistent: this device has no room for 1024 hidden units in float32, at most for 512"
        assert beyond[3] == "grid: needs float16 or bfloat16 weights" and beyond[-1] == "framework: chosen"
