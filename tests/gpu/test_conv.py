"""Tests of the convolution's kernels against the float64 reference: forms, tiles, text CNNs, stacks, and what waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels.conv import conv, plan, text_cnn
from kernels.conv.geometry import BANKS
from kernels.conv.plan import MAX_WIDTH, ConvTile
from kernels.conv.types import ACTIVATIONS, ConvBlock
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.cases import CAUSAL, CENTRED, GATED, OF_TABLES, OF_VECTORS, SOME_TILE, STRIDED, UNPADDED
from tests.gpu.comparisons import agree, assert_any_rows_match, close, exact, outputs, same
from tests.gpu.inputs import (
    BFLOAT16,
    HALF,
    HALVES,
    LAST,
    MAXIMUM,
    RAGGED,
    STEPS,
    SUMS,
    TOLERANCE,
    begun_later,
    in_shape,
    joined,
    made,
    random_lengths,
)
from tests.gpu.stacks import KEEP_STEPS, Make, centred, gated, gated_tables, narrow, stacked, strided, tcn, text
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments, map_arrays
from tests.kernels.stacks import Maker, Stack

pytestmark = pytest.mark.usefixtures("poisoned")

BACKEND = "fused"
LONGER = [90, 0, 3, 130, 1, 64, 60, 9]
LONG = [1500, 0, 3, 2049, 64, 700]
MANY = random_lengths(600, 4)
MOSTLY_EMPTY = [5, *[0] * 70, 3, *[0] * 40, 12, 0, 1]
SHAPES = [SOME_TILE, ConvTile(1, 32), ConvTile(1, 128), ConvTile(2, 64), ConvTile(2, 128), ConvTile(2, 256)]
FORMS: list[tuple[Form, int, int]] = [
    (Form("conv", width=1), 1, 1),
    (Form("conv", width=2, left=1, activation="glu"), 65, 3),
    (CENTRED, 65, 40),
    (CAUSAL, 65, 40),
    (STRIDED, 3, 300),
    (Form("conv", width=5, left=4, right=3, dilation=2, stride=3), 64, 64),
    (Form("conv", width=4, activation="relu"), 300, 130),
    (Form("conv", width=3, left=4, right=5), 40, 8),
    (GATED, 130, 40),
    (Form("conv", width=2, left=70, dilation=70), 33, 65),
    (Form("conv", width=20, left=19, stride=2), 8, 8),
    (Form("conv", width=MAX_WIDTH + 1, left=MAX_WIDTH, right=3), 8, 8),
    (Form("conv", width=5, left=9, right=9, activation="gelu", ids="embedding"), 40, 24),
    (Form("conv", width=2, left=2, dilation=2, activation="glu", ids="embedding"), 65, 1),
    (Form("conv", width=12, left=11, activation="tanh", ids="tables"), 130, 1),
    (Form("conv", width=3, left=4, right=5, dilation=2, stride=2, activation="gelu", ids="tables"), 3, 1),
    (Form("conv", width=2, left=1, activation="gated_tanh", ids="tables"), 5, 1),
    *((Form("conv", width=3, left=2, activation=name, ids=ids), 40, 16) for name in ACTIVATIONS for ids in ("", "tables")),
]
"""Forms with their numbers of outputs and inputs. Both kernels, that of inputs and that of tables, run with each activation."""
every_way_in = pytest.mark.parametrize("ids", ["", "embedding", "tables"])


@contextmanager
def on_few_processors() -> Iterator[None]:
    """Let each block run many tiles."""
    plan.planned.cache_clear()
    try:
        with patch.object(plan, "multiprocessors", lambda _: 2):
            yield
    finally:
        plan.planned.cache_clear()


@contextmanager
def without_device_waits() -> Iterator[None]:
    """Raise an error if anything waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(problem: Arguments, want: Outputs = EVERYTHING, shape: ConvTile = SOME_TILE) -> Encoded:
    with in_shape(shape):
        return conv(*problem, want=want, backend=BACKEND)


# One convolution.


@pytest.mark.parametrize(
    "form, width, columns, storage",
    [*((*form, HALF) for form in FORMS), *((*form, BFLOAT16) for form in FORMS[1::5])],
    ids=str,
)
def test_outputs_and_state_match_the_reference(form: Form, width: int, columns: int, storage: torch.dtype) -> None:
    """A second run with packed weights is bit-equal. Filters that are too wide run on the framework, which rounds sums to the dtype."""
    tolerance = SUMS if form.options["width"] <= MAX_WIDTH else TOLERANCE[storage]
    for lengths in (RAGGED, MOSTLY_EMPTY, [1], [0, 0], []):
        problem = made(form, lengths, width, columns, storage=storage)
        encoded, expected = run(problem), exact(form, problem)
        assert outputs(encoded).keys() == outputs(expected).keys()
        agree(encoded, expected, tolerance)
        same(run(problem), encoded)


@cache
def prepared(form: Form, lengths: tuple[int, ...]) -> tuple[Arguments, Encoded]:
    problem = made(form, lengths, 130, 72)
    return problem, exact(form, problem)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form, want", [(UNPADDED, MAXIMUM), (GATED, STEPS)], ids=str)
def test_every_tile_shape_matches_the_reference(form: Form, want: Outputs, shape: ConvTile) -> None:
    """Long rows over many tiles, and tiles with many rows, with at most two blocks."""
    for lengths in (LONG, [*MANY, *MOSTLY_EMPTY]):
        problem, expected = prepared(form, tuple(lengths))
        with on_few_processors():
            agree(run(problem, want, shape), expected, SUMS)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("after", ACTIVATIONS)
def test_residual_matches_the_reference_in_every_tile_shape(shape: ConvTile, after: str) -> None:
    maker = Maker(72)
    layers = maker.causal(130, 2, activation="relu"), maker.causal(72, 2, activation="gelu")
    problem = maker.stack([*LONGER, 700, 3], ConvBlock(layers, residual=True, activation=after))
    problem = narrow(problem)
    with in_shape(shape), on_few_processors():
        agree(problem.map_arrays(Tensor.cuda).run(backend=BACKEND), problem.exact(), TOLERANCE[HALF])


@pytest.mark.parametrize("form", [UNPADDED, OF_TABLES], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 700, 5000])
def test_any_number_of_rows_in_the_tuned_shape(form: Form, rows: int) -> None:
    problem = made(form, random_lengths(rows, 5), 40, 40)
    assert_any_rows_match(partial(conv, backend=BACKEND), form, problem, SUMS)
    pooled, encoded = (conv(*problem, want=want, backend=BACKEND).max for want in (MAXIMUM, EVERYTHING))
    assert pooled is not None and encoded is not None
    close(pooled, encoded, SUMS, "max")


@pytest.mark.parametrize("form", [OF_VECTORS, OF_TABLES], ids=str)
@pytest.mark.parametrize("want", [MAXIMUM, EVERYTHING], ids=["max", "everything"])
def test_nan_of_an_id_stays_in_the_rows_with_that_id(form: Form, want: Outputs) -> None:
    x, weights, _ = made(form, [4, 2, 0, 7, 80, 1], 65, 40)
    ids, clean = x.data % 10, map_arrays(weights, torch.clone)
    ids[4] = 10
    (weights.embedding if weights.tables is None else weights.tables[:, 1:])[..., 10, :] = torch.nan
    expected, encoded = (run(Arguments(Ragged(ids, x.offsets), each, None), want).max for each in (clean, weights))
    assert encoded is not None and expected is not None
    assert encoded[1].isnan().any()
    assert torch.equal(encoded[[0, 2, 3, 4, 5]], expected[[0, 2, 3, 4, 5]])


@pytest.mark.parametrize("form", [CAUSAL, OF_VECTORS, OF_TABLES], ids=str)
@pytest.mark.parametrize("places", [1, 2, 4])
def test_inputs_states_and_tables_may_be_unaligned(form: Form, places: int) -> None:
    x, weights, state = problem = made(form, RAGGED, 65, 40)
    later = partial(begun_later, places=places)
    if form.takes_ids:
        shifted = Arguments(x, map_arrays(weights, later), None)
    else:
        shifted = Arguments(Ragged(later(x.data), x.offsets), weights, map_arrays(state, later))
        assert shifted.x.data.data_ptr() % 16 == 2 * places
    same(run(shifted), run(problem))


# Text CNNs.


@every_way_in
@pytest.mark.parametrize("widths", [1, 2, 3, BANKS, BANKS + 1])
def test_text_cnn_matches_the_reference(ids: str, widths: int) -> None:
    for lengths, labels in ((RAGGED, 6), (RAGGED, 0), ([0, 0], 6), ([], 6), ([1], 0), ([300, 2], 33)):
        problem = text(ids, lengths, widths, labels=labels)
        there = problem.map_arrays(Tensor.cuda)
        with in_shape(SOME_TILE):
            encoded = there.run(backend=BACKEND)
            assert (encoded.steps, encoded.last, encoded.mean, encoded.state) == (None,) * 4
            assert (encoded.scores is not None) == bool(labels)
            agree(encoded, problem.exact(), SUMS if encoded.scores is None else TOLERANCE[HALF])
            same(there.run(backend=BACKEND), encoded)


@every_way_in
@pytest.mark.parametrize("options", [{}, {"left": 4, "right": 4}, {"stride": 2}, {"first": 1, "stride": 2}], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_text_cnn_of_many_rows_matches_the_reference(ids: str, options: dict[str, int], dtype: torch.dtype) -> None:
    """With a stride, each width has a different number of windows."""
    labels = 6 if dtype is BFLOAT16 else 0
    problem = text(ids, [*MANY, 70, *RAGGED, *[1] * 9, *[2] * 9], 3, dtype=dtype, labels=labels, **options)
    encoded = problem.map_arrays(Tensor.cuda).run(backend=BACKEND)
    agree(encoded, problem.exact(), SUMS if dtype is HALF else TOLERANCE[dtype])


@every_way_in
def test_text_cnn_is_bit_equal_to_its_layers_one_by_one(ids: str) -> None:
    problem = text(ids, [*RAGGED, 300], BANKS).map_arrays(Tensor.cuda)
    wide = Ragged(problem.x.data.long() if ids else problem.x.data, problem.x.offsets.long())
    with in_shape(SOME_TILE):
        together = problem.run(backend=BACKEND)
        alone = [conv(problem.x, layer, want=MAXIMUM, backend=BACKEND).max for layer in problem.layers]
        same(text_cnn(wide, problem.layers, backend=BACKEND), together)
    assert together.max is not None
    assert torch.equal(together.max, torch.cat([maxima for maxima in alone if maxima is not None], dim=1))


def test_classifier_in_another_dtype_is_a_separate_product() -> None:
    problem = text("tables", RAGGED, 3, labels=6).map_arrays(Tensor.cuda)
    assert problem.classifier is not None
    wide = problem._replace(classifier=(problem.classifier[0].float(), problem.classifier[1].float()))
    agree(wide.run(backend=BACKEND), problem.run(backend=BACKEND), SUMS)


# Stacks.


def fused(problem: Stack, want: Outputs = EVERYTHING) -> Encoded:
    with in_shape(SOME_TILE):
        return problem.run(want=want, backend=BACKEND)


@pytest.mark.parametrize("make", [*KEEP_STEPS, strided, gated_tables])
@pytest.mark.parametrize("want", [EVERYTHING, LAST, MAXIMUM], ids=["everything", "last", "max"])
def test_stack_matches_the_reference(make: Make, want: Outputs) -> None:
    for lengths in (LONGER, [0, 0], [], [1]):
        problem = stacked(make, lengths)
        there = problem.map_arrays(Tensor.cuda)
        encoded, expected = fused(there, want), problem.exact(want)
        assert outputs(encoded).keys() == outputs(expected).keys()
        assert encoded.state is None
        agree(encoded, expected, TOLERANCE[HALF])
        same(fused(there, want), encoded)


@pytest.mark.parametrize("make, storage", [(tcn, HALF), (tcn, BFLOAT16), *((make, HALF) for make in (gated, centred, strided))])
def test_stack_with_states_matches_the_reference(make: Make, storage: torch.dtype) -> None:
    for lengths in (LONGER, [0, 0], []):
        problem = stacked(make, lengths, states=True, dtype=storage)
        encoded, expected = fused(problem.map_arrays(Tensor.cuda)), problem.exact()
        assert outputs(encoded).keys() == outputs(expected).keys()
        agree(encoded, expected, TOLERANCE[storage])


@pytest.mark.parametrize("make", KEEP_STEPS)
def test_last_step_alone_equals_the_last_of_all_steps(make: Make) -> None:
    problem = stacked(make, [*LONGER, *MANY[:20]]).map_arrays(Tensor.cuda)
    alone, of_all = fused(problem, LAST).last, fused(problem).last
    assert alone is not None and of_all is not None
    close(alone, of_all, SUMS, "last")


def test_early_launches_wait_for_earlier_kernels() -> None:
    """Each launch reads what the previous launch writes at its end."""
    problem = stacked(tcn, [1280], states=True).map_arrays(Tensor.cuda)
    whole, states = fused(problem), problem.states
    steps: list[Tensor | None] = []
    for part in torch.split(problem.x.data, 32):
        encoded = fused(Stack(joined([part]), problem.blocks, states))
        states = encoded.state
        steps.append(encoded.steps)
    assert whole.steps is not None
    assert torch.equal(torch.cat([part for part in steps if part is not None]), whole.steps)


# What waits. Graphs, which do not permit a wait, are captured of the other problems.


@pytest.mark.parametrize("form", [UNPADDED, STRIDED], ids=str)
def test_only_an_unknown_number_of_steps_waits(form: Form) -> None:
    """The maximum alone does not need the number of steps."""
    problem = made(form, RAGGED, 40, 40)
    relu = problem._replace(weights=replace(problem.weights, activation="relu"))
    expected = run(relu)
    with without_device_waits():
        encoded = run(relu, MAXIMUM)
    with without_device_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        run(problem, STEPS)
    same(encoded, expected)
