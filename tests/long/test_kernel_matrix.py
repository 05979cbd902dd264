"""Every rule of the kernel families for every form and every backend of a CPU, and the reference for sizes at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.kernels import test_families as rules
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import assert_encodings_close, longest
from tests.kernels.test_families import EVERY_FORM, has_directions, has_slots, is_causal, pairs

Rule = Callable[..., None]


def floats(form: Form) -> bool:
    return not form.int8


RULES: Sequence[tuple[Rule, Callable[[Form], bool]]] = (
    (rules.test_outputs_and_state_match_the_reference, floats),
    (rules.test_missing_state_means_zeros, bool),
    (rules.test_empty_row_keeps_its_state_and_pools_to_zero, bool),
    (rules.test_layout_and_integers_of_arguments_change_nothing, bool),
    (rules.test_chunks_give_the_same_result_as_the_whole_row, is_causal),
    (rules.test_row_does_not_depend_on_the_other_rows, bool),
    (rules.test_gate_inputs_may_replace_inputs, lambda form: form.takes_gates and floats(form)),
    (rules.test_unrequested_outputs_are_none_and_change_nothing, bool),
    (rules.test_state_in_slots_is_read_and_written_in_place, has_slots),
    (rules.test_rows_share_a_first_slot_and_a_last_slot, lambda form: has_slots(form) and is_causal(form) and floats(form)),
    (rules.test_bidirectional_call_equals_two_calls, has_directions),
    (rules.test_each_direction_has_its_own_slots, has_directions),
)


@pytest.mark.parametrize("form, backend", pairs(EVERY_FORM, reference=True), ids=str)
def test_every_rule_holds(form: Form, backend: str) -> None:
    for rule, applies in RULES:
        if applies(form):
            rule(form, backend)
    if floats(form) and backend != "reference":  # which computes in the dtype of its arguments
        rules.test_stored_halves_are_computed_in_float32(form, backend)


@pytest.mark.parametrize("form, backend", pairs([form for form in FORMS if not form.normalises]), ids=str)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 17), max_size=5),
    hidden=st.integers(1, 19),
    width=st.integers(1, 19),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=20)
def test_any_size_matches_the_reference(
    form: Form, backend: str, lengths: list[int], hidden: int, width: int, seed: int
) -> None:
    """A layer norm multiplies the rounding errors of values that are nearly equal, so its forms are left out."""
    arguments = form.arguments(lengths, hidden, width, seed=seed)
    expected = form.exact(arguments)
    assert_encodings_close(form.run(*arguments, backend=backend), expected, steps=longest(arguments.x))
