"""Tests of the kernels of the LSTM and the GRU against the float64 reference: sizes, number formats, numbers of rows, launch shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from kernels.backend import PINNED
from kernels.ragged import Encoded, Ragged
from tests.gpu.cases import GRU, GRU_BEFORE, LSTM, ONE_PRODUCT, PROJECTED, TWO_PRODUCTS
from tests.gpu.comparisons import agree, assert_any_rows_match, close, outputs, same
from tests.gpu.inputs import (
    FLOAT32,
    HALF,
    HALVES,
    RAGGED,
    TOLERANCE,
    gates,
    in_shape,
    made,
    random_lengths,
    tf32_products,
)
from tests.kernels.families import Form
from tests.kernels.inputs import Arguments, arrays, map_arrays

pytestmark = pytest.mark.usefixtures("poisoned")

Launch = tuple[str, Mapping[str, int] | None]
"""A backend and its shape."""
BY_STEP = (*ONE_PRODUCT, GRU_BEFORE)
CLUSTER, GRID, PERSISTENT, STEP = ("cluster", None), ("grid", None), ("persistent", None), ("step", None)
WIDE: list[Launch] = [("wide", {"tile": tile}) for tile in (32, 64, 128)]
STEPS_SHAPES: list[Launch] = [
    *(("step", {"step64": units}) for units in (16, 32, 64)),
    *(("step", {"step128": units}) for units in (32, 64)),
]
TWO_PRODUCTS_SHAPES: list[Launch] = [
    *(("persistent", {"blocks": blocks}) for blocks in (2, 4, 8, 16)),
    *(("persistent", {"units": units}) for units in (8, 32)),
]
ONE_PRODUCT_SIZES = [
    *product(["cluster"], (1, 33, 100, 128, 151, 256, 512, 768)),
    *product(["grid"], (1, 100, 257, 512, 600, 801, 1024, 2048)),
    *product(["wide"], (64, 192, 512, 768, 1024, 1536, 2048)),
    *product(["step"], (8, 64, 136, 256, 264, 1024, 2304)),
]
TWO_PRODUCTS_SIZES = [*product(["cluster"], (1, 33, 151, 256, 512)), *product(["grid"], (1, 100, 257, 600, 1024, 2048))]


def in_both_halves(forms: Sequence[Form], sizes: Sequence[tuple[str, int]]) -> list[tuple[Form, str, int, torch.dtype]]:
    """Return every form in every size, in float16 and bfloat16 in turn: each size occurs in both, and so does each form."""
    cells = product(enumerate(forms), enumerate(sizes))
    return [(form, *size, HALVES[(place + number) % 2]) for (place, form), (number, size) in cells]


@pytest.mark.parametrize(
    "form, backend, hidden, storage",
    [
        *in_both_halves(ONE_PRODUCT, ONE_PRODUCT_SIZES),
        *in_both_halves(TWO_PRODUCTS, TWO_PRODUCTS_SIZES),
        *((form, "cluster", hidden, FLOAT32) for form in ONE_PRODUCT for hidden in (1, 33, 100, 128, 151, 256, 300, 400, 512)),
        *((form, "step", hidden, FLOAT32) for form in BY_STEP for hidden in (8, 136, 264, 1024)),
        *in_both_halves((GRU_BEFORE,), [*product(["step"], (8, 64, 136, 264, 1024, 2304))]),
    ],
    ids=str,
)
def test_outputs_and_state_match_the_reference(form: Form, backend: str, hidden: int, storage: torch.dtype) -> None:
    problem = made(form, RAGGED, hidden, storage=storage)
    agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[storage])


@pytest.mark.parametrize(
    "form, backend, hidden",
    [
        *((form, "step", 264) for form in BY_STEP),
        *(
            (form, backend, hidden)
            for form in (*ONE_PRODUCT, *TWO_PRODUCTS[:2])
            for backend, hidden in (("adaptive", 768), ("persistent", 40), ("cluster", 512), ("grid", 768))
        ),
    ],
    ids=str,
)
def test_tf32_matches_the_reference_with_eleven_bits(form: Form, backend: str, hidden: int) -> None:
    with tf32_products():
        for lengths in (RAGGED, [3, 0, 8, *[5] * 90]):
            problem = made(form, lengths, hidden, storage=FLOAT32)
            agree(form.run(*problem, backend=backend), form.exact(problem), TOLERANCE[HALF])


@pytest.mark.parametrize("form", [LSTM, GRU], ids=str)
@pytest.mark.parametrize("backend, hidden", [("cluster", 512), ("step", 512), ("step", 2048)])
@pytest.mark.parametrize("factor", [0.0, 1e-6, 1.0, 8.0])
def test_error_in_float32_is_at_most_twice_that_of_float32_products(
    form: Form, backend: str, hidden: int, factor: float
) -> None:
    x, weights, state = gates(form, [100, 60, 80, 7], hidden, storage=FLOAT32)
    problem = Arguments(x, replace(weights, recurrent=weights.recurrent * factor), state)
    expected = form.exact(problem).steps
    errors = []
    for each in ("framework", backend):
        steps = form.run(*problem, backend=each).steps
        assert steps is not None and expected is not None
        errors.append(float((steps.double() - expected).square().mean().sqrt()))
    assert errors[1] <= 2 * errors[0], f"{errors[1]:.3g}, and {errors[0]:.3g} with float32 products"


ANY_ROWS: list[tuple[Sequence[Form], Launch, torch.dtype, int]] = [
    *((ONE_PRODUCT, launch, HALF, 72) for launch in (PERSISTENT, CLUSTER, GRID)),
    *((ONE_PRODUCT, launch, HALF, 128) for launch in WIDE),
    *((BY_STEP, STEP, storage, hidden) for storage in (HALF, FLOAT32) for hidden in (72, 264)),
    *((TWO_PRODUCTS[:2], launch, HALF, 72) for launch in (CLUSTER, GRID)),
    *((ONE_PRODUCT, CLUSTER, FLOAT32, hidden) for hidden in (72, 200, 512)),
]


@pytest.mark.parametrize("rows", [1, 7, 9, 31, 64, 65, 256, 700, 4096])
@pytest.mark.parametrize("forms, launch, storage, hidden", ANY_ROWS, ids=str)
def test_any_number_of_rows(forms: Sequence[Form], launch: Launch, storage: torch.dtype, hidden: int, rows: int) -> None:
    (backend, shape), form = launch, forms[rows % len(forms)]
    problem = made(form, random_lengths(rows, 4), hidden, storage=storage)
    with in_shape(shape):
        assert_any_rows_match(partial(form.run, backend=backend), form, problem, TOLERANCE[storage])


@pytest.mark.parametrize(
    "form, hidden",
    [*zip(ONE_PRODUCT, (1100, 600, 2048), strict=True), (LSTM, 2048), *zip(TWO_PRODUCTS[:2], (600, 1024), strict=True)],
    ids=str,
)
def test_many_rows_of_a_large_layer(form: Form, hidden: int) -> None:
    problem = gates(form, random_lengths(150, 9), hidden)
    encoded = form.run(*problem, backend="grid")
    agree(encoded, form.exact(problem), TOLERANCE[HALF])
    same(form.run(*problem, backend="persistent"), encoded)


@pytest.mark.parametrize(
    "form, hidden, launches",
    [
        *((form, hidden, [CLUSTER, GRID]) for form in ONE_PRODUCT for hidden in (1, 64, 130, 401, 512)),
        *((form, hidden, WIDE) for form in ONE_PRODUCT for hidden in (64, 128, 512, 1024, 2048)),
        *((form, hidden, STEPS_SHAPES) for form in BY_STEP for hidden in (8, 136, 520)),
        *((form, 200, TWO_PRODUCTS_SHAPES) for form in TWO_PRODUCTS[:2]),
    ],
    ids=str,
)
def test_launch_shape_does_not_change_a_bit(form: Form, hidden: int, launches: Sequence[Launch]) -> None:
    """With so many rows, the blocks of the largest launches fill the device: the driver refuses a launch that is too large."""
    problem = gates(form, random_lengths(600, 4) if launches is WIDE else [7, 0, 3, 20, 1, 8, 8, 2, 5, *[4] * 90], hidden)
    results: list[Encoded] = []
    for backend, shape in launches:
        with in_shape(shape):
            results.append(form.run(*problem, backend=backend))
    for result in results[1:]:
        same(result, results[0])


@pytest.mark.parametrize(
    "form, storage, backend, hidden",
    [
        *((GRU, storage, *backend) for storage in HALVES for backend in (("cluster", 130), ("grid", 130), ("step", 136))),
        *((GRU_BEFORE, HALF, backend, 130) for backend in ("cluster", "grid")),
    ],
    ids=str,
)
def test_gru_starts_from_large_states(form: Form, storage: torch.dtype, backend: str, hidden: int) -> None:
    """A hidden value stays as large as its initial value while the update gate keeps it."""
    x, weights, state = made(form, [3, 12, 0, 25, 7], hidden, storage=storage)
    large = map_arrays(state, lambda array: array * 30)
    assert 16 < large.hidden.abs().max() < 32
    problem = Arguments(x, weights, large)
    agree(form.run(*problem, backend=backend), form.exact(problem), 8 * TOLERANCE[storage])


@pytest.mark.parametrize("vector", [1, 24, 130, 300])
@pytest.mark.parametrize("backend", ["cluster", "grid"])
def test_projections_have_any_width(backend: str, vector: int) -> None:
    x, weights, state = gates(PROJECTED, RAGGED, 256)
    wider = torch.randn(256, 300, generator=torch.Generator().manual_seed(5)).cuda()
    recurrent = wider.t().repeat(1, 4)[:vector].half() * vector**-0.5
    cut = replace(weights, recurrent=recurrent, projection=wider[:, :vector].half() / 16)
    problem = Arguments(x, cut, replace(state, hidden=wider[: x.rows, :vector].contiguous()))
    agree(PROJECTED.run(*problem, backend=backend), PROJECTED.exact(problem), TOLERANCE[HALF])


@pytest.mark.parametrize("backend", ["cluster", "grid"])
def test_projected_values_may_be_large(backend: str) -> None:
    """The hidden state of a projection has no bound."""
    x, weights, state = gates(PROJECTED, RAGGED, 130)
    problem = Arguments(x, replace(weights, recurrent=weights.recurrent / 64, projection=weights.projection * 64), state)
    encoded, expected = outputs(PROJECTED.run(*problem, backend=backend)), outputs(PROJECTED.exact(problem))
    assert float(encoded["steps"].abs().max()) > 32
    for name in encoded.keys() - {"cell"}:
        close(encoded[name] / 64, expected[name] / 64, TOLERANCE[HALF], name)


@pytest.mark.parametrize("form", ONE_PRODUCT, ids=str)
def test_adaptive_backend_runs_many_rows_by_the_wide_kernel(form: Form) -> None:
    few, many = (gates(form, [5] * rows, 1024) for rows in (64, 65))
    same(form.run(*few), form.run(*few, backend="persistent"))
    same(form.run(*many), form.run(*many, backend="wide"))
    same(form.run(*many, backend=PINNED), form.run(*many, backend="persistent"))
    agree(form.run(*many), form.run(*many, backend=PINNED), TOLERANCE[HALF])


@pytest.mark.parametrize("form", BY_STEP, ids=str)
@pytest.mark.parametrize("hidden", [128, 1024])
def test_adaptive_backend_runs_a_few_steps_of_many_rows_by_one_product_each(form: Form, hidden: int) -> None:
    few, many = (made(form, [steps] * 600, hidden) for steps in (2, 5))
    same(form.run(*few), form.run(*few, backend="step"))
    agree(form.run(*few), form.exact(few), TOLERANCE[HALF])
    same(form.run(*many, backend=PINNED), form.run(*many, backend="persistent"))


@pytest.mark.parametrize("form", BY_STEP, ids=str)
@pytest.mark.parametrize("width", [1, 33, 64, 200])
@pytest.mark.parametrize("storage", HALVES, ids=str)
def test_step_kernel_converts_inputs_of_any_width(form: Form, width: int, storage: torch.dtype) -> None:
    x, weights, state = made(form, RAGGED, 136, width, storage=storage)
    expected = form.exact(Arguments(x, weights, state))
    for data in (x.data, x.data.float(), x.data.double()):
        agree(form.run(Ragged(data, x.offsets), weights, state, backend="step"), expected, TOLERANCE[storage])
    zeros = form.exact(Arguments(x, weights, None))
    agree(form.run(x, weights, None, backend="step"), zeros, TOLERANCE[storage])


@pytest.mark.parametrize("form", BY_STEP, ids=str)
@pytest.mark.parametrize("hidden", [136, 264])
def test_step_kernel_ends_rows_in_the_slots_where_they_start(form: Form, hidden: int) -> None:
    x, weights, state = made(form, random_lengths(700, 3), hidden)
    expected = form.exact(Arguments(x, weights, state))
    slots = torch.randperm(x.rows, device="cuda")
    caches = map_arrays(state, lambda array: torch.empty_like(array).index_copy_(0, slots, array))
    encoded = form.run(x, weights, replace(caches, slots=slots.int()), backend="step")
    for name, array in arrays(state).items():
        assert getattr(encoded.state, name) is getattr(caches, name) and array.shape == getattr(caches, name).shape
        close(getattr(caches, name)[slots], getattr(expected.state, name), TOLERANCE[HALF], name)


@pytest.mark.parametrize(
    "form", [Form("lstm", ids=True), *(Form("gru", reset=reset, ids=True) for reset in ("after", "before"))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("hidden", [136, 264])
def test_step_kernel_reads_a_table_by_id(form: Form, dtype: torch.dtype, hidden: int) -> None:
    x, weights, state = made(form, random_lengths(200, 3), hidden)
    problem = Arguments(Ragged(x.data.to(dtype), x.offsets), weights, state)
    agree(form.run(*problem, backend="step"), form.exact(problem), TOLERANCE[HALF])


@pytest.mark.parametrize("form", ONE_PRODUCT, ids=str)
def test_state_moves_between_backends_at_chunk_borders(form: Form) -> None:
    x, weights, state = problem = gates(form, [12] * 70, 768)
    steps = x.data.view(70, 12, -1)
    for begin, end, backend in ((0, 5, "wide"), (5, 9, "grid"), (9, 11, "step"), (11, 12, "adaptive")):
        offsets = torch.arange(71, dtype=torch.int32, device="cuda") * (end - begin)
        chunk = Ragged(steps[:, begin:end].reshape(-1, steps.shape[2]), offsets)
        state = form.run(chunk, weights, state, backend=backend).state
    expected = form.exact(problem).state
    for name, array in arrays(state).items():
        close(array, getattr(expected, name), TOLERANCE[HALF], name)
