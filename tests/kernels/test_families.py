"""Tests of the promises of every backend of every kernel family, on odd sizes, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.backend import FAMILIES
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import FORMS, INT8_FORMS, Form, cpu_backends, runs_on_cpu
from tests.kernels.inputs import (
    OUTPUTS,
    Arguments,
    arrays,
    assert_close,
    assert_encodings_close,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    assert_states_close,
    caches_with_zero_slot,
    in_chunks,
    longest,
    map_arrays,
    put_in_slots,
    run_from_slot_to_slot,
    with_shared_slots,
)

HALVES = [torch.float16, torch.bfloat16]
SIZES = [
    ([1], 1, 1),
    ([7, 1, 3], 5, 3),
    ([1, 1, 1, 1], 7, 3),
    ([129, 0, 4, 151], 33, 7),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([0, 5, 5, 0, 2], 151, 37),
]
EVERY_FORM = [*FORMS, *INT8_FORMS]
WITH_GATES = [form for form in FORMS if form.takes_gates]
BIDIRECTIONAL = [form for form in EVERY_FORM if hasattr(form.module, "bidirectional")]
WITH_SLOTS = [form for form in EVERY_FORM if hasattr(form.arguments([1], 1, 1).state, "slots")]


def is_causal(form: Form) -> bool:
    """Return whether rows can be split into chunks: no step depends on a later step, and the family has a state."""
    _, weights, state = form.arguments([1], 1, 1)
    return form.family != "conv" or (state is not None and weights.left == weights.reach - 1 and weights.right == 0)


def on_every_backend(forms: list[Form]) -> pytest.MarkDecorator:
    """Run a test on the backends that accept a CPU. Only the compiled loops compute in int8."""
    floats = [form for form in forms if not form.int8]
    pairs = [(form, backend.name) for form in floats for backend in form.backends if runs_on_cpu(backend, form.variants)]
    pairs += [(form, "cpu") for form in forms if form.int8 and "cpu" in cpu_backends(form.family)]
    return pytest.mark.parametrize("form, backend", pairs, ids=str)


every_backend = on_every_backend(EVERY_FORM)
every_float_backend = on_every_backend(list(FORMS))
every_size = pytest.mark.parametrize("lengths, hidden, width", SIZES, ids=str)


def test_every_family_is_tested() -> None:
    assert {form.family for form in FORMS} == set(FAMILIES)


@every_float_backend
@every_size
def test_outputs_and_state_match_the_reference(form: Form, backend: str, lengths: list[int], hidden: int, width: int) -> None:
    arguments = form.arguments(lengths, hidden, width)
    assert_encodings_close(form.run(*arguments, backend=backend), form.exact(arguments), steps=longest(arguments.x))


@every_float_backend
@hypothesis.given(
    lengths=st.lists(st.integers(0, 17), max_size=5),
    hidden=st.integers(1, 19),
    width=st.integers(1, 19),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=10)
def test_any_size_matches_the_reference(
    form: Form, backend: str, lengths: list[int], hidden: int, width: int, seed: int
) -> None:
    arguments = form.arguments(lengths, hidden, width, seed=seed)
    expected = form.exact(arguments)
    hypothesis.assume(not form.normalises or keeps_rounding_small(form.run(*arguments, backend="reference"), expected))
    assert_encodings_close(form.run(*arguments, backend=backend), expected, steps=longest(arguments.x))


def keeps_rounding_small(single: Encoded, exact: Encoded) -> bool:
    """Return whether the reference in float32 is close to the exact outputs. A layer norm multiplies the rounding errors of values that are
    nearly equal."""
    assert single.steps is not None and exact.steps is not None
    pairs = [(single.steps, exact.steps), *zip(arrays(single.state).values(), arrays(exact.state).values(), strict=True)]
    return all(
        torch.allclose(array.double(), expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps) for array, expected in pairs
    )


@every_backend
def test_outputs_and_state_are_float32(form: Form, backend: str) -> None:
    encoded = form.run(*form.arguments([7, 1, 3], 5, 3), backend=backend)
    outputs = [getattr(encoded, name).dtype for name in OUTPUTS]
    states = [array.dtype for array in arrays(encoded.state).values() if array.is_floating_point()]
    assert {*outputs, *states} == {torch.float32}


@every_backend
def test_missing_state_means_zeros(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([7, 0, 3], 5, 3)
    zeros = map_arrays(state, torch.zeros_like)
    assert_encodings_close(form.run(x, weights, backend=backend), form.run(x, weights, zeros, backend=backend), steps=0)


@every_backend
def test_empty_row_keeps_its_state_and_pools_to_zero(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([3, 0, 1, 0], 5, 3)
    encoded = form.run(x, weights, state, backend=backend)
    hidden = getattr(state, "hidden", torch.zeros(4, 5))
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row in (1, 3):
        assert all(torch.equal(getattr(encoded.state, name)[row], array[row]) for name, array in arrays(state).items())
        assert torch.equal(encoded.last[row], hidden[row])
        assert not encoded.mean[row].any() and not encoded.max[row].any()
        assert not len(inputs.steps_by_row(encoded, x)[row])


@every_backend
def test_int32_and_int64_offsets_are_equivalent(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([7, 1, 3], 5, 3)
    wide = Ragged(x.data, x.offsets.long())
    expected = form.run(x, weights, state, backend=backend)
    assert_encodings_close(form.run(wide, weights, state, backend=backend), expected, steps=0)


@every_backend
def test_arrays_need_not_be_contiguous(form: Form, backend: str) -> None:
    arguments = form.arguments([7, 1, 3], 5, 3)
    sparse = arguments.map_arrays(lambda array: torch.stack((array, array), dim=-1)[..., 0])
    assert_encodings_close(form.run(*sparse, backend=backend), form.run(*arguments, backend=backend), steps=0)


@on_every_backend([form for form in EVERY_FORM if is_causal(form)])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_give_the_same_result_as_the_whole_row(form: Form, backend: str, seed: int) -> None:
    x, weights, state = form.arguments([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole = form.run(x, weights, state, backend=backend)
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    for chunk in in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed):
        encoded = form.run(chunk, weights, state, backend=backend)
        state = encoded.state
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=longest(x))
    assert_states_close(state, whole.state, steps=longest(x))


@every_backend
def test_row_encodes_the_same_alone_and_in_a_batch(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([9, 0, 31, 1, 9], 33, 7)
    batch = form.run(x, weights, state, backend=backend)
    for row, data in enumerate(inputs.rows(x)):
        row_state = map_arrays(state, itemgetter(slice(row, row + 1)))
        alone = form.run(inputs.joined([data]), weights, row_state, backend=backend)
        assert_encodings_close(alone, one_row(batch, x, row), steps=len(data))


@every_backend
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_in_other_rows_does_not_reach_a_row(form: Form, backend: str, poison: float) -> None:
    x, weights, state = form.arguments([3, 1, 0, 5, 2], 5, 3)
    clean = form.run(x, weights, state, backend=backend)
    for row in range(x.rows):
        others = torch.arange(x.rows) != row
        other_tokens = others.repeat_interleave(torch.diff(x.offsets))
        data = overwritten(x.data, where=other_tokens, by=poison)
        states = map_arrays(state, partial(overwritten, where=others, by=poison))
        encoded = form.run(Ragged(data, x.offsets), weights, states, backend=backend)
        assert_encodings_close(one_row(encoded, x, row), one_row(clean, x, row), steps=0)


def overwritten(array: Tensor, *, where: Tensor, by: float) -> Tensor:
    """Overwrite the entries `where` of the first axis; ids become 0."""
    return array.index_fill(0, where.nonzero()[:, 0], by if array.is_floating_point() else 0)


def one_row(encoded: Encoded, x: Ragged, row: int) -> Encoded:
    """Return the encoding of one row of `x`."""
    select = itemgetter(slice(row, row + 1))
    pooled: Encoded = map_arrays(replace(encoded, steps=None, offsets=None), select)
    return replace(pooled, state=map_arrays(encoded.state, select), steps=inputs.steps_by_row(encoded, x)[row])


@on_every_backend(WITH_GATES)
@pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 0], []], ids=str)
def test_gate_inputs_may_replace_inputs(form: Form, backend: str, lengths: list[int]) -> None:
    arguments = form.arguments(lengths, 33, 7)
    actual, expected = form.run(*form.gated(arguments), backend=backend), form.run(*arguments, backend=backend)
    if hasattr(expected.state, "left"):  # a layer of gate inputs has a window of one step
        assert actual.state.left.shape[1] == 0
        expected = replace(expected, state=replace(expected.state, left=actual.state.left))
    assert_encodings_close(actual, expected, steps=longest(arguments.x))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("storage", HALVES, ids=str)
def test_half_precision_on_a_cpu_is_computed_in_float32(form: Form, storage: torch.dtype) -> None:
    for lengths in ([13, 0, 4, 15], [0, 0], []):
        arguments = form.arguments(lengths, 33, 7, storage=storage)
        encoded = form.run(*arguments)
        assert {array.dtype for array in arrays(replace(encoded, offsets=None)).values()} == {torch.float32}
        assert_encodings_close(encoded, form.exact(arguments), steps=longest(arguments.x))


@every_backend
@pytest.mark.parametrize("requested", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "mean")], ids=str)
def test_unrequested_outputs_are_none_and_change_nothing(form: Form, backend: str, requested: tuple[str, ...]) -> None:
    arguments = form.arguments([7, 1, 3], 5, 3)
    everything = form.run(*arguments, backend=backend)
    expected = replace(everything, **{name: None for name in OUTPUTS if name not in requested})
    actual = form.run(*arguments, want=Outputs(**dict.fromkeys(requested, True)), backend=backend)
    assert_encodings_close(actual, expected, steps=0)


@every_backend
def test_arguments_are_not_modified(form: Form, backend: str) -> None:
    arguments = form.arguments([7, 1, 3], 5, 3)
    for call in [arguments, form.gated(arguments)] if form.takes_gates else [arguments]:
        before = call.map_arrays(torch.clone)
        form.run(*call, backend=backend)
        assert all(torch.equal(array, copy) for array, copy in zip(tensors(call), tensors(before), strict=True))


def tensors(arguments: Arguments) -> list[Tensor]:
    return [array for part in arguments for array in arrays(part).values()]


@on_every_backend([form for form in FORMS if form.takes_ids])
def test_int32_and_int64_ids_are_equivalent(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([7, 1, 0, 3], 5, 3)
    wide = Ragged(x.data.long(), x.offsets)
    expected = form.run(x, weights, state, backend=backend)
    assert_encodings_close(form.run(wide, weights, state, backend=backend), expected, steps=0)


@on_every_backend(WITH_SLOTS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_state_in_slots_is_read_and_written_in_place(form: Form, backend: str, index: torch.dtype) -> None:
    x, weights, state = form.arguments([4, 0, 2], 5, 3)
    expected = form.run(x, weights, state, backend=backend)
    caches = put_in_slots(state, torch.tensor([3, 0, 4], dtype=index), places=6)
    encoded = form.run(x, weights, caches, backend=backend)
    assert encoded.state is caches
    assert_encodings_close(replace(encoded, state=caches.by_row()), expected, steps=0)
    assert all(bool((cache[[1, 2, 5]] == 9).all()) for name, cache in arrays(caches).items() if name != "slots")


@on_every_backend([form for form in WITH_SLOTS if is_causal(form) and not form.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_rows_share_a_first_slot_and_a_last_slot(form: Form, backend: str, index: torch.dtype, seed: int) -> None:
    x, weights, state = form.arguments([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole, caches = form.run(x, weights, backend=backend), caches_with_zero_slot(state)
    run = partial(run_from, form, weights, backend)
    chunks = in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed)
    steps, after = run_from_slot_to_slot(run, chunks, caches, index)
    exact = form.exact(Arguments(x, weights, None)).steps
    assert whole.steps is not None and exact is not None
    assert_close(steps, whole.steps, steps=longest(x))
    assert_close(steps, exact, steps=longest(x))
    assert_states_close(after, whole.state, steps=longest(x))
    assert_reserved_slots_unchanged(caches)


def run_from(form: Form, weights: Any, backend: str, x: Ragged, state: Any) -> Encoded:
    return form.run(x, weights, state, backend=backend)


@on_every_backend(WITH_SLOTS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_rows_start_from_sources_and_write_to_slots(form: Form, backend: str, index: torch.dtype) -> None:
    x, weights, state = form.arguments([4, 0, 2, 3, 0, 0], 5, 3)
    caches = with_shared_slots(state, index)
    before = caches.by_row()
    assert before.slots is None and before.sources is None
    assert all(torch.equal(getattr(before, name), array[[0, 0, 2, 2, 4, 4]]) for name, array in arrays(state).items())
    expected, encoded = form.run(x, weights, before, backend=backend), form.run(x, weights, caches, backend=backend)
    assert_encodings_close(replace(encoded, state=expected.state), expected, steps=0)
    assert encoded.state.slots is caches.slots
    assert_shared_slots_result(encoded.state, state, expected.state)


@on_every_backend(BIDIRECTIONAL)
@pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 0], []], ids=str)
@pytest.mark.parametrize("with_states", [False, True])
def test_bidirectional_call_equals_two_calls(form: Form, backend: str, lengths: list[int], with_states: bool) -> None:
    x, weights, states = bidirectional_arguments(form, lengths)
    before = states if with_states else (None, None)
    forward = form.run(x, weights[0], before[0], backend=backend)
    backward = form.run(x.reversed(), weights[1], before[1], backend=backend)
    assert backward.steps is not None
    backward = replace(backward, steps=Ragged(backward.steps, x.offsets).reversed().data)
    encoded = form.bidirectional(x, weights, states if with_states else None, backend=backend)
    for name in OUTPUTS:
        expected = torch.cat((getattr(forward, name), getattr(backward, name)), dim=1)
        assert_close(getattr(encoded, name), expected, steps=longest(x))
    for after, alone in zip(encoded.state, (forward.state, backward.state), strict=True):
        assert_states_close(after, alone, steps=longest(x))


@on_every_backend(BIDIRECTIONAL)
def test_unrequested_bidirectional_outputs_are_none(form: Form, backend: str) -> None:
    x, weights, states = bidirectional_arguments(form, [7, 1, 3])
    everything = form.bidirectional(x, weights, states, backend=backend)
    for requested in OUTPUTS:
        encoded = form.bidirectional(x, weights, states, want=Outputs(**{requested: True}), backend=backend)
        assert torch.equal(getattr(encoded, requested), getattr(everything, requested))
        assert all(getattr(encoded, name) is None for name in OUTPUTS if name != requested)


@on_every_backend(BIDIRECTIONAL)
def test_each_direction_has_its_own_slots(form: Form, backend: str) -> None:
    x, weights, states = bidirectional_arguments(form, [4, 0, 2])
    expected = form.bidirectional(x, weights, states, backend=backend)
    slots = torch.tensor([3, 0, 4]), torch.tensor([5, 1, 2])
    caches = put_in_slots(states[0], slots[0], places=6), put_in_slots(states[1], slots[1], places=6)
    encoded = form.bidirectional(x, weights, caches, backend=backend)
    for name in OUTPUTS:
        assert_close(getattr(encoded, name), getattr(expected, name), steps=0)
    for after, cache, state in zip(encoded.state, caches, expected.state, strict=True):
        assert after is cache
        assert_states_close(cache.by_row(), state, steps=0)


@on_every_backend(BIDIRECTIONAL)
def test_each_direction_starts_from_its_sources(form: Form, backend: str) -> None:
    x, weights, states = bidirectional_arguments(form, [4, 0, 2, 3, 0, 0])
    caches = with_shared_slots(states[0]), with_shared_slots(states[1])
    expected = form.bidirectional(x, weights, (caches[0].by_row(), caches[1].by_row()), backend=backend)
    encoded = form.bidirectional(x, weights, caches, backend=backend)
    for name in OUTPUTS:
        assert_close(getattr(encoded, name), getattr(expected, name), steps=0)
    for after, state, expected_state in zip(encoded.state, states, expected.state, strict=True):
        assert_shared_slots_result(after, state, expected_state)


def bidirectional_arguments(form: Form, lengths: list[int]) -> tuple[Ragged, tuple[Any, Any], tuple[Any, Any]]:
    """Return rows, and the weights and states of both directions."""
    forward, backward = (form.arguments(lengths, 5, 3, seed=seed) for seed in (0, 1))
    return forward.x, (forward.weights, backward.weights), (forward.state, backward.state)
