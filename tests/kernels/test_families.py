"""The promises of every backend of every kernel family on a CPU, on odd sizes, against the reference in float64.

A rule is a function of a form and a backend. `tests/long/test_kernel_matrix.py` checks every rule for every form and backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backend import FAMILIES
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import FORMS, INT8_FORMS, SOME_FORMS, Form, cpu_backends, runs_on_cpu

SIZES: Sequence[tuple[list[int], int, int]] = (
    ([1], 1, 1),
    ([7, 1, 3], 16, 16),
    ([129, 0, 4, 151], 29, 7),
    ([0, 0], 3, 5),
    ([], 3, 5),
    ([0, 5, 5, 0, 2], 151, 37),
)
EVERY_FORM = [*FORMS, *INT8_FORMS]


def is_causal(form: Form) -> bool:
    """Return whether rows can be split into chunks: no step depends on a later step, and the family has a state."""
    _, weights, state = form.arguments([1], 1, 1)
    return form.family != "conv" or (state is not None and weights.left == weights.reach - 1 and weights.right == 0)


def has_slots(form: Form) -> bool:
    return hasattr(form.arguments([1], 1, 1).state, "slots")


def has_directions(form: Form) -> bool:
    return hasattr(form.module, "bidirectional")


def pairs(forms: Sequence[Form], *, reference: bool = False) -> list[tuple[Form, str]]:
    """Return the forms with the backends that accept a CPU. Only the compiled loops compute in int8."""
    floats = [form for form in forms if not form.int8]
    found = [(form, backend.name) for form in floats for backend in form.backends if runs_on_cpu(backend, form.variants)]
    found += [(form, "cpu") for form in forms if form.int8 and "cpu" in cpu_backends(form.family)]
    return [(form, backend) for form, backend in found if reference or backend != "reference"]


def for_forms(forms: Sequence[Form]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("form, backend", pairs(forms), ids=str)


for_some_forms = for_forms(SOME_FORMS)
for_states_in_slots = for_forms([form for form in SOME_FORMS if has_slots(form)])
for_both_directions = for_forms([form for form in SOME_FORMS if has_directions(form)])


def test_every_family_is_tested() -> None:
    assert {form.family for form in SOME_FORMS} == {form.family for form in FORMS} == set(FAMILIES)


@for_forms(FORMS)
def test_outputs_and_state_match_the_reference(form: Form, backend: str) -> None:
    for lengths, hidden, width in SIZES:
        arguments = form.arguments(lengths, hidden, width)
        encoded = form.run(*arguments, backend=backend)
        inputs.assert_encodings_close(encoded, form.exact(arguments), steps=inputs.longest(arguments.x))
        floats = [array for array in inputs.arrays(encoded.state).values() if array.is_floating_point()]
        assert {array.dtype for array in (*floats, *(getattr(encoded, name) for name in inputs.OUTPUTS))} == {torch.float32}


@for_some_forms
def test_missing_state_means_zeros(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([7, 0, 3], 5, 3)
    zeros = inputs.map_arrays(state, torch.zeros_like)
    inputs.assert_encodings_close(form.run(x, weights, backend=backend), form.run(x, weights, zeros, backend=backend), steps=0)


@for_some_forms
def test_empty_row_keeps_its_state_and_pools_to_zero(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([3, 0, 1, 0], 5, 3)
    encoded = form.run(x, weights, state, backend=backend)
    hidden = getattr(state, "hidden", torch.zeros(4, 5))
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row in (1, 3):
        assert all(torch.equal(getattr(encoded.state, name)[row], array[row]) for name, array in inputs.arrays(state).items())
        assert torch.equal(encoded.last[row], hidden[row])
        assert not encoded.mean[row].any() and not encoded.max[row].any()
        assert not len(inputs.steps_by_row(encoded, x)[row])


@for_some_forms
def test_layout_and_integers_of_arguments_change_nothing(form: Form, backend: str) -> None:
    """Offsets and ids may be int32 or int64; inputs.arrays need not be contiguous. The arguments are not modified."""
    arguments = x, weights, state = form.arguments([7, 1, 0, 3], 5, 3)
    before = arguments.map_arrays(torch.clone)
    expected = form.run(*arguments, backend=backend)
    assert all(torch.equal(array, copy) for array, copy in zip(tensors(arguments), tensors(before), strict=True))
    sparse = arguments.map_arrays(lambda array: torch.stack((array, array), dim=-1)[..., 0])
    wide = Ragged(x.data.long() if form.takes_ids else x.data, x.offsets.long())
    for same in (sparse, inputs.Arguments(wide, weights, state)):
        inputs.assert_encodings_close(form.run(*same, backend=backend), expected, steps=0)


def tensors(arguments: inputs.Arguments) -> list[Tensor]:
    return [array for part in arguments for array in inputs.arrays(part).values()]


@for_forms([form for form in SOME_FORMS if is_causal(form)])
def test_chunks_give_the_same_result_as_the_whole_row(form: Form, backend: str, seed: int = 0) -> None:
    x, weights, state = form.arguments([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole = form.run(x, weights, state, backend=backend)
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    for chunk in inputs.in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed):
        encoded = form.run(chunk, weights, state, backend=backend)
        state = encoded.state
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None
    inputs.assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=inputs.longest(x))
    inputs.assert_states_close(state, whole.state, steps=inputs.longest(x))


@for_some_forms
def test_row_does_not_depend_on_the_other_rows(form: Form, backend: str) -> None:
    """Alone, in a batch, and beside rows of values that are not numbers."""
    x, weights, state = form.arguments([9, 0, 31, 1], 33, 7)
    batch = form.run(x, weights, state, backend=backend)
    for row, data in enumerate(inputs.rows(x)):
        row_state = inputs.map_arrays(state, itemgetter(slice(row, row + 1)))
        alone = form.run(inputs.joined([data]), weights, row_state, backend=backend)
        inputs.assert_encodings_close(alone, one_row(batch, x, row), steps=len(data))
        others = torch.arange(x.rows) != row
        for poison in (torch.nan, torch.inf):
            poisoned = overwritten(x.data, where=others.repeat_interleave(torch.diff(x.offsets)), by=poison)
            states = inputs.map_arrays(state, partial(overwritten, where=others, by=poison))
            beside = form.run(Ragged(poisoned, x.offsets), weights, states, backend=backend)
            inputs.assert_encodings_close(one_row(beside, x, row), one_row(batch, x, row), steps=0)


def overwritten(array: Tensor, *, where: Tensor, by: float) -> Tensor:
    """Overwrite the entries `where` of the first axis; ids become 0."""
    return array.index_fill(0, where.nonzero()[:, 0], by if array.is_floating_point() else 0)


def one_row(encoded: Encoded, x: Ragged, row: int) -> Encoded:
    """Return the encoding of one row of `x`."""
    select = itemgetter(slice(row, row + 1))
    pooled: Encoded = inputs.map_arrays(replace(encoded, steps=None, offsets=None), select)
    return replace(pooled, state=inputs.map_arrays(encoded.state, select), steps=inputs.steps_by_row(encoded, x)[row])


@for_forms([form for form in SOME_FORMS if form.takes_gates and not form.int8])
def test_gate_inputs_may_replace_inputs(form: Form, backend: str) -> None:
    for lengths in ([7, 1, 0, 13], [0, 0], []):
        arguments = form.arguments(lengths, 33, 7)
        gated = form.gated(arguments)
        before = gated.map_arrays(torch.clone)
        actual, expected = form.run(*gated, backend=backend), form.run(*arguments, backend=backend)
        assert all(torch.equal(array, copy) for array, copy in zip(tensors(gated), tensors(before), strict=True))
        if hasattr(expected.state, "left"):  # a layer of gate inputs has a window of one step
            assert actual.state.left.shape[1] == 0
            expected = replace(expected, state=replace(expected.state, left=actual.state.left))
        inputs.assert_encodings_close(actual, expected, steps=inputs.longest(arguments.x))


@for_forms([form for form in SOME_FORMS if not form.int8])
def test_stored_halves_are_computed_in_float32(form: Form, backend: str) -> None:
    for storage in (torch.float16, torch.bfloat16):
        arguments = form.arguments([13, 0, 4, 15], 29, 7, storage=storage)
        encoded = form.run(*arguments, backend=backend)
        assert {array.dtype for array in inputs.arrays(replace(encoded, offsets=None)).values()} == {torch.float32}
        inputs.assert_encodings_close(encoded, form.exact(arguments), steps=inputs.longest(arguments.x))


@for_some_forms
def test_unrequested_outputs_are_none_and_change_nothing(form: Form, backend: str) -> None:
    arguments = form.arguments([7, 1, 3], 5, 3)
    everything = form.run(*arguments, backend=backend)
    for requested in ((), ("steps",), ("last",), ("mean",), ("max",), ("steps", "mean")):
        expected = replace(everything, **{name: None for name in inputs.OUTPUTS if name not in requested})
        actual = form.run(*arguments, want=Outputs(**dict.fromkeys(requested, True)), backend=backend)
        inputs.assert_encodings_close(actual, expected, steps=0)


@for_states_in_slots
def test_state_in_slots_is_read_and_written_in_place(form: Form, backend: str) -> None:
    x, weights, state = form.arguments([4, 0, 2], 5, 3)
    expected = form.run(x, weights, state, backend=backend)
    for index in (torch.int32, torch.int64):
        caches = inputs.put_in_slots(state, torch.tensor([3, 0, 4], dtype=index), places=6)
        encoded = form.run(x, weights, caches, backend=backend)
        assert encoded.state is caches
        inputs.assert_encodings_close(replace(encoded, state=caches.by_row()), expected, steps=0)
        assert all(bool((cache[[1, 2, 5]] == 9).all()) for name, cache in inputs.arrays(caches).items() if name != "slots")


@for_forms([form for form in SOME_FORMS if has_slots(form) and is_causal(form) and not form.int8])
def test_rows_share_a_first_slot_and_a_last_slot(form: Form, backend: str, seed: int = 0) -> None:
    x, weights, state = form.arguments([31, 1, 0, 17, 8], 13, 7, seed=seed)
    whole, caches = form.run(x, weights, backend=backend), inputs.caches_with_zero_slot(state)

    def run(chunk: Ragged, state: Any) -> Encoded:
        return form.run(chunk, weights, state, backend=backend)

    chunks = inputs.in_chunks(x, chunks=4, multiple=form.options.get("stride", 1), seed=seed)
    steps, after = inputs.run_from_slot_to_slot(run, chunks, caches)
    assert whole.steps is not None
    inputs.assert_close(steps, whole.steps, steps=inputs.longest(x))
    inputs.assert_states_close(after, whole.state, steps=inputs.longest(x))
    inputs.assert_reserved_slots_unchanged(caches)


def bidirectional_arguments(form: Form, lengths: list[int]) -> tuple[Ragged, tuple[Any, Any], tuple[Any, Any]]:
    """Return rows, and the weights and states of both directions."""
    forward, backward = (form.arguments(lengths, 5, 3, seed=seed) for seed in (0, 1))
    return forward.x, (forward.weights, backward.weights), (forward.state, backward.state)


@pytest.mark.slow
@for_both_directions
def test_bidirectional_call_equals_two_calls(form: Form, backend: str) -> None:
    for lengths, with_states in (([7, 1, 0, 13], True), ([7, 1, 0, 13], False), ([0, 0], True), ([], False)):
        x, weights, states = bidirectional_arguments(form, lengths)
        before = states if with_states else (None, None)
        forward = form.run(x, weights[0], before[0], backend=backend)
        backward = form.run(x.reversed(), weights[1], before[1], backend=backend)
        assert backward.steps is not None
        backward = replace(backward, steps=Ragged(backward.steps, x.offsets).reversed().data)
        everything = form.bidirectional(x, weights, states if with_states else None, backend=backend)
        for name in inputs.OUTPUTS:
            expected = torch.cat((getattr(forward, name), getattr(backward, name)), dim=1)
            inputs.assert_close(getattr(everything, name), expected, steps=inputs.longest(x))
            want = Outputs(**{name: True})
            encoded = form.bidirectional(x, weights, states if with_states else None, want=want, backend=backend)
            assert torch.equal(getattr(encoded, name), getattr(everything, name))
            assert all(getattr(encoded, other) is None for other in inputs.OUTPUTS if other != name)
        for after, alone in zip(everything.state, (forward.state, backward.state), strict=True):
            inputs.assert_states_close(after, alone, steps=inputs.longest(x))


@for_both_directions
def test_each_direction_has_its_own_slots(form: Form, backend: str) -> None:
    x, weights, states = bidirectional_arguments(form, [4, 0, 2])
    expected = form.bidirectional(x, weights, states, backend=backend)
    slots = torch.tensor([3, 0, 4]), torch.tensor([5, 1, 2])
    caches = inputs.put_in_slots(states[0], slots[0], places=6), inputs.put_in_slots(states[1], slots[1], places=6)
    encoded = form.bidirectional(x, weights, caches, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in inputs.OUTPUTS)
    for after, cache, state in zip(encoded.state, caches, expected.state, strict=True):
        assert after is cache
        inputs.assert_states_close(cache.by_row(), state, steps=0)
