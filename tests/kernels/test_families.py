"""What every backend of every kernel family promises, on odd sizes, against the reference in float64."""

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
from kernels.contract import Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import FORMS, Form, runs_on_a_cpu
from tests.kernels.inputs import (
    OUTPUTS,
    Given,
    arrays,
    assert_close,
    assert_encodes_alike,
    assert_only_slots_were_written,
    assert_states_alike,
    assert_went_on_from_shared_places,
    begun_in_zeros,
    from_place_to_place,
    from_shared_places,
    in_chunks,
    in_slots,
    longest,
    mapped,
)

HALVES = [torch.float16, torch.bfloat16]
SIZES = [
    ([1], 1, 1),
    ([7, 1, 3], 5, 3),
    ([129, 0, 4, 151], 33, 7),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([0, 5, 5, 0, 2], 151, 37),
]
WITH_GATES = [form for form in FORMS if form.takes_gates]
WITH_BOTH = [form for form in FORMS if hasattr(form.module, "both")]
WITH_SLOTS = [form for form in FORMS if hasattr(form.given([1], 1, 1).state, "slots")]


def is_causal(form: Form) -> bool:
    """Whether no step waits for a later one and a state is kept, so that rows can be cut."""
    _, weights, state = form.given([1], 1, 1)
    return form.family != "conv" or (state is not None and weights.left == weights.reach - 1 and weights.right == 0)


def on_every_backend(forms: list[Form]) -> pytest.MarkDecorator:
    pairs = [(form, backend.name) for form in forms for backend in form.backends if runs_on_a_cpu(backend)]
    return pytest.mark.parametrize("form, backend", pairs, ids=str)


every_backend = on_every_backend(list(FORMS))
every_size = pytest.mark.parametrize("lengths, hidden, width", SIZES, ids=str)


def test_every_family_is_tested_here() -> None:
    assert {form.family for form in FORMS} == set(FAMILIES)


@every_backend
@every_size
def test_all_outputs_and_the_state_agree_with_the_reference(
    form: Form, backend: str, lengths: list[int], hidden: int, width: int
) -> None:
    given = form.given(lengths, hidden, width)
    assert_encodes_alike(form.run(*given, backend=backend), form.exact(given), steps=longest(given.x))


@every_backend
@hypothesis.given(
    lengths=st.lists(st.integers(0, 17), max_size=5),
    hidden=st.integers(1, 19),
    width=st.integers(1, 19),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_any_size_agrees_with_the_reference(
    form: Form, backend: str, lengths: list[int], hidden: int, width: int, seed: int
) -> None:
    given = form.given(lengths, hidden, width, seed=seed)
    assert_encodes_alike(form.run(*given, backend=backend), form.exact(given), steps=longest(given.x))


@every_backend
def test_all_that_comes_out_is_float32(form: Form, backend: str) -> None:
    encoded = form.run(*form.given([7, 1, 3], 5, 3), backend=backend)
    outputs = [getattr(encoded, name).dtype for name in OUTPUTS]
    states = [array.dtype for array in arrays(encoded.state).values() if array.is_floating_point()]
    assert {*outputs, *states} == {torch.float32}


@every_backend
def test_without_a_state_every_row_starts_from_zeros(form: Form, backend: str) -> None:
    x, weights, state = form.given([7, 0, 3], 5, 3)
    zeros = mapped(state, torch.zeros_like)
    assert_encodes_alike(form.run(x, weights, backend=backend), form.run(x, weights, zeros, backend=backend), steps=0)


@every_backend
def test_a_row_without_steps_keeps_its_state_and_pools_to_zero(form: Form, backend: str) -> None:
    x, weights, state = form.given([3, 0, 1, 0], 5, 3)
    encoded = form.run(x, weights, state, backend=backend)
    hidden = getattr(state, "hidden", torch.zeros(4, 5))
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row in (1, 3):
        assert all(torch.equal(getattr(encoded.state, name)[row], array[row]) for name, array in arrays(state).items())
        assert torch.equal(encoded.last[row], hidden[row])
        assert not encoded.mean[row].any() and not encoded.max[row].any()
        assert not len(inputs.steps_by_row(encoded, x)[row])


@every_backend
def test_int32_and_int64_offsets_mean_the_same(form: Form, backend: str) -> None:
    x, weights, state = form.given([7, 1, 3], 5, 3)
    wide = Ragged(x.data, x.offsets.long())
    expected = form.run(x, weights, state, backend=backend)
    assert_encodes_alike(form.run(wide, weights, state, backend=backend), expected, steps=0)


@every_backend
def test_arrays_need_not_be_contiguous(form: Form, backend: str) -> None:
    given = form.given([7, 1, 3], 5, 3)
    sparse = given.mapped(lambda array: torch.stack((array, array), dim=-1)[..., 0])
    assert_encodes_alike(form.run(*sparse, backend=backend), form.run(*given, backend=backend), steps=0)


@on_every_backend([form for form in FORMS if is_causal(form)])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_that_carry_the_state_give_the_whole(form: Form, backend: str, seed: int) -> None:
    x, weights, state = form.given([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole = form.run(x, weights, state, backend=backend)
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    for chunk in in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed):
        encoded = form.run(chunk, weights, state, backend=backend)
        state = encoded.state
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=longest(x))
    assert_states_alike(state, whole.state, steps=longest(x))


@every_backend
def test_a_row_encodes_the_same_alone_and_in_any_batch(form: Form, backend: str) -> None:
    x, weights, state = form.given([9, 0, 31, 1, 9], 33, 7)
    together = form.run(x, weights, state, backend=backend)
    for row, data in enumerate(inputs.rows(x)):
        mine = mapped(state, itemgetter(slice(row, row + 1)))
        alone = form.run(inputs.joined([data]), weights, mine, backend=backend)
        assert_encodes_alike(alone, one_row(together, x, row), steps=len(data))


@every_backend
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_stands_in_other_rows_does_not_reach_a_row(form: Form, backend: str, poison: float) -> None:
    x, weights, state = form.given([3, 1, 0, 5, 2], 5, 3)
    clean = form.run(x, weights, state, backend=backend)
    for row in range(x.rows):
        others = torch.arange(x.rows) != row
        theirs = others.repeat_interleave(torch.diff(x.offsets))
        data = spoiled(x.data, where=theirs, by=poison)
        states = mapped(state, partial(spoiled, where=others, by=poison))
        encoded = form.run(Ragged(data, x.offsets), weights, states, backend=backend)
        assert_encodes_alike(one_row(encoded, x, row), one_row(clean, x, row), steps=0)


def spoiled(array: Tensor, *, where: Tensor, by: float) -> Tensor:
    """where: (len(array),) which of the first axis. An id becomes another one."""
    return array.index_fill(0, where.nonzero()[:, 0], by if array.is_floating_point() else 0)


def one_row(encoded: Encoded, x: Ragged, row: int) -> Encoded:
    """What the encoding of `x` says of one of its rows."""
    mine = itemgetter(slice(row, row + 1))
    pooled: Encoded = mapped(replace(encoded, steps=None, offsets=None), mine)
    return replace(pooled, state=mapped(encoded.state, mine), steps=inputs.steps_by_row(encoded, x)[row])


@on_every_backend(WITH_GATES)
@pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 0], []], ids=str)
def test_gate_inputs_may_be_given_instead_of_inputs(form: Form, backend: str, lengths: list[int]) -> None:
    given = form.given(lengths, 33, 7)
    actual, expected = form.run(*form.gated(given), backend=backend), form.run(*given, backend=backend)
    if hasattr(expected.state, "left"):  # gate inputs see no step but their own
        assert actual.state.left.shape[1] == 0
        expected = replace(expected, state=replace(expected.state, left=actual.state.left))
    assert_encodes_alike(actual, expected, steps=longest(given.x))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("storage", HALVES, ids=str)
def test_on_a_cpu_half_precision_is_storage_and_arithmetic_is_float32(form: Form, storage: torch.dtype) -> None:
    for lengths in ([13, 0, 4, 15], [0, 0], []):
        given = form.given(lengths, 33, 7, storage=storage)
        encoded = form.run(*given)
        assert {array.dtype for array in arrays(replace(encoded, offsets=None)).values()} == {torch.float32}
        assert_encodes_alike(encoded, form.exact(given), steps=longest(given.x))


@every_backend
@pytest.mark.parametrize("wanted", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "mean")], ids=str)
def test_what_is_not_wanted_is_none_and_changes_nothing(form: Form, backend: str, wanted: tuple[str, ...]) -> None:
    given = form.given([7, 1, 3], 5, 3)
    everything = form.run(*given, backend=backend)
    expected = replace(everything, **{name: None for name in OUTPUTS if name not in wanted})
    actual = form.run(*given, want=Outputs(**dict.fromkeys(wanted, True)), backend=backend)
    assert_encodes_alike(actual, expected, steps=0)


@every_backend
def test_no_argument_is_modified(form: Form, backend: str) -> None:
    given = form.given([7, 1, 3], 5, 3)
    for arguments in [given, form.gated(given)] if form.takes_gates else [given]:
        before = arguments.mapped(torch.clone)
        form.run(*arguments, backend=backend)
        assert all(torch.equal(array, copy) for array, copy in zip(tensors(arguments), tensors(before), strict=True))


def tensors(given: Given) -> list[Tensor]:
    return [array for part in given for array in arrays(part).values()]


@on_every_backend([form for form in FORMS if form.takes_ids])
def test_int32_and_int64_ids_mean_the_same(form: Form, backend: str) -> None:
    x, weights, state = form.given([7, 1, 0, 3], 5, 3)
    wide = Ragged(x.data.long(), x.offsets)
    expected = form.run(x, weights, state, backend=backend)
    assert_encodes_alike(form.run(wide, weights, state, backend=backend), expected, steps=0)


@on_every_backend(WITH_SLOTS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_state_in_slots_is_read_and_written_in_place(form: Form, backend: str, index: torch.dtype) -> None:
    x, weights, state = form.given([4, 0, 2], 5, 3)
    expected = form.run(x, weights, state, backend=backend)
    slabs = in_slots(state, torch.tensor([3, 0, 4], dtype=index), places=6)
    encoded = form.run(x, weights, slabs, backend=backend)
    assert encoded.state is slabs
    assert_encodes_alike(replace(encoded, state=slabs.by_row()), expected, steps=0)
    assert all(bool((slab[[1, 2, 5]] == 9).all()) for name, slab in arrays(slabs).items() if name != "slots")


@on_every_backend([form for form in WITH_SLOTS if is_causal(form)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_rows_begin_in_one_place_go_on_from_slot_to_slot_and_end_in_one(
    form: Form, backend: str, index: torch.dtype, seed: int
) -> None:
    x, weights, state = form.given([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole, slabs = form.run(x, weights, backend=backend), begun_in_zeros(state)
    run = partial(run_from, form, weights, backend)
    chunks = in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed)
    steps, after = from_place_to_place(run, chunks, slabs, index)
    exact = form.exact(Given(x, weights, None)).steps
    assert whole.steps is not None and exact is not None
    assert_close(steps, whole.steps, steps=longest(x))
    assert_close(steps, exact, steps=longest(x))
    assert_states_alike(after, whole.state, steps=longest(x))
    assert_only_slots_were_written(slabs)


def run_from(form: Form, weights: Any, backend: str, x: Ragged, state: Any) -> Encoded:
    return form.run(x, weights, state, backend=backend)


@on_every_backend(WITH_SLOTS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_rows_with_and_without_steps_go_on_from_their_sources_and_are_written_to_their_slots(
    form: Form, backend: str, index: torch.dtype
) -> None:
    x, weights, state = form.given([4, 0, 2, 3, 0, 0], 5, 3)
    slabs = from_shared_places(state, index)
    before = slabs.by_row()
    assert before.slots is None and before.sources is None
    assert all(torch.equal(getattr(before, name), array[[0, 0, 2, 2, 4, 4]]) for name, array in arrays(state).items())
    expected, encoded = form.run(x, weights, before, backend=backend), form.run(x, weights, slabs, backend=backend)
    assert_encodes_alike(replace(encoded, state=expected.state), expected, steps=0)
    assert encoded.state.slots is slabs.slots
    assert_went_on_from_shared_places(encoded.state, state, expected.state)


@on_every_backend(WITH_BOTH)
@pytest.mark.parametrize("lengths", [[7, 1, 0, 13], [0, 0], []], ids=str)
@pytest.mark.parametrize("with_states", [False, True])
def test_both_directions_in_one_call_are_two_calls(form: Form, backend: str, lengths: list[int], with_states: bool) -> None:
    x, weights, states = both_ways(form, lengths)
    before = states if with_states else (None, None)
    forward = form.run(x, weights[0], before[0], backend=backend)
    backward = form.run(x.reversed(), weights[1], before[1], backend=backend)
    assert backward.steps is not None
    backward = replace(backward, steps=Ragged(backward.steps, x.offsets).reversed().data)
    encoded = form.both(x, weights, states if with_states else None, backend=backend)
    for name in OUTPUTS:
        expected = torch.cat((getattr(forward, name), getattr(backward, name)), dim=1)
        assert_close(getattr(encoded, name), expected, steps=longest(x))
    for after, alone in zip(encoded.state, (forward.state, backward.state), strict=True):
        assert_states_alike(after, alone, steps=longest(x))


@on_every_backend(WITH_BOTH)
def test_of_both_directions_what_is_not_wanted_is_none_and_changes_nothing(form: Form, backend: str) -> None:
    x, weights, states = both_ways(form, [7, 1, 3])
    everything = form.both(x, weights, states, backend=backend)
    for wanted in OUTPUTS:
        encoded = form.both(x, weights, states, want=Outputs(**{wanted: True}), backend=backend)
        assert torch.equal(getattr(encoded, wanted), getattr(everything, wanted))
        assert all(getattr(encoded, name) is None for name in OUTPUTS if name != wanted)


@on_every_backend(WITH_BOTH)
def test_both_directions_go_on_in_slots_of_their_own(form: Form, backend: str) -> None:
    x, weights, states = both_ways(form, [4, 0, 2])
    expected = form.both(x, weights, states, backend=backend)
    slots = torch.tensor([3, 0, 4]), torch.tensor([5, 1, 2])
    slabs = in_slots(states[0], slots[0], places=6), in_slots(states[1], slots[1], places=6)
    encoded = form.both(x, weights, slabs, backend=backend)
    for name in OUTPUTS:
        assert_close(getattr(encoded, name), getattr(expected, name), steps=0)
    for after, slab, state in zip(encoded.state, slabs, expected.state, strict=True):
        assert after is slab
        assert_states_alike(slab.by_row(), state, steps=0)


@on_every_backend(WITH_BOTH)
def test_both_directions_go_on_from_their_sources(form: Form, backend: str) -> None:
    x, weights, states = both_ways(form, [4, 0, 2, 3, 0, 0])
    slabs = from_shared_places(states[0]), from_shared_places(states[1])
    expected = form.both(x, weights, (slabs[0].by_row(), slabs[1].by_row()), backend=backend)
    encoded = form.both(x, weights, slabs, backend=backend)
    for name in OUTPUTS:
        assert_close(getattr(encoded, name), getattr(expected, name), steps=0)
    for after, state, one in zip(encoded.state, states, expected.state, strict=True):
        assert_went_on_from_shared_places(after, state, one)


def both_ways(form: Form, lengths: list[int]) -> tuple[Ragged, tuple[Any, Any], tuple[Any, Any]]:
    """Rows, and for each direction the weights and the state."""
    forward, backward = (form.given(lengths, 5, 3, seed=seed) for seed in (0, 1))
    return forward.x, (forward.weights, backward.weights), (forward.state, backward.state)
