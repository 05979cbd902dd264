"""Convolutions over chunks that carry their states: what they give is what the whole row gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.contract import ContractError, ConvState, Outputs, Ragged
from service.modeling import layers
from service.modeling.convolution import Convolutions
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_alike
from tests.modeling import baselines
from tests.modeling.baselines import Form

LENGTHS = [9, 1, 14, 3, 0]
CAUSAL = [
    *baselines.TCNS,
    Form("conv", padding="causal", activation="glu"),
    Form("conv", padding="causal", width=3, dilation=3, weight_norm=True, batch_norm=True),
    Form("conv", width=1, activation="gelu"),
]
every_causal_layer = pytest.mark.parametrize("form", CAUSAL, ids=str)
every_cut = pytest.mark.parametrize("cuts", [[0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]], ids=str)


def built(form: Form, width: int = baselines.FEATURES) -> Convolutions:
    runs = layers.build(form.spec, width, form.peer(width).arrays(), torch.device("cpu"))
    assert isinstance(runs, Convolutions)
    return runs


def features() -> Ragged:
    return inputs.ragged(baselines.made_up_rows(LENGTHS), LENGTHS)


def piece(x: Ragged, begin: int, end: int) -> Ragged:
    return inputs.joined([row[begin:end] for row in inputs.rows(x)])


def in_chunks(runs: Convolutions, x: Ragged, cuts: list[int]) -> tuple[Tensor, list[ConvState]]:
    """Every step of every row, and the states after the last."""
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    states = None
    for begin, end in pairwise(cuts):
        chunk = piece(x, begin, end)
        encoded, states = runs.chunk(chunk, EVERYTHING, states)
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert states is not None
    return torch.cat([steps for row in written for steps in row]), states


@every_cut
@every_causal_layer
def test_chunks_that_carry_the_states_give_the_whole(form: Form, cuts: list[int]) -> None:
    runs, x = built(form), features()
    whole, after = runs.chunk(x, EVERYTHING, None)
    carried, states = in_chunks(runs, x, cuts)
    assert whole.steps is not None
    assert_close(carried, whole.steps, steps=max(LENGTHS))
    for state, expected in zip(states, after, strict=True):
        assert_states_alike(state, expected, steps=max(LENGTHS))


@every_cut
def test_chunks_of_ids_that_are_embedded_give_the_whole(cuts: list[int]) -> None:
    x = inputs.ragged(baselines.made_up_rows(LENGTHS, embedded=True), LENGTHS)
    for form in CAUSAL:
        runs = built(form, baselines.WIDTH)
        runs.embed(torch.randn(baselines.VOCABULARY, baselines.WIDTH, generator=torch.Generator().manual_seed(1)))
        whole, (carried, _) = runs(x, EVERYTHING), in_chunks(runs, x, cuts)
        assert whole.steps is not None
        assert_close(carried, whole.steps, steps=max(LENGTHS))


def test_tables_keep_no_state_and_say_so() -> None:
    runs = built(Form("conv", padding="causal"), baselines.WIDTH)
    runs.fold(torch.zeros(baselines.VOCABULARY, baselines.WIDTH))
    with pytest.raises(ContractError, match="tables keep no state: embed the ids as they are"):
        runs.chunk(inputs.ragged(baselines.made_up_rows(LENGTHS, embedded=True), LENGTHS), EVERYTHING, None)


@every_causal_layer
def test_a_chunk_of_which_only_the_last_step_is_wanted_has_the_states_after_it_too(form: Form) -> None:
    runs, x = built(form), features()
    _, expected = runs.chunk(x, EVERYTHING, None)
    _, states = runs.chunk(x, Outputs(last=True), None)
    for state, one in zip(states, expected, strict=True):
        assert_states_alike(state, one, steps=0)


@every_causal_layer
def test_states_lie_in_slots_of_slabs_and_are_written_there(form: Form) -> None:
    runs, x = built(form), features()
    _, begun = runs.chunk(piece(x, 0, 5), EVERYTHING, None)
    expected, after = runs.chunk(piece(x, 5, 14), EVERYTHING, begun)
    slots = torch.tensor([3, 0, 7, 5, 1])
    slabs = [inputs.in_slots(state, slots, places=8) for state in begun]
    encoded, carried = runs.chunk(piece(x, 5, 14), EVERYTHING, slabs)
    assert encoded.steps is not None and expected.steps is not None
    assert torch.equal(encoded.steps, expected.steps)
    for one, slab, state in zip(carried, slabs, after, strict=True):
        assert one is slab
        assert torch.equal(slab.by_row().left, state.left)
        assert bool((slab.left[[2, 4, 6]] == 9).all())
