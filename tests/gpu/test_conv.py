"""The convolution's CUDA kernels against the float64 reference: forms, ragged rows, tiles, chunks, slots, stacks, text CNNs, graphs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels import launching
from kernels.backend import explain
from kernels.conv import conv, plan, stack, text_cnn
from kernels.conv import product as launched
from kernels.conv.geometry import BANKS
from kernels.conv.plan import MAX_WIDTH, TileShape
from kernels.conv.types import ConvBlock
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import TOLERANCE, close, joined, stored
from tests.gpu.sanitizer import TOOLS, assert_no_findings
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    SCRAP_SLOT,
    ZERO_SLOT,
    Arguments,
    arrays,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    caches_with_zero_slot,
    in_chunks,
    map_arrays,
    put_in_slots,
    run_from_slot_to_slot,
    with_shared_slots,
    with_slots,
)
from tests.kernels.stacks import Maker, Stack, TextCNN

pytestmark = pytest.mark.usefixtures("poisoned")

BACKEND = "fused"
SUMS = 2e-3
"""A larger error is not rounding: sums are float32 in either dtype, and tanh is accurate to eleven bits."""
HALF = torch.float16

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
LONGER = [90, 0, 3, 130, 1, 64, 60, 9]
LONG = [1500, 0, 3, 2049, 64, 700]
MANY = [random.Random(0).randint(0, 4) for _ in range(600)]
MOSTLY_EMPTY = [5, *[0] * 70, 3, *[0] * 40, 12, 0, 1]
LAST, MAXIMUM, STEPS = Outputs(last=True), Outputs(max=True), Outputs(steps=True)
SOME = TileShape(1, 64)
SHAPES = [SOME, TileShape(1, 32), TileShape(1, 128), TileShape(2, 64), TileShape(2, 128), TileShape(2, 256)]

CENTRED = Form("conv", width=3, left=1, right=1, activation="relu")
UNPADDED = Form("conv", width=3, activation="relu")
GATED = Form("conv", width=3, left=4, dilation=2, activation="gated_tanh")
CAUSAL = Form("conv", width=3, left=8, dilation=4, activation="tanh")
STRIDED = Form("conv", width=3, left=2, stride=2, activation="gelu")
OF_VECTORS = Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding")
OF_TABLES = Form("conv", width=3, left=2, activation="relu", ids="tables")
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
]
"""Forms with their numbers of outputs and inputs."""
every_slab = pytest.mark.parametrize(
    "slab, index", [(HALF, torch.int32), (HALF, torch.int64), (torch.float32, torch.int64)], ids=str
)
"""State caches that the kernel can write to, and a state cache that it cannot write to."""
every_way_in = pytest.mark.parametrize("ids", ["", "embedding", "tables"])


@contextmanager
def in_shape(shape: TileShape = SOME) -> Iterator[None]:
    """Use this tile shape for every launch."""
    with patch.object(launched, "shape_for", lambda *_: shape):
        yield


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


def host_problem(
    form: Form, lengths: Sequence[int], width: int, columns: int, dtype: torch.dtype = HALF, seed: int = 0
) -> Arguments:
    """Return a problem on the CPU, with data and state in the dtype of the weights."""
    x, weights, state = stored(form.arguments(lengths, width, columns, storage=dtype, seed=seed), dtype)
    return Arguments(x, weights, map_arrays(state, lambda array: array.to(dtype)))


def made(
    form: Form, lengths: Sequence[int], width: int, columns: int = 40, dtype: torch.dtype = HALF, seed: int = 0
) -> Arguments:
    return host_problem(form, lengths, width, columns, dtype, seed).map_arrays(Tensor.cuda)


def run(problem: Arguments, want: Outputs = EVERYTHING) -> Encoded:
    return conv(*problem, want=want, backend=BACKEND)


def exact(problem: Arguments) -> Encoded:
    return Form("conv").exact(problem.map_arrays(Tensor.cpu))


def alike(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    """Compare the outputs and the offsets. `expected` may have more outputs."""
    outputs, expected_outputs = everything(actual), everything(expected)
    assert outputs.keys() <= expected_outputs.keys()
    for name, array in outputs.items():
        close(array, expected_outputs[name], tolerance, name)
    assert (actual.offsets is None) == (expected.offsets is None)
    if actual.offsets is not None and expected.offsets is not None:
        assert actual.offsets.tolist() == expected.offsets.tolist()


def everything(encoded: Encoded) -> dict[str, Tensor]:
    """Return all outputs by name, including the states of a stack and the scores of a text CNN."""
    states = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
    outputs = {name: array for name in (*OUTPUTS, "scores") if (array := getattr(encoded, name)) is not None}
    return outputs | {f"{name} {layer}": array for layer, state in enumerate(states) for name, array in arrays(state).items()}


def equal(actual: Encoded, expected: Encoded) -> None:
    """Assert that all outputs are bit-equal."""
    outputs, expected_outputs = everything(actual), everything(expected)
    assert outputs.keys() <= expected_outputs.keys()
    differing = [name for name, array in outputs.items() if not torch.equal(array, expected_outputs[name])]
    assert not differing


def misaligned(array: Tensor, places: int) -> Tensor:
    """Return the same values, `places` elements after an aligned address."""
    return torch.cat([array.new_zeros(places), array.flatten()])[places:].view_as(array)


# One convolution.


@pytest.mark.parametrize(
    "form, width, columns, dtype",
    [*((*form, HALF) for form in FORMS), *((*form, torch.bfloat16) for form in FORMS[1::5])],
    ids=str,
)
def test_outputs_and_state_agree_with_the_reference(form: Form, width: int, columns: int, dtype: torch.dtype) -> None:
    """A second run with packed weights is bit-equal. Filters that are too wide run on the framework, which rounds sums to the dtype."""
    tolerance = SUMS if form.options["width"] <= MAX_WIDTH else TOLERANCE[dtype]
    for lengths in (RAGGED, MOSTLY_EMPTY, [1], [0, 0], []):
        problem = host_problem(form, lengths, width, columns, dtype)
        there = problem.map_arrays(Tensor.cuda)
        with in_shape():
            encoded, expected = run(there), exact(problem)
            assert everything(encoded).keys() == everything(expected).keys()
            alike(encoded, expected, tolerance)
            equal(run(there), encoded)


@pytest.mark.parametrize("form, width", [(CENTRED, 130), (GATED, 130), (OF_VECTORS, 65), (OF_TABLES, 65)], ids=str)
@pytest.mark.parametrize("names", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")], ids=str)
def test_unwanted_outputs_are_none(form: Form, width: int, names: tuple[str, ...]) -> None:
    problem = made(form, RAGGED, width)
    with in_shape():
        encoded = run(problem, Outputs(**dict.fromkeys(names, True)))
        assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(names)
        equal(encoded, run(problem))


@cache
def prepared(form: Form, lengths: tuple[int, ...], width: int) -> tuple[Arguments, Encoded]:
    problem = host_problem(form, lengths, width, 72)
    return problem.map_arrays(Tensor.cuda), exact(problem)


every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_shape
@pytest.mark.parametrize("form, width, want", [(UNPADDED, 130, MAXIMUM), (GATED, 130, STEPS)], ids=str)
def test_every_tile_shape_agrees(form: Form, width: int, want: Outputs, shape: TileShape) -> None:
    """Long rows over many tiles, and tiles with many rows, with at most two blocks."""
    for lengths in (LONG, [*MANY, *MOSTLY_EMPTY]):
        problem, expected = prepared(form, tuple(lengths), width)
        with in_shape(shape), on_few_processors():
            alike(run(problem, want), expected, SUMS)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_residual_agrees_in_every_tile_shape(shape: TileShape) -> None:
    maker = Maker(72)
    first, second = maker.causal(130, 2, activation="relu"), maker.causal(72, 2, activation="gelu")
    problem = halves(maker.stack([*LONGER, 700, 3], ConvBlock((first, second), residual=True, activation="tanh")))
    with in_shape(shape), on_few_processors():
        alike(problem.map_arrays(Tensor.cuda).run(backend=BACKEND), problem.exact(), TOLERANCE[HALF])


@pytest.mark.parametrize("form", [UNPADDED, OF_TABLES], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64, 700, 5000])
def test_any_number_of_rows_in_the_tuned_shape(form: Form, rows: int) -> None:
    chance = random.Random(rows)
    problem = made(form, [chance.randint(0, 5) for _ in range(rows)], 40)
    pooled, encoded = run(problem, MAXIMUM), run(problem)
    assert pooled.max is not None and encoded.max is not None
    sampled = sorted(chance.sample(range(rows), min(rows, 40)))
    rows_of_x, state = inputs.rows(problem.x), map_arrays(problem.state, itemgetter(sampled))
    expected = exact(Arguments(joined([rows_of_x[row] for row in sampled]), problem.weights, state))
    for name in ("last", "mean", "max"):
        close(getattr(encoded, name)[sampled], getattr(expected, name), SUMS, name)
    close(pooled.max, encoded.max, SUMS, "max")


@pytest.mark.parametrize(
    "form, width, want",
    [(UNPADDED, 130, MAXIMUM), (CENTRED, 130, EVERYTHING), (GATED, 40, STEPS), (OF_TABLES, 65, EVERYTHING)],
    ids=str,
)
def test_row_is_bit_equal_alone_and_in_a_batch(form: Form, width: int, want: Outputs) -> None:
    x, weights, state = made(form, [3, 41, 0, 8, 19, *[5] * 90, 300], width)
    with in_shape():
        whole = run(Arguments(x, weights, state), want)
        for row in (0, 1, 2, 4, 60, 95):
            one_row = Arguments(joined([inputs.rows(x)[row]]), weights, map_arrays(state, itemgetter(slice(row, row + 1))))
            alone = run(one_row, want)
            pairs = {name: array[0] for name, array in everything(alone).items() if name != "steps"}
            assert all(torch.equal(array, everything(whole)[name][row]) for name, array in pairs.items())
            if alone.steps is not None:
                assert torch.equal(alone.steps, inputs.steps_by_row(whole, x)[row])


@pytest.mark.parametrize("form, width", [(GATED, 130), (CAUSAL, 65)], ids=str)
@pytest.mark.parametrize("places", [0, 20], ids=["by row", "in slots"])
def test_chunks_are_bit_equal_to_the_whole_row(form: Form, width: int, places: int) -> None:
    x, weights, state = made(form, [3, 41, 0, 8, 19, 12], width)
    slots = torch.tensor([7, 3, 19, 0, 5, 1], device=x.data.device)
    with in_shape():
        whole = run(Arguments(x, weights, state))
        before = put_in_slots(state, slots, places) if places else state
        steps: list[list[Tensor]] = [[] for _ in range(x.rows)]
        for begin, end in ((0, 1), (1, 4), (4, 4), (4, 20), (20, 41)):
            chunk = joined([row[begin:end] for row in inputs.rows(x)])
            encoded = run(Arguments(chunk, weights, before))
            before = encoded.state
            for so_far, part in zip(steps, inputs.steps_by_row(encoded, chunk), strict=True):
                so_far.append(part)
    assert whole.steps is not None
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole.steps)
    assert torch.equal(before.by_row().left, whole.state.left)


@pytest.mark.parametrize("form", [CAUSAL, STRIDED, CENTRED], ids=str)
@every_slab
@pytest.mark.parametrize("columns", [33, 40])
def test_state_slots_are_read_and_written_in_place(form: Form, slab: torch.dtype, index: torch.dtype, columns: int) -> None:
    x, weights, state = made(form, RAGGED, 65, columns)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: x.rows].cuda().to(index)
    slabs = put_in_slots(map_arrays(state, lambda array: array.to(slab)), slots, places=40)
    with in_shape():
        expected = run(Arguments(x, weights, state))
        encoded = run(Arguments(x, weights, slabs))
    assert encoded.state is slabs
    assert torch.equal(slabs.by_row().left.to(HALF), expected.state.left)
    others = torch.ones(40, dtype=torch.bool, device=x.data.device).index_fill(0, slots.long(), False)
    assert bool((slabs.left[others] == 9).all())
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)


@pytest.mark.parametrize("form, width", [(GATED, 130), (CAUSAL, 65)], ids=str)
@every_slab
def test_rows_share_the_zero_and_scrap_slots(form: Form, width: int, slab: torch.dtype, index: torch.dtype) -> None:
    x, weights, state = made(form, [3, 41, 0, 8, 19, 1, 12], width)
    slabs = caches_with_zero_slot(map_arrays(state, lambda array: array.to(slab)))
    with in_shape():
        whole = run(Arguments(x, weights, None))
        steps, after = run_from_slot_to_slot(
            lambda chunk, state: run(Arguments(chunk, weights, state)), in_chunks(x, chunks=4), slabs, index
        )
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    assert torch.equal(after.left.to(HALF), whole.state.left)
    assert_reserved_slots_unchanged(slabs)


@pytest.mark.parametrize("form", [CAUSAL, STRIDED, CENTRED], ids=str)
@every_slab
@pytest.mark.parametrize("columns", [33, 40])
@pytest.mark.parametrize("lengths", [RAGGED, [9, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_rows_read_sources_and_write_slots(
    form: Form, slab: torch.dtype, index: torch.dtype, columns: int, lengths: list[int]
) -> None:
    x, weights, state = made(form, lengths, 65, columns)
    slabs = with_shared_slots(map_arrays(state, lambda array: array.to(slab)), index)
    with in_shape():
        expected = run(Arguments(x, weights, slabs.by_row()))
        encoded = run(Arguments(x, weights, slabs))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    assert_shared_slots_result(encoded.state, state, expected.state)


def test_row_without_state_starts_from_zeros() -> None:
    x, weights, state = made(CAUSAL, RAGGED, 65)
    with in_shape():
        equal(run(Arguments(x, weights, None)), run(Arguments(x, weights, map_arrays(state, torch.zeros_like))))


@pytest.mark.parametrize(
    "form, width, want",
    [(UNPADDED, 130, MAXIMUM), (CENTRED, 130, EVERYTHING), (GATED, 40, EVERYTHING), (GATED, 40, LAST)],
    ids=str,
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 65504.0])
def test_nan_and_inf_stay_in_their_row(form: Form, width: int, want: Outputs, poison: float) -> None:
    x, weights, state = made(form, [4, 2, 0, 7, 7, 1, 3, 5, 6, 80], width)
    data, before = x.data.clone(), map_arrays(state, torch.clone)
    data[4:6], data[-83:-80], before.left[3] = poison, poison, poison
    with in_shape():
        clean = run(Arguments(x, weights, state), want)
        encoded = run(Arguments(Ragged(data, x.offsets), weights, before), want)
    for row in (0, 2, 4, 5, 6, 7, 9):
        for name in everything(clean).keys() - {"steps"}:
            assert torch.equal(everything(encoded)[name][row], everything(clean)[name][row])
        if clean.steps is not None:
            assert torch.equal(inputs.steps_by_row(encoded, x)[row], inputs.steps_by_row(clean, x)[row])
    if poison != poison and form is not UNPADDED:  # rows of two steps have no window
        assert all(array[1].isnan().any() for name, array in everything(encoded).items() if name != "steps")
    if poison != poison:
        assert all(array[8].isnan().any() for name, array in everything(encoded).items() if name in ("last", "max"))


@pytest.mark.parametrize("form", [OF_VECTORS, OF_TABLES], ids=str)
@pytest.mark.parametrize("want", [MAXIMUM, EVERYTHING], ids=["max", "everything"])
def test_nan_of_an_id_stays_in_the_rows_with_that_id(form: Form, want: Outputs) -> None:
    x, weights, _ = made(form, [4, 2, 0, 7, 80, 1], 65)
    ids, clean = x.data % 10, map_arrays(weights, torch.clone)
    ids[4] = 10
    (weights.embedding if weights.tables is None else weights.tables[:, 1:])[..., 10, :] = torch.nan
    with in_shape():
        expected = run(Arguments(Ragged(ids, x.offsets), clean, None), want)
        encoded = run(Arguments(Ragged(ids, x.offsets), weights, None), want)
    assert encoded.max is not None and expected.max is not None
    assert encoded.max[1].isnan().any()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(encoded.max[others], expected.max[others])


@pytest.mark.parametrize("places", [1, 2, 4])
def test_inputs_states_and_tables_may_be_unaligned(places: int) -> None:
    later = partial(misaligned, places=places)
    with in_shape():
        x, weights, state = made(CAUSAL, RAGGED, 65)
        shifted = Arguments(Ragged(later(x.data), x.offsets), weights, map_arrays(state, later))
        assert shifted.x.data.data_ptr() % 16 == 2 * places
        equal(run(shifted), run(Arguments(x, weights, state)))
        for form in (OF_VECTORS, OF_TABLES):
            x, weights, _ = made(form, RAGGED, 65)
            equal(run(Arguments(x, map_arrays(weights, later), None)), run(Arguments(x, weights, None)))


@pytest.mark.parametrize("form", [CENTRED, STRIDED, OF_VECTORS, OF_TABLES], ids=str)
def test_ids_and_offsets_may_be_int32_or_int64(form: Form) -> None:
    x, weights, state = made(form, RAGGED, 65)
    with in_shape():
        expected = run(Arguments(x, weights, state))
        for wide in (Ragged(x.data, x.offsets.long()), Ragged(x.data.long() if form.takes_ids else x.data, x.offsets)):
            equal(run(Arguments(wide, weights, state)), expected)


# Text CNNs.

WIDTHS = (5, 1, 3, 3, 5, 1, 1, 5, 3)
MAPS = (40, 1, 65, 3, 130, 64, 8, 100, 33)


def text(
    ids: str, lengths: Sequence[int], widths: int, *, labels: int = 0, dtype: torch.dtype = HALF, padding: int = 0
) -> TextCNN:
    """Return a problem on the CPU."""
    maker = Maker(40)
    made = maker.text_cnn(lengths, WIDTHS[:widths], MAPS[:widths], ids=ids, labels=labels, left=padding, right=padding)
    return made.map_arrays(lambda array: array.to(dtype) if array.is_floating_point() else array)


@every_way_in
@pytest.mark.parametrize("widths", [1, 2, 3, BANKS, BANKS + 1])
def test_text_cnn_agrees_with_the_reference(ids: str, widths: int) -> None:
    for lengths, labels in ((RAGGED, 6), (RAGGED, 0), ([0, 0], 6), ([], 6), ([1], 0), ([300, 2], 33)):
        problem = text(ids, lengths, widths, labels=labels)
        there = problem.map_arrays(Tensor.cuda)
        with in_shape():
            encoded = there.run(backend=BACKEND)
            assert (encoded.steps, encoded.last, encoded.mean, encoded.state) == (None,) * 4
            assert (encoded.scores is not None) == bool(labels)
            alike(encoded, problem.exact(), SUMS if encoded.scores is None else TOLERANCE[HALF])
            equal(there.run(backend=BACKEND), encoded)


@every_way_in
@pytest.mark.parametrize("padding", [0, 4])
def test_text_cnn_of_many_rows_in_bfloat16(ids: str, padding: int) -> None:
    problem = text(ids, [*MANY, 70, *RAGGED], 3, labels=6, dtype=torch.bfloat16, padding=padding)
    encoded = problem.map_arrays(Tensor.cuda).run(backend=BACKEND)
    alike(encoded, problem.exact(), TOLERANCE[torch.bfloat16])


@every_way_in
def test_text_cnn_with_stride_agrees_with_the_reference(ids: str) -> None:
    """Each width has a different number of windows."""
    for widths in ((5, 1, 3), (1, 5, 3)):
        made = Maker(40).text_cnn([*RAGGED, *[1] * 9, *[2] * 9], widths, (40, 3, 65), ids=ids, stride=2)
        problem = made.map_arrays(lambda array: array.half() if array.is_floating_point() else array)
        with in_shape():
            alike(problem.map_arrays(Tensor.cuda).run(backend=BACKEND), problem.exact(), SUMS)


@every_way_in
def test_text_cnn_is_bit_equal_to_its_layers_one_by_one(ids: str) -> None:
    problem = text(ids, [*RAGGED, 300], BANKS).map_arrays(Tensor.cuda)
    with in_shape():
        together = problem.run(backend=BACKEND).max
        alone = [conv(problem.x, layer, want=MAXIMUM, backend=BACKEND).max for layer in problem.layers]
    assert together is not None
    assert torch.equal(together, torch.cat([maxima for maxima in alone if maxima is not None], dim=1))


@every_way_in
def test_text_cnn_takes_int32_and_int64(ids: str) -> None:
    x, layers, classifier = problem = text(ids, RAGGED, 3, labels=6).map_arrays(Tensor.cuda)
    with in_shape():
        expected = problem.run(backend=BACKEND)
        for wide in (Ragged(x.data, x.offsets.long()), Ragged(x.data.long() if ids else x.data, x.offsets)):
            equal(text_cnn(wide, layers, classifier, backend=BACKEND), expected)


@every_way_in
def test_text_cnn_row_is_bit_equal_alone_and_in_a_batch(ids: str) -> None:
    problem = text(ids, [*RAGGED, 300], 3).map_arrays(Tensor.cuda)
    with in_shape():
        whole = problem.run(backend=BACKEND).max
        assert whole is not None
        for row, data in enumerate(inputs.rows(problem.x)):
            alone = problem._replace(x=joined([data])).run(backend=BACKEND).max
            assert alone is not None
            assert torch.equal(alone[0], whole[row])


def test_classifier_in_another_dtype_is_a_separate_product() -> None:
    problem = text("tables", RAGGED, 3, labels=6).map_arrays(Tensor.cuda)
    assert problem.classifier is not None
    wide = problem._replace(classifier=(problem.classifier[0].float(), problem.classifier[1].float()))
    alike(wide.run(backend=BACKEND), problem.run(backend=BACKEND), SUMS)


# Stacks.


def tcn(maker: Maker) -> tuple[ConvBlock, ...]:
    return maker.tcn([40, 33, 33], width=3)


def gated(maker: Maker) -> tuple[ConvBlock, ...]:
    """A plain block, then a block with a residual and an activation after it."""
    first = maker.causal(50, 3, activation="glu")
    inner = maker.causal(33, 3, dilation=4, activation="gated_tanh"), maker.layer(50, 1)
    return ConvBlock((first,)), ConvBlock(inner, residual=True, activation="gelu"), ConvBlock((maker.causal(3, 3),))


def centred(maker: Maker) -> tuple[ConvBlock, ...]:
    """A centred layer below a causal layer. The needed steps of the causal layer are not adjacent."""
    first = maker.layer(64, 3, left=1, right=1, activation="relu")
    second = maker.layer(40, 3, left=1, right=3, dilation=2, activation="gelu")
    return ConvBlock((first, second), residual=True), ConvBlock((maker.causal(5, 3, dilation=2, activation="relu"),))


def strided(maker: Maker) -> tuple[ConvBlock, ...]:
    """A block with fewer output steps than input steps, then a block with a residual."""
    first = ConvBlock((maker.layer(64, 3, left=1, stride=2), maker.layer(40, 3, activation="relu")))
    return first, ConvBlock((maker.causal(40, 3, activation="relu"),), residual=True, activation="relu")


def embedding(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(40, 3, ids="embedding", activation="relu"),)), *maker.tcn([40, 3], width=3)


def tables(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(40, 3, ids="tables", activation="relu"),)), *maker.tcn([40, 3], width=3)


def gated_tables(maker: Maker) -> tuple[ConvBlock, ...]:
    """A gated layer over tables, which no kernel supports."""
    return (ConvBlock((maker.causal(40, 3, ids="tables", activation="glu"), maker.causal(3, 3))),)


Make = Callable[[Maker], tuple[ConvBlock, ...]]
KEEP_STEPS: list[Make] = [tcn, gated, centred, embedding, tables]
OF_IDS: list[Make] = [embedding, tables, gated_tables]


def halves(problem: Stack, dtype: torch.dtype = HALF) -> Stack:
    return problem.map_arrays(lambda array: array.to(dtype) if array.is_floating_point() else array)


def stacked(make: Make, lengths: Sequence[int], *, states: bool = False, dtype: torch.dtype = HALF) -> Stack:
    """Return a problem on the CPU."""
    maker = Maker(40)
    return halves(maker.stack(lengths, *make(maker), with_states=states), dtype)


def fused(problem: Stack, want: Outputs = EVERYTHING) -> Encoded:
    with in_shape():
        return problem.run(want=want, backend=BACKEND)


@pytest.mark.parametrize("make", [*KEEP_STEPS, strided, gated_tables])
@pytest.mark.parametrize("want", [EVERYTHING, LAST, MAXIMUM], ids=["everything", "last", "max"])
def test_stack_agrees_with_the_reference(make: Make, want: Outputs) -> None:
    for lengths in (LONGER, [0, 0], [], [1]):
        problem = stacked(make, lengths)
        there = problem.map_arrays(Tensor.cuda)
        encoded, expected = fused(there, want), problem.exact(want)
        assert everything(encoded).keys() == everything(expected).keys()
        assert encoded.state is None
        alike(encoded, expected, TOLERANCE[HALF])
        equal(fused(there, want), encoded)


def test_stack_agrees_with_the_reference_in_bfloat16() -> None:
    problem = stacked(tcn, LONGER, dtype=torch.bfloat16)
    alike(fused(problem.map_arrays(Tensor.cuda)), problem.exact(), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("make", [tcn, gated, centred, strided])
def test_stack_with_states_agrees_with_the_reference(make: Make) -> None:
    for lengths in (LONGER, [0, 0], []):
        problem = stacked(make, lengths, states=True)
        encoded, expected = fused(problem.map_arrays(Tensor.cuda)), problem.exact()
        assert everything(encoded).keys() == everything(expected).keys()
        alike(encoded, expected, TOLERANCE[HALF])


@pytest.mark.parametrize("make", KEEP_STEPS)
def test_last_step_alone_equals_the_last_of_all_steps(make: Make) -> None:
    problem = stacked(make, [*LONGER, *MANY[:20]]).map_arrays(Tensor.cuda)
    last_alone, last_of_all = fused(problem, LAST).last, fused(problem).last
    assert last_alone is not None and last_of_all is not None
    close(last_alone, last_of_all, SUMS, "last")


@pytest.mark.parametrize("make", [tcn, centred])
def test_stack_row_is_bit_equal_alone_and_in_a_batch(make: Make) -> None:
    problem = stacked(make, [3, 141, 0, 8, *[5] * 10, 200]).map_arrays(Tensor.cuda)
    for want in (EVERYTHING, LAST):
        whole = everything(fused(problem, want))
        for row in (0, 1, 2, 9):
            alone = everything(fused(problem._replace(x=joined([inputs.rows(problem.x)[row]])), want))
            assert all(torch.equal(alone[name][0], whole[name][row]) for name in alone.keys() - {"steps"})


@pytest.mark.parametrize("make", [tcn, gated])
@pytest.mark.parametrize("places", [0, 20], ids=["by row", "in slots"])
def test_stack_chunks_are_bit_equal_to_the_whole_row(make: Make, places: int) -> None:
    problem = stacked(make, [3, 41, 0, 8, 19, 12], states=True).map_arrays(Tensor.cuda)
    whole, states = fused(problem), problem.states
    slots = torch.tensor([7, 3, 19, 0, 5, 1], device=problem.x.data.device)
    assert states is not None and whole.steps is not None
    if places:
        states = tuple(put_in_slots(state, slots, places) for state in states)
    steps: list[list[Tensor]] = [[] for _ in range(problem.x.rows)]
    for begin, end in ((0, 1), (1, 4), (4, 4), (4, 20), (20, 41)):
        chunk = joined([row[begin:end] for row in inputs.rows(problem.x)])
        encoded = fused(Stack(chunk, problem.blocks, states))
        states = encoded.state
        for so_far, part in zip(steps, inputs.steps_by_row(encoded, chunk), strict=True):
            so_far.append(part)
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole.steps)
    assert states is not None
    for carried, expected in zip(states, whole.state, strict=True):
        assert torch.equal(carried.by_row().left, expected.left)


def test_stack_leaves_unused_slots_untouched() -> None:
    problem = stacked(gated, [4, 0, 2], states=True).map_arrays(Tensor.cuda)
    assert problem.states is not None
    slots = torch.tensor([3, 0, 4], device=problem.x.data.device)
    slabs = tuple(put_in_slots(state, slots, 6) for state in problem.states)
    expected, encoded = fused(problem), fused(problem._replace(states=slabs))
    assert all(after is slab for after, slab in zip(encoded.state, slabs, strict=True))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    assert all(bool((slab.left[[1, 2, 5]] == 9).all()) for slab in slabs)


@pytest.mark.parametrize("make", [tcn, gated])
def test_stack_rows_share_the_zero_and_scrap_slots(make: Make) -> None:
    problem = stacked(make, [3, 41, 0, 8, 19, 1, 12], states=True).map_arrays(Tensor.cuda)
    slabs = tuple(map(caches_with_zero_slot, problem.states or ()))
    whole = fused(problem._replace(states=tuple(map_arrays(state, torch.zeros_like) for state in problem.states or ())))
    steps, after = run_from_slot_to_slot(
        lambda chunk, states: fused(Stack(chunk, problem.blocks, states)), in_chunks(problem.x, chunks=4), slabs
    )
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    for carried, expected, slab in zip(after, whole.state, slabs, strict=True):
        assert torch.equal(carried.left, expected.left)
        assert_reserved_slots_unchanged(slab)


@pytest.mark.parametrize("make", [tcn, centred])
@pytest.mark.parametrize("want", [EVERYTHING, LAST], ids=["everything", "last"])
def test_nan_stays_in_its_row_of_a_stack(make: Make, want: Outputs) -> None:
    problem = stacked(make, [4, 2, 0, 70, 7, 1]).map_arrays(Tensor.cuda)
    data = problem.x.data.clone()
    data[4:6] = torch.nan
    clean, encoded = fused(problem, want), fused(problem._replace(x=Ragged(data, problem.x.offsets)), want)
    assert clean.last is not None and encoded.last is not None
    others = [0, 2, 3, 4, 5]
    assert torch.equal(encoded.last[others], clean.last[others])
    assert encoded.last[1].isnan().any()


# Graphs and device waits.


def captured(launch: Callable[[], Encoded]) -> tuple[torch.cuda.CUDAGraph, Encoded]:
    launch()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = launch()
    return graph, encoded


def assert_replays(x: Ragged, others: Sequence[Ragged], run: Callable[[Ragged], Encoded]) -> None:
    """Replay the captured graph with other rows of the same total length, and compare with a direct run."""
    graph, encoded = captured(lambda: run(Ragged(x.data, x.offsets)))
    for batch in others:
        x.data.copy_(batch.data)
        x.offsets.copy_(batch.offsets)
        graph.replay()
        equal(encoded, run(Ragged(batch.data.clone(), batch.offsets.clone())))


BEFORE, AFTER = [5, 9, 0, 330], [20, 301, 17, 6]


@pytest.mark.parametrize(
    "form, want",
    [(UNPADDED, MAXIMUM), (GATED, EVERYTHING), (GATED, LAST), (OF_VECTORS, MAXIMUM), (OF_TABLES, EVERYTHING)],
    ids=str,
)
def test_graph_replays_with_other_lengths_and_values(form: Form, want: Outputs) -> None:
    first, second = made(form, BEFORE, 40), made(form, AFTER, 40, seed=1)
    x = Ragged(first.x.data.clone(), first.x.offsets.clone())
    with in_shape():
        assert_replays(x, (first.x, second.x), lambda x: run(Arguments(x, first.weights, None), want))


@every_way_in
def test_text_cnn_graph_replays_with_other_lengths(ids: str) -> None:
    problem, changed = (text(ids, lengths, 3, labels=6).map_arrays(Tensor.cuda) for lengths in (BEFORE, AFTER))
    x = Ragged(problem.x.data.clone(), problem.x.offsets.clone())
    with in_shape():
        assert_replays(x, (problem.x, changed.x), lambda x: text_cnn(x, problem.layers, problem.classifier, backend=BACKEND))


@pytest.mark.parametrize("make", [tcn, embedding, tables])
def test_stack_graph_replays_with_other_lengths(make: Make) -> None:
    problem, changed = (stacked(make, lengths).map_arrays(Tensor.cuda) for lengths in (BEFORE, AFTER))
    x = Ragged(problem.x.data.clone(), problem.x.offsets.clone())
    assert_replays(x, (problem.x, changed.x), lambda x: fused(problem._replace(x=x)))


def test_graph_replays_with_other_slots() -> None:
    """Each replay resumes from the states that the previous replay wrote."""
    problem = stacked(tcn, BEFORE, states=True).map_arrays(Tensor.cuda)
    assert problem.states is not None
    slots = torch.tensor([3, 1, 0, 2], dtype=torch.int32).cuda()
    slabs = tuple(put_in_slots(state, slots, 5) for state in problem.states)
    copies = tuple(map_arrays(slab, torch.clone) for slab in slabs)
    graph, encoded = captured(lambda: fused(problem._replace(states=slabs)))
    for slab, beginning in zip(slabs, copies, strict=True):
        slab.left.copy_(beginning.left)
    for order in ([3, 1, 0, 2], [2, 0, 4, 1]):
        slots.copy_(torch.tensor(order, dtype=torch.int32))
        copies = tuple(replace(state, slots=slots.clone()) for state in copies)
        graph.replay()
        expected = fused(problem._replace(states=copies))
        assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
        assert all(torch.equal(slab.left, state.left) for slab, state in zip(slabs, copies, strict=True))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_graph_replays_with_other_sources(index: torch.dtype) -> None:
    """The first replay reads one shared source, the second writes one shared slot."""
    first, second = (stacked(tcn, lengths, states=True).map_arrays(Tensor.cuda) for lengths in ([5, 9, 0, 30], [20, 0, 18, 6]))
    x = Ragged(first.x.data.clone(), first.x.offsets.clone())
    slots, sources = torch.tensor([[3, 4, 5, 6], [ZERO_SLOT] * 4], dtype=index, device=x.data.device)
    begun, middle = tuple(map(caches_with_zero_slot, first.states or ())), [5, 3, 2, 7]
    slabs = with_slots(begun, slots=slots, sources=sources)
    graph, encoded = captured(lambda: fused(Stack(x, first.blocks, slabs)))
    states = tuple(map_arrays(state, torch.zeros_like) for state in first.states or ())
    for problem, origins, ends in ((first, [ZERO_SLOT] * 4, middle), (second, middle, [SCRAP_SLOT] * 4)):
        x.data.copy_(problem.x.data)
        x.offsets.copy_(problem.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        graph.replay()
        expected = fused(Stack(problem.x, first.blocks, states))
        assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
        states = expected.state if ends == middle else states
        for slab, state in zip(begun, states, strict=True):
            assert torch.equal(slab.left[middle], state.left)
            assert_reserved_slots_unchanged(slab)


def test_stack_with_sources_does_not_wait_for_the_device() -> None:
    problem = stacked(tcn, LONGER, states=True).map_arrays(Tensor.cuda)
    slabs = tuple(map(with_shared_slots, problem.states or ()))
    expected = fused(problem._replace(states=slabs))
    with without_device_waits():
        encoded = fused(problem._replace(states=slabs))
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)


@pytest.mark.parametrize("form", [CENTRED, GATED, OF_VECTORS, OF_TABLES], ids=str)
def test_convolution_does_not_wait_for_the_device(form: Form) -> None:
    problem = made(form, RAGGED, 65)
    for want in (EVERYTHING, LAST, MAXIMUM):
        with in_shape():
            expected = run(problem, want)
            with without_device_waits():
                encoded = run(problem, want)
            equal(encoded, expected)


@every_way_in
def test_text_cnn_does_not_wait_for_the_device(ids: str) -> None:
    problem = text(ids, RAGGED, 3, labels=6).map_arrays(Tensor.cuda)
    with in_shape():
        expected = problem.run(backend=BACKEND)
        with without_device_waits():
            encoded = problem.run(backend=BACKEND)
    equal(encoded, expected)


@pytest.mark.parametrize("make", KEEP_STEPS)
def test_stack_does_not_wait_for_the_device(make: Make) -> None:
    problem = stacked(make, LONGER, states=make not in OF_IDS).map_arrays(Tensor.cuda)
    for arguments, want in ((problem, EVERYTHING), (problem._replace(states=None), LAST)):
        expected = fused(arguments, want)
        with without_device_waits():
            encoded = fused(arguments, want)
        equal(encoded, expected)


@pytest.mark.parametrize("made_by", [partial(made, UNPADDED), partial(made, STRIDED)], ids=["unpadded", "strided"])
def test_only_an_unknown_number_of_steps_waits(made_by: Callable[..., Arguments]) -> None:
    """The maximum alone does not need the number of steps."""
    problem = made_by(RAGGED, 40)
    relu = replace(problem.weights, activation="relu")
    with in_shape():
        expected = run(Arguments(problem.x, relu, problem.state))
        with without_device_waits():
            encoded = run(Arguments(problem.x, relu, problem.state), MAXIMUM)
        with without_device_waits(), pytest.raises(RuntimeError, match="synchroniz"):
            run(problem, STEPS)
    equal(encoded, expected)


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


# What runs.


def test_explain_reports_the_chosen_backend() -> None:
    for dtype, width in (("float16", 1), ("bfloat16", 300), ("float16", 5000)):
        assert explain("conv", device="cuda:0", dtype=dtype, hidden=width) == "fused: chosen"
    explained = partial(explain, "conv", hidden=96)
    wide = "fused: needs float16 or bfloat16 weights\ntables: needs float16 or bfloat16 weights\ncpu: runs on a CPU only\nframework: chosen"
    assert explained(device="cuda:0", dtype="float32") == wide
    for device, why in (("cuda:9", "this machine has no cuda:9"), ("cpu", "needs an NVIDIA GPU")):
        assert explained(device=device, dtype="float16").splitlines()[0] == f"fused: {why}"


def test_framework_runs_without_cupy_or_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = partial(explain, "conv", device="cuda:0", dtype="float16", hidden=96)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    refusals = "fused: needs compute capability 9.0, this device has 8.6\ntables: runs only folded tables"
    assert explained() == f"{refusals}\ncpu: runs on a CPU only\nframework: chosen"
    monkeypatch.setattr(launching, "cupy_installed", lambda: False)
    refusals = "fused: CuPy is not installed\ntables: CuPy is not installed"
    assert explained() == f"{refusals}\ncpu: runs on a CPU only\nframework: chosen"


def test_chosen_backend_is_the_one_that_runs() -> None:
    problem, blocks, texts = (
        made(CENTRED, [3, 4], 40),
        stacked(tcn, [3, 4]).map_arrays(Tensor.cuda),
        text("", [3, 4], 3).map_arrays(Tensor.cuda),
    )
    with in_shape():
        equal(conv(*problem, want=EVERYTHING), run(problem))
        equal(stack(*blocks, want=EVERYTHING), blocks.run(backend=BACKEND))
        equal(text_cnn(*texts), texts.run(backend=BACKEND))


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool: str) -> None:
    assert_no_findings(tool, "tests.gpu.small_conv")
