"""Tests of the CPU loops of the SRU and the QRNN: threads for parts of the units, groups of units, and the check of token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import cache, threads
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels.families import FORMS, VOCABULARY, Form
from tests.kernels.inputs import OUTPUTS, arrays, assert_encodings_close, longest, put_in_slots

pytestmark = pytest.mark.skipif(cache.missing() is not None, reason=f"the CPU kernels are not used: {cache.missing()}")

SCANS = [form for form in FORMS if form.family in ("sru", "qrnn")]
OVER_IDS = [form for form in SCANS if form.takes_ids]
every_form = pytest.mark.parametrize("form", SCANS, ids=str)
every_form_over_ids = pytest.mark.parametrize("form", OVER_IDS, ids=str)
LENGTHS, HIDDEN, INPUTS = [40, 1, 0, 97, 3], 200, 7


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, however small the batch is."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def both_directions(form: Form, lengths: list[int], hidden: int) -> tuple[Ragged, tuple[Any, Any], tuple[Any, Any]]:
    forward, backward = (form.arguments(lengths, hidden, INPUTS, seed=seed) for seed in (0, 1))
    return forward.x, (forward.weights, backward.weights), (forward.state, backward.state)


def values(encoded: Encoded) -> list[Tensor]:
    """Return every output and every array of the state, or of the states of both directions."""
    states = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
    return [getattr(encoded, name) for name in OUTPUTS] + [array for state in states for array in arrays(state).values()]


@every_form
def test_two_threads_give_the_bits_of_one(form: Form, two_threads: None) -> None:
    arguments = both_directions(form, LENGTHS, HIDDEN)
    together = form.bidirectional(*arguments, backend="cpu")
    torch.set_num_threads(1)
    alone = form.bidirectional(*arguments, backend="cpu")
    assert all(torch.equal(*pair) for pair in zip(values(together), values(alone), strict=True))


@every_form
def test_row_has_the_same_bits_alone_in_both_directions(form: Form) -> None:
    x, weights, states = both_directions(form, LENGTHS, HIDDEN)
    whole = form.bidirectional(x, weights, states, backend="cpu")
    for row, (begin, end) in enumerate(zip(x.offsets.tolist(), x.offsets[1:].tolist(), strict=False)):
        one = Ragged(x.data[begin:end], torch.tensor([0, end - begin]))
        before = tuple(
            replace(state, **{name: array[row : row + 1] for name, array in arrays(state).items()}) for state in states
        )
        alone = form.bidirectional(one, weights, before, backend="cpu")
        assert whole.steps is not None and alone.steps is not None
        assert torch.equal(whole.steps[begin:end], alone.steps)
        for name in ("last", "mean", "max"):
            assert torch.equal(getattr(whole, name)[row], getattr(alone, name)[0]), name
        for after, alone_after in zip(whole.state, alone.state, strict=True):
            assert all(torch.equal(array[row], arrays(alone_after)[name][0]) for name, array in arrays(after).items())


@every_form
def test_wide_layers_run_in_several_groups_of_units(form: Form) -> None:
    arguments = form.arguments([5, 20, 0, 1], 530, INPUTS)
    assert_encodings_close(form.run(*arguments, backend="cpu"), form.exact(arguments), steps=longest(arguments.x))


@every_form_over_ids
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_halves_are_read_as_they_are(form: Form, dtype: torch.dtype) -> None:
    arguments = form.arguments([5, 20, 0, 1], 37, INPUTS, storage=dtype)
    assert_encodings_close(form.run(*arguments, backend="cpu"), form.exact(arguments), steps=longest(arguments.x))


@every_form_over_ids
@pytest.mark.parametrize("wrong", [VOCABULARY, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_outside_of_the_table_changes_no_state(form: Form, wrong: int, dtype: torch.dtype, two_threads: None) -> None:
    x, weights, state = form.arguments(LENGTHS, HIDDEN, INPUTS)
    ids = x.data.to(dtype)
    ids[-1] = wrong
    caches = put_in_slots(state, torch.tensor([3, 0, 4, 1, 2]), places=6)
    before = {name: array.clone() for name, array in arrays(caches).items()}
    with pytest.raises(IndexError, match="outside of the table"):
        form.run(Ragged(ids, x.offsets), weights, caches, want=Outputs(last=True), backend="cpu")
    assert all(torch.equal(array, before[name]) for name, array in arrays(caches).items())


@pytest.mark.parametrize("form", [form for form in OVER_IDS if form.options.get("window", 1) > 1], ids=str)
@pytest.mark.parametrize("wrong", [VOCABULARY + 1, -1])
def test_step_before_the_rows_outside_of_the_tables_is_refused(form: Form, wrong: int) -> None:
    x, weights, state = form.arguments(LENGTHS, HIDDEN, INPUTS)
    state.left[2, 0] = wrong
    with pytest.raises(IndexError, match="outside of the table"):
        form.run(x, weights, state, backend="cpu")
