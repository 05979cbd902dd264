"""Tests of the CUDA kernel for two dependent products in each step, against the float64 reference: GRUs with the reset before the product
and LSTMs with a projection."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch

from kernels.backend import Problem
from kernels.directions import compose_directions
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.gru.types import GRUState
from kernels.lstm import BACKENDS
from kernels.persistent import launch
from kernels.persistent.two_products import TwoProductsCluster, TwoProductsGrid
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import (
    TOLERANCE,
    agree,
    assert_any_rows_match,
    assert_graph_serves_other_values,
    assert_nan_stays_in_its_row,
    assert_rows_are_independent,
    assert_rows_move_between_slots,
    gates,
    made,
    outputs,
    same,
    stored,
)
from tests.gpu.sanitizer import TOOLS, assert_no_findings
from tests.kernels.families import Form
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    Arguments,
)
from tests.kernels.shapes import fresh_shape_caches

pytestmark = pytest.mark.usefixtures("poisoned")

GRU, PROJECTED = Form("gru", reset="before"), Form("lstm", projection=True)
FORMS = [GRU, PROJECTED, Form("lstm", projection=True, peepholes=True)]
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
SIZES = [*product(["cluster"], [1, 33, 151, 256, 512]), *product(["grid"], [1, 100, 257, 600, 1024, 2048])]

every_form = pytest.mark.parametrize("form", FORMS, ids=str)
both_forms = pytest.mark.parametrize("form", FORMS[:2], ids=str)
both_kernels = pytest.mark.parametrize("backend", ["cluster", "grid"])


@contextmanager
def in_shapes(*shapes: dict[str, int]) -> Iterator[None]:
    """Launch every layer in the first of these shapes that runs."""
    with patch.object(launch, "_tuned_shapes", lambda _: shapes), fresh_shape_caches():
        yield


@every_form
@pytest.mark.parametrize("backend, hidden", SIZES)
def test_outputs_and_state_match_the_reference(form: Form, backend: str, hidden: int) -> None:
    problem = made(form, RAGGED, hidden)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[torch.float16])


@every_form
@both_kernels
@pytest.mark.parametrize("hidden", [33, 256])
def test_bfloat16_matches_the_reference(form: Form, backend: str, hidden: int) -> None:
    problem = made(form, RAGGED, hidden, storage=torch.bfloat16)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[torch.bfloat16])


@both_forms
@both_kernels
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_may_have_any_dtype(form: Form, backend: str, data: torch.dtype) -> None:
    problem = stored(gates(form, RAGGED, 51), data)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[torch.float16])


@pytest.mark.parametrize("vector", [1, 24, 130, 300])
@both_kernels
def test_projections_have_any_width(backend: str, vector: int) -> None:
    x, weights, state = gates(PROJECTED, RAGGED, 256)
    wider = torch.randn(256, 300, generator=torch.Generator().manual_seed(5)).cuda()
    cut = replace(
        weights, recurrent=wider.t().repeat(1, 4)[:vector].half() * vector**-0.5, projection=wider[:, :vector].half() / 16
    )
    problem = Arguments(x, cut, replace(state, hidden=wider[: x.rows, :vector].contiguous()))
    agree(PROJECTED.run(*problem, backend=backend), PROJECTED.exact(problem), TOLERANCE[torch.float16])


@both_forms
@both_kernels
@pytest.mark.parametrize("rows", [1, 7, 65, 700, 4096])
def test_any_number_of_rows(form: Form, backend: str, rows: int) -> None:
    chance = random.Random(rows)
    problem = made(form, [chance.randint(0, 4) for _ in range(rows)], 72)
    assert_any_rows_match(form, backend, problem, TOLERANCE[torch.float16])


@both_forms
def test_all_shapes_give_the_same_bits(form: Form) -> None:
    problem = gates(form, [7, 0, 3, 20, 1, 8, 8, 2, 5, *[4] * 90], 200)
    shapes: Sequence[dict[str, int]] = [*({"blocks": blocks} for blocks in (2, 4, 8, 16)), {"units": 8}, {"units": 32}]
    results = []
    for shape in shapes:
        with in_shapes(shape):
            results.append(form.run(*problem, backend="persistent"))
    for result in results[1:]:
        same(result, results[0])


@both_forms
@pytest.mark.parametrize("hidden", [600, 1024])
def test_many_rows_of_a_large_layer(form: Form, hidden: int) -> None:
    chance = random.Random(hidden)
    problem = gates(form, [chance.randint(0, 9) for _ in range(150)], hidden)
    encoded = form.run(*problem, backend="grid")
    agree(encoded, form.exact(problem), TOLERANCE[torch.float16])
    same(form.run(*problem), encoded)


@every_form
@both_kernels
@pytest.mark.parametrize("hidden", [40, 520])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(form: Form, backend: str, hidden: int) -> None:
    assert_rows_are_independent(form, backend, gates(form, [3, 41, 0, 8, 19, *[5] * 90], hidden))


@both_kernels
def test_gru_starts_from_large_states(backend: str) -> None:
    """A hidden value stays as large as its initial value while the update gate keeps it."""
    x, weights, state = made(GRU, [3, 12, 0, 25, 7], 130)
    problem = Arguments(x, weights, GRUState(state.hidden * 30))
    agree(GRU.run(*problem, backend=backend), GRU.exact(problem), 8 * TOLERANCE[torch.float16])


@both_kernels
def test_projected_values_may_be_large(backend: str) -> None:
    """The hidden state of a projection has no bound."""
    x, weights, state = gates(PROJECTED, RAGGED, 130)
    problem = Arguments(x, replace(weights, recurrent=weights.recurrent / 64, projection=weights.projection * 64), state)
    encoded = PROJECTED.run(*problem, backend=backend)
    assert encoded.steps is not None and float(encoded.steps.abs().max()) > 32
    expected = PROJECTED.exact(problem)
    scaled = {name: array / 64 for name, array in outputs(encoded).items() if name != "cell"}
    for name, array in scaled.items():
        torch.testing.assert_close(array.double(), outputs(expected)[name] / 64, rtol=1e-2, atol=2e-2)


@both_forms
@both_kernels
@pytest.mark.parametrize("requested", [(), ("steps",), ("last",), ("mean",), ("max",)], ids=str)
def test_unrequested_outputs_are_none_and_change_nothing(form: Form, backend: str, requested: tuple[str, ...]) -> None:
    problem = gates(form, RAGGED, 48)
    everything = form.run(*problem, backend=backend)
    encoded = form.run(*problem, want=Outputs(**dict.fromkeys(requested, True)), backend=backend)
    assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(requested)
    same(encoded, everything)


@every_form
@both_kernels
@pytest.mark.parametrize("lengths", [RAGGED, [0, 0, 0, 0], [*RAGGED * 30, 0, 0]], ids=["few", "empty", "many"])
def test_rows_start_from_sources_and_write_to_slots(form: Form, backend: str, lengths: list[int]) -> None:
    assert_rows_move_between_slots(form, backend, gates(form, lengths, 112))


@both_forms
@both_kernels
def test_cuda_graph_serves_other_lengths_slots_and_values(form: Form, backend: str) -> None:
    assert_graph_serves_other_values(form, backend, hidden=161)


@both_forms
@both_kernels
def test_nan_in_other_rows_does_not_reach_a_row(form: Form, backend: str) -> None:
    assert_nan_stays_in_its_row(form, backend, hidden=97)


@both_forms
@pytest.mark.parametrize("backend, hidden", [("cluster", 33), ("cluster", 256), ("grid", 33), ("grid", 1024), ("grid", 2048)])
def test_each_direction_has_the_bits_that_it_has_alone(form: Form, backend: str, hidden: int) -> None:
    forward, backward = (gates(form, RAGGED, hidden, seed=seed) for seed in (0, 1))
    weights, states = (forward.weights, backward.weights), (forward.state, backward.state)
    encoded = form.bidirectional(forward.x, weights, states, backend=backend)

    def run(x: Ragged, weights: object, state: object, *, want: Outputs) -> Encoded:
        return form.run(x, weights, state, want=want, backend=backend)

    same(encoded, compose_directions(run)(forward.x, weights, states, want=EVERYTHING))


@pytest.mark.parametrize("form", [Form("gru", reset="before", ids=True)], ids=str)
@both_kernels
def test_ids_select_gate_inputs(form: Form, backend: str) -> None:
    problem = made(form, RAGGED, 96)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[torch.float16])


def test_layers_choose_the_kernel_and_say_so() -> None:
    device = torch.device("cuda:0")
    problem = partial(Problem, device, torch.float16)
    described = next(backend.describe for backend in BACKENDS if backend.name == "persistent")
    assert described is not None
    assert "two products a step" in described(problem(512, (PROJECTION, PEEPHOLES), 256))
    for form in FORMS:
        x, weights, state = made(form, [3, 4], 192)
        chosen = form.module.choice(weights)
        assert chosen.backend.name == "persistent" and "two products a step" in chosen.why[-1]
        same(form.run(x, weights, state), form.run(x, weights, state, backend="persistent"))
    [refused, *_] = [
        backend.refusal(Problem(device, torch.float32, 64, (RESET_BEFORE,)))
        for backend in GRU.backends
        if backend.name == "persistent"
    ]
    assert refused == "needs float16 or bfloat16 weights"


def test_a_layer_beyond_a_cluster_runs_in_the_grid() -> None:
    variant = launch.Family.variant(GRU.module.FUSED, Problem(torch.device("cuda:0"), torch.float16, 1024, (RESET_BEFORE,)))
    assert not any(TwoProductsCluster(variant, blocks).runs() for blocks in (8, 16))
    assert isinstance(launch.fastest_shape(variant, 8, 1), TwoProductsGrid)


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_reports_no_errors(tool: str) -> None:
    assert_no_findings(tool, "tests.gpu.small_two_products")
