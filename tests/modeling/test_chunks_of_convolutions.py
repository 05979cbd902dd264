"""Convolutions over chunks with carried states give the same result as over the whole row."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.conv.types import ConvState
from kernels.ragged import Outputs, Ragged
from service.modeling import layer_builder
from service.modeling.convolution import ConvStack
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_close
from tests.modeling import reference_layers
from tests.modeling.reference_layers import Form

LENGTHS = [9, 1, 14, 3, 0]
CAUSAL = [
    *reference_layers.TCNS,
    Form("conv", padding="causal", activation="glu"),
    Form("conv", padding="causal", width=3, dilation=3, weight_norm=True, batch_norm=True),
    Form("conv", width=1, activation="gelu"),
]
OVER_IDS = [(form, mode) for form in CAUSAL for mode in ("embed", "fold") if (form.kind, mode) != ("tcn", "fold")]
every_causal_layer = pytest.mark.parametrize("form", CAUSAL, ids=str)
every_cut = pytest.mark.parametrize("cuts", [[0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]], ids=str)


def built(form: Form, width: int = reference_layers.FEATURES) -> ConvStack:
    runnable = layer_builder.build_layer(form.spec, width, form.reference(width).arrays(), torch.device("cpu"))
    assert isinstance(runnable, ConvStack)
    return runnable


def features() -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(LENGTHS), LENGTHS)


def ids() -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(LENGTHS, embedded=True), LENGTHS)


def piece(x: Ragged, begin: int, end: int) -> Ragged:
    return inputs.joined([row[begin:end] for row in inputs.rows(x)])


def in_chunks(runnable: ConvStack, x: Ragged, cuts: list[int]) -> tuple[Tensor, list[ConvState]]:
    """Return all steps of all rows, and the states after the last chunk."""
    written: list[list[Tensor]] = [[] for _ in range(x.rows)]
    states = None
    for begin, end in pairwise(cuts):
        chunk = piece(x, begin, end)
        encoded, states = runnable.run_chunk(chunk, EVERYTHING, states)
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert states is not None
    return torch.cat([steps for row in written for steps in row]), states


@every_cut
@every_causal_layer
def test_chunks_give_the_same_steps_as_the_whole_row(form: Form, cuts: list[int]) -> None:
    runnable, x = built(form), features()
    whole, after = runnable.run_chunk(x, EVERYTHING, None)
    carried, states = in_chunks(runnable, x, cuts)
    assert whole.steps is not None
    assert_close(carried, whole.steps, steps=max(LENGTHS))
    for state, expected in zip(states, after, strict=True):
        assert_states_close(state, expected, steps=max(LENGTHS))


def over_ids(form: Form, mode: str) -> ConvStack:
    """Return a layer that takes ids. mode: embed or fold."""
    runnable = built(form, reference_layers.WIDTH)
    table = torch.randn(reference_layers.VOCABULARY, reference_layers.WIDTH, generator=torch.Generator().manual_seed(1))
    getattr(runnable, mode)(table)
    return runnable


@every_cut
@pytest.mark.parametrize("form, mode", OVER_IDS, ids=str)
def test_chunks_of_ids_give_the_same_steps(form: Form, mode: str, cuts: list[int]) -> None:
    runnable, x = over_ids(form, mode), ids()
    assert runnable.streams
    whole, (carried, _) = runnable(x, EVERYTHING), in_chunks(runnable, x, cuts)
    assert whole.steps is not None
    assert_close(carried, whole.steps, steps=max(LENGTHS))


@pytest.mark.parametrize("form", [form for form, mode in OVER_IDS if mode == "fold"], ids=str)
def test_folding_changes_neither_steps_nor_states_of_chunks(form: Form) -> None:
    (folded, after_folded), (embedded, after_embedded) = (
        in_chunks(over_ids(form, mode), ids(), [0, 1, 5, 14]) for mode in ("fold", "embed")
    )
    assert torch.equal(folded, embedded)
    for one, other in zip(after_folded, after_embedded, strict=True):
        assert one.left.is_floating_point()
        assert torch.equal(one.left, other.left)


@every_causal_layer
def test_last_step_alone_still_returns_the_states(form: Form) -> None:
    runnable, x = built(form), features()
    _, expected = runnable.run_chunk(x, EVERYTHING, None)
    _, states = runnable.run_chunk(x, Outputs(last=True), None)
    for state, one in zip(states, expected, strict=True):
        assert_states_close(state, one, steps=0)


@every_causal_layer
def test_states_are_written_to_their_slots(form: Form) -> None:
    runnable, x = built(form), features()
    _, begun = runnable.run_chunk(piece(x, 0, 5), EVERYTHING, None)
    expected, after = runnable.run_chunk(piece(x, 5, 14), EVERYTHING, begun)
    slots = torch.tensor([3, 0, 7, 5, 1])
    slabs = [inputs.put_in_slots(state, slots, places=8) for state in begun]
    encoded, carried = runnable.run_chunk(piece(x, 5, 14), EVERYTHING, slabs)
    assert encoded.steps is not None and expected.steps is not None
    assert torch.equal(encoded.steps, expected.steps)
    for one, slab, state in zip(carried, slabs, after, strict=True):
        assert one is slab
        assert torch.equal(slab.by_row().left, state.left)
        assert bool((slab.left[[2, 4, 6]] == 9).all())
