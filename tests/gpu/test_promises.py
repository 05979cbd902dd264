"""Tests of the promises of every kernel on a GPU, whatever it computes: rows, chunks, slots, graphs and outputs; and of every form of every
family against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.activations import FUNCTIONS, Activation
from kernels.backend import AUTO, explain
from kernels.directions import compose_directions
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu import cases
from tests.gpu.cases import CASES, ONE_PRODUCT, TWO_PRODUCTS, Case, both, layer
from tests.gpu.comparisons import agree, exact, outputs, same, same_outputs, same_state
from tests.gpu.inputs import BFLOAT16, FLOAT32, HALF, RAGGED, TOLERANCE, begun_later, captured, joined, made, stored
from tests.kernels import inputs
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import EVERYTHING, OUTPUTS, Arguments, arrays, as_float64, map_arrays

pytestmark = pytest.mark.usefixtures("poisoned")

# Kernels are specialised by the number of inputs. All sizes except the last share a kernel.
SIZES: tuple[tuple[list[int], int, int], ...] = (
    ([1], 1, 1),
    ([7, 0, 3, 12], 33, 27),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([65, 129], 151, 303),
)
MIXED = [3, 41, 0, 8, 19, 63, 65, 128, *[5] * 90]
IN_SLOTS = (
    (RAGGED, torch.int32),
    ([9, 0, 0, 0], torch.int64),
    ([0, 0, 0, 0], torch.int32),
    ([63, 1, 65, 128, 0, 127], torch.int64),
    ([500, 0, 0, 0], torch.int32),
    ([*RAGGED * 30, 0, 0], torch.int64),
)
"""Lengths of rows, and the dtype of their slots."""
# The threshold is exact in each format: beside it, rounding decides between 0 and the value.
PARAMETERS: dict[str, tuple[float, ...]] = dict.fromkeys(("leaky_relu", "thresholded_relu", "elu"), (0.375,))
PARAMETERS |= dict.fromkeys(("hard_sigmoid", "scaled_tanh", "affine"), (1.2, 0.7))
SCANS = (
    *(Form("sru", version=version, tanh=tanh) for version in (1, 2) for tanh in (False, True)),
    *(Form("qrnn", pooling=pooling, window=1) for pooling in ("f", "fo", "ifo")),
)
GATE_FUNCTIONS = [
    *(layer(form, backend, 128) for form in ONE_PRODUCT for backend in ("cluster", "grid", "wide")),
    *(layer(form, "cluster", 128, storage=storage) for form in ONE_PRODUCT for storage in (FLOAT32, BFLOAT16)),
    *(layer(form, backend, 128) for form in TWO_PRODUCTS for backend in ("cluster", "grid")),
    *(layer(form, "fused", 72, storage=storage) for form in SCANS for storage in (HALF, FLOAT32)),
]
GATE_TOLERANCE = {FLOAT32: 2e-5, HALF: 3e-3, BFLOAT16: 1e-2}
"""Of one step: tanh is accurate to eleven bits in 16-bit layers."""


def each(*chosen: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=str)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("storage, data", [(FLOAT32, FLOAT32), (HALF, HALF), (HALF, FLOAT32), (BFLOAT16, BFLOAT16)], ids=str)
def test_outputs_and_state_match_the_reference(form: Form, storage: torch.dtype, data: torch.dtype) -> None:
    """The chosen backend gives the same bits again for the same batch."""
    for lengths, hidden, width in SIZES:
        arguments = stored(form.arguments(lengths, hidden, width, storage=storage), data)
        there = arguments.map_arrays(Tensor.cuda)
        actual, expected = form.run(*there), form.exact(arguments)
        assert outputs(actual).keys() == outputs(expected).keys()
        agree(actual, expected, TOLERANCE[storage])
        same(form.run(*there), actual)


@each(*GATE_FUNCTIONS)
def test_gate_functions_match_over_their_whole_range(case: Case) -> None:
    """After one step from random states, no sum over steps hides the error of a gate."""
    x, weights, states = case.make([1] * 64, seed=0)
    steep = Ragged((x.data * 3).clamp(-6, 6), x.offsets)
    assert case.form is not None
    encoded = case.run(steep, weights, states, want=EVERYTHING, backend=case.backend)
    agree(encoded, exact(case.form, Arguments(steep, weights, states[0])), GATE_TOLERANCE[x.data.dtype])


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("storage", TOLERANCE, ids=str)
def test_each_activation_matches_the_reference(kind: str, storage: torch.dtype) -> None:
    values = torch.linspace(-8, 8, 1001).to(storage)
    activation = Activation(kind, PARAMETERS.get(kind, ()))
    agreed = activation(values.cuda()).cpu().double()
    torch.testing.assert_close(agreed, activation(values.double()), rtol=TOLERANCE[storage], atol=TOLERANCE[storage])


@each(*(case for case in CASES if case.alone))
def test_row_has_the_same_bits_alone_and_in_a_batch(case: Case) -> None:
    layers = case.made(MIXED)
    whole = layers.encoded()
    for row in (0, 1, 2, 4, 60):
        x = joined([inputs.rows(layers.x)[row]])
        encoded = layers.run(x, tuple(map_arrays(state, itemgetter(slice(row, row + 1))) for state in layers.states))
        for name in outputs(encoded).keys() - {"steps", "scores"}:
            assert torch.equal(outputs(encoded)[name][0], outputs(whole)[name][row]), name
        if encoded.steps is not None:
            assert torch.equal(encoded.steps, inputs.steps_by_row(whole, layers.x)[row])


@each(*(case for case in CASES if case.causal))
def test_chunks_have_the_bits_of_whole_rows(case: Case) -> None:
    """The states move from slot to slot: all rows start from one, without a state before them, and end in one."""
    layers = case.made(MIXED)
    zeros = tuple(map_arrays(state, torch.zeros_like) for state in layers.states)
    whole = layers.run(layers.x, zeros)
    same(layers.run(layers.x, None), whole)
    for index in (torch.int32, torch.int64):
        caches = tuple(map(inputs.caches_with_zero_slot, layers.states))
        steps, after = inputs.run_from_slot_to_slot(layers.run, inputs.in_chunks(layers.x, chunks=4), caches, index)
        assert whole.steps is not None and torch.equal(steps, whole.steps)
        for state, expected, cache in zip(after, whole.state, caches, strict=True):
            same_state(state, expected)
            inputs.assert_reserved_slots_unchanged(cache)


def wider(state: Any, index: torch.dtype) -> Any:
    """Return the inputs before a convolution in float32 if the slots are int64: a kernel does not write into such state caches."""
    return map_arrays(state, lambda array: array.float() if index is torch.int64 and array.dtype is HALF else array)


@each(*(case for case in CASES if case.stateful))
def test_states_are_read_from_slots_and_written_to_slots(case: Case) -> None:
    """Rows update their own slot. Each layer has its own slots. Chunks above move their states from slot to slot."""
    for lengths, index in IN_SLOTS:
        layers = case.made(lengths)
        chance, places = torch.Generator().manual_seed(1), len(lengths) + 9
        orders = [torch.randperm(places, generator=chance)[: len(lengths)].to("cuda", index) for _ in layers.states]
        pairs = list(zip(layers.states, orders, strict=True))
        own = tuple(inputs.put_in_slots(wider(state, index), slots, places) for state, slots in pairs)
        expected, encoded = layers.encoded(), layers.run(layers.x, own)
        same_outputs(encoded, expected)
        for cache, slots, by_row in zip(own, orders, expected.state, strict=True):
            same_state(cache.by_row(), by_row)
            others = torch.ones(places, dtype=torch.bool, device="cuda").index_fill(0, slots.long(), False)
            assert all(bool((array[others] == 9).all()) for name, array in arrays(cache).items() if name != "slots")


@each(*(case for case in CASES if case is not cases.WAITS))
def test_graph_serves_other_lengths_slots_and_values(case: Case) -> None:
    """First all rows start from one slot, then all rows write one slot. Nothing waits for the device, which a graph does not permit."""
    layers, other = case.made([5, 9, 0, 30]), case.made([20, 0, 18, 6], seed=1)
    x = Ragged(torch.zeros_like(layers.x.data), layers.x.offsets.clone())
    slots, sources = torch.tensor([[3, 4, 5, 6], [inputs.ZERO_SLOT] * 4], dtype=torch.int32, device="cuda")
    begun = tuple(map(inputs.caches_with_zero_slot, layers.states))
    caches = tuple(replace(cache, slots=slots, sources=sources) for cache in begun)
    replay, encoded = captured(lambda: layers.run(x, caches))
    states = tuple(map_arrays(state, torch.zeros_like) for state in layers.states)
    middle = [5, 3, 2, 7]
    for batch, origins, ends in ((layers.x, [inputs.ZERO_SLOT] * 4, middle), (other.x, middle, [inputs.SCRAP_SLOT] * 4)):
        x.data.copy_(batch.data)
        x.offsets.copy_(batch.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        replay()
        expected = layers.run(Ragged(batch.data.clone(), batch.offsets.clone()), states)
        same_outputs(encoded, expected)
        states = expected.state if ends == middle else states
        for cache, state in zip(begun, states, strict=True):
            same_state(map_arrays(cache, itemgetter(middle)), state)
            inputs.assert_reserved_slots_unchanged(cache)


@each(*CASES)
def test_nan_stays_in_its_row(case: Case) -> None:
    layers = case.made([4, 2, 0, 7, 7, 1, 3, 5, 6])
    data, states = layers.x.data.clone(), tuple(map_arrays(state, torch.clone) for state in layers.states)
    of_ids = not data.is_floating_point()
    if not of_ids:
        data[4:6], data[-3:] = torch.nan, torch.nan
    for array in (array for state in states for array in arrays(state).values() if array.is_floating_point()):
        array[1], array[3] = torch.inf, torch.nan
    clean, encoded = outputs(layers.encoded()), outputs(layers.run(Ragged(data, layers.x.offsets), states))
    for name in clean.keys() - {"steps"}:
        assert torch.equal(encoded[name][[0, 2, 4, 5, 6, 7]], clean[name][[0, 2, 4, 5, 6, 7]]), name
    for name in ("last", "cell 0"):
        assert of_ids or name not in encoded or not encoded[name][8].isfinite().any(), name
    assert not of_ids or "cell 0" not in encoded or encoded["cell 0"][3].isnan().all()


@each(*(case for case in CASES if case not in [*cases.DIVIDED, *cases.STACKS, *cases.TEXTS]))
def test_unrequested_outputs_are_none_and_change_nothing(case: Case) -> None:
    layers = case.made(RAGGED)
    everything = layers.encoded(EVERYTHING)
    for names in ((), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")):
        encoded = layers.encoded(Outputs(**dict.fromkeys(names, True)))
        assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(names)
        same(encoded, everything)


@each(*(case for case in cases.LAYERS if case.form is not None and not case.form.takes_ids))
def test_gate_inputs_may_have_any_dtype_and_address(case: Case) -> None:
    layers = case.made(RAGGED)
    assert case.form is not None
    for data in (HALF, FLOAT32, BFLOAT16):
        x = Ragged(layers.x.data.to(data), layers.x.offsets)
        encoded, [state] = layers.run(x, layers.states), layers.states
        expected = exact(case.form, Arguments(x, layers.weights, state))
        agree(encoded, replace(expected, state=(expected.state,)), TOLERANCE[HALF])
        for places in (1, 4):
            shifted = begun_later(x.data, places)
            assert shifted.data_ptr() % 16 == places * shifted.element_size() % 16
            same(layers.run(Ragged(shifted, x.offsets), layers.states), encoded)


@each(*CASES)
def test_batch_without_rows_has_empty_outputs(case: Case) -> None:
    found = outputs(case.made([]).encoded())
    assert found and all(len(array) == 0 for array in found.values())


@each(*cases.CONVOLUTIONS)
def test_ids_and_offsets_may_be_int32_or_int64(case: Case) -> None:
    layers = case.made(RAGGED)
    x, expected = layers.x, layers.encoded()
    for wide in (
        Ragged(x.data, x.offsets.long()),
        Ragged(x.data.long() if case.form and case.form.takes_ids else x.data, x.offsets),
    ):
        same(layers.run(wide, layers.states), expected)


@each(
    *cases.DIRECTIONS,
    *(
        both(form, backend, hidden)
        for form in ONE_PRODUCT
        for backend, hidden in (("cluster", 512), ("grid", 513), ("grid", 2048), ("persistent", 72), ("persistent", 600))
    ),
    *(both(form, backend, hidden) for form in TWO_PRODUCTS[:2] for backend, hidden in (("cluster", 256), ("grid", 2048))),
    *(both(form, "cluster", hidden, storage=FLOAT32) for form in ONE_PRODUCT for hidden in (33, 512)),
)
@pytest.mark.parametrize("rows", [11, 700])
def test_each_direction_has_the_bits_that_it_has_alone(case: Case, rows: int) -> None:
    layers = case.made((RAGGED * 64)[:rows])
    assert case.form is not None
    run = compose_directions(partial(case.form.run, backend=case.backend))
    for states in (layers.states, None):
        same(layers.run(layers.x, states), run(layers.x, layers.weights, states, want=EVERYTHING))


@pytest.mark.parametrize("form", [*ONE_PRODUCT, Form("lstm", ids=True), Form("gru", reset="after", ids=True)], ids=str)
def test_products_of_both_directions_match_the_reference(form: Form) -> None:
    """The input products of both directions are one product."""
    sides = [made(form, RAGGED, 256, seed=seed) for seed in (0, 1)]

    def run(sides: Sequence[Arguments], backend: str) -> Encoded:
        (x, *forward), (_, *backward) = sides
        weights, states = zip(forward, backward, strict=True)
        return form.bidirectional(x, weights, states, backend=backend)

    agree(run(sides, AUTO), run([as_float64(side) for side in sides], "reference"), TOLERANCE[HALF])


@pytest.mark.parametrize(
    "family, dtype, hidden, chosen",
    [
        ("lstm", "float16", 512, "adaptive: chosen (clusters of 16 blocks"),
        ("lstm", "bfloat16", 1000, "adaptive: chosen (the grid"),
        ("lstm", "float16", 1024, "adaptive: chosen (the grid"),
        ("lstm", "float32", 512, "adaptive: chosen (clusters of 16 blocks"),
        ("lstm", "float32", 1024, "adaptive: chosen (one product a step)"),
        ("lstm", "float32", 1001, "framework: chosen"),
        ("gru", "float16", 512, "adaptive: chosen (clusters of"),
        ("sru", "bfloat16", 5000, "fused: chosen (with the product of its inputs)"),
        ("qrnn", "float32", 512, "fused: chosen (after a library product)"),
        ("conv", "bfloat16", 300, "fused: chosen"),
        ("conv", "float32", 96, "framework: chosen"),
    ],
)
def test_kernels_are_chosen_for_this_device(family: str, dtype: str, hidden: int, chosen: str) -> None:
    explained = explain(family, device="cuda:0", dtype=dtype, hidden=hidden).splitlines()
    assert explained[-1].startswith(chosen)


@pytest.mark.parametrize("form", [*ONE_PRODUCT, *TWO_PRODUCTS, *cases.SCANS, cases.CENTRED, cases.OF_TABLES], ids=str)
def test_layer_runs_in_a_fused_kernel(form: Form) -> None:
    chosen = form.module.choice(made(form, [1], 192).weights).backend
    gated = "persistent" if form.options.get("projection") else "adaptive"
    assert chosen.name == (gated if form.family in ("lstm", "gru") else "fused")
