"""Depth, directions and states, composed around the kernels of each family, beside the same stacks in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.contract import Encoded, GRUState, LSTMState, Outputs, Ragged
from service.modeling import layers, recurrent
from service.modeling.recurrent import Stack
from service.modeling.spec import QRNNLayer, RecurrentLayer, SRULayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_alike
from tests.modeling import baselines
from tests.modeling.baselines import Form, LayerPeer, TorchPeer, last

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
every_family = pytest.mark.parametrize("form", baselines.RECURRENT, ids=str)
every_depth = pytest.mark.parametrize("depth, bidirectional", [(1, False), (1, True), (2, False), (2, True), (3, True)])
torch_has_it = pytest.mark.parametrize("kind", ["lstm", "gru"])


class Stacked(NamedTuple):
    """One of ours and the peer that has its weights."""

    stack: Stack
    peer: LayerPeer


def stacked(form: Form, width: int = baselines.FEATURES) -> Stacked:
    peer = form.peer(width)
    stack = layers.build(form.spec, width, peer.arrays(), CPU)
    assert isinstance(stack, Stack)
    return Stacked(stack, peer)


def features(lengths: list[int], width: int = baselines.FEATURES) -> Ragged:
    return inputs.ragged(baselines.made_up_rows(lengths, width=width), lengths)


def assert_is(encoded: Encoded, x: Ragged, peer: LayerPeer, form: Form) -> None:
    """Every output of every row is the plain computation's."""
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row, (data, ours) in enumerate(zip(inputs.rows(x), inputs.steps_by_row(encoded, x), strict=True)):
        steps = peer(data.double())
        assert_close(ours, steps, steps=len(data))
        assert_close(encoded.last[row], last(steps, form.spec), steps=len(data))
        assert_close(encoded.mean[row], steps.mean(0), steps=len(data))
        assert_close(encoded.max[row], steps.amax(0), steps=len(data))


@every_depth
@every_family
def test_a_stack_is_its_plain_peer_on_each_row(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    stack, peer = stacked(form)
    x = features(LENGTHS)
    assert_is(stack(x, EVERYTHING), x, peer, form)


@every_depth
@pytest.mark.parametrize("form", [form for form in baselines.RECURRENT if form.kind == "sru"], ids=str)
def test_an_sru_whose_input_is_as_wide_as_its_output_skips_by_each_direction_s_own_columns(
    form: Form, depth: int, bidirectional: bool
) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    width = form.spec.outputs
    stack, peer = stacked(form, width)
    x = features(LENGTHS, width)
    assert_is(stack(x, EVERYTHING), x, peer, form)


@every_family
def test_the_backward_direction_is_the_forward_one_on_the_reversed_row(form: Form) -> None:
    form = form.also(bidirectional=True)
    arrays = form.peer(baselines.FEATURES).arrays()
    other = {"forward": "backward", "backward": "forward"}
    swapped = {".".join(other.get(part, part) for part in name.split(".")): array for name, array in arrays.items()}
    if form.options.get("layer_norm") == "after":
        swapped["0.norm"] = arrays["0.norm"].roll(baselines.HIDDEN, 1)
    ours, theirs = (layers.build(form.spec, baselines.FEATURES, one, CPU) for one in (arrays, swapped))
    x = features(LENGTHS)
    there, back = ours(x, EVERYTHING), theirs(x.reversed(), EVERYTHING)
    assert there.steps is not None and back.steps is not None and there.last is not None and back.last is not None
    assert_close(Ragged(back.steps, x.offsets).reversed().data.roll(baselines.HIDDEN, 1), there.steps, steps=max(LENGTHS))
    assert_close(back.last.roll(baselines.HIDDEN, 1), there.last, steps=max(LENGTHS))


@every_depth
@every_family
def test_a_row_without_steps_harms_no_other(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    stack, _ = stacked(form)
    with_gaps = features([0, 9, 0, 4, 0])
    ours, alone = stack(with_gaps, EVERYTHING), stack(inputs.ragged(with_gaps.data, [9, 4]), EVERYTHING)
    for name in ("last", "mean", "max"):
        assert_close(getattr(ours, name)[[1, 3]], getattr(alone, name), steps=9)
        assert not getattr(ours, name)[[0, 2, 4]].any()


@pytest.mark.parametrize("kind, layer", [("sru", SRULayer), ("qrnn", QRNNLayer)])
def test_both_directions_of_a_level_are_one_call_where_the_family_has_one(
    kind: str, layer: type[RecurrentLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, calls = recurrent.FAMILIES[layer], []

    def both(x: Ragged, weights: Any, states: Any, *, want: Outputs) -> Encoded:
        calls.append(weights)
        return family.both(x, weights, states, want=want)

    def run(*_: Any, **__: Any) -> Encoded:
        pytest.fail("one direction was run alone")

    monkeypatch.setitem(recurrent.FAMILIES, layer, replace(family, run=run, both=both))
    form, x = Form(kind, depth=2, bidirectional=True), features(LENGTHS)
    stack, peer = stacked(form)
    assert_is(stack(x, EVERYTHING), x, peer, form)
    assert [len(weights) for weights in calls] == [2, 2]


@every_depth
@torch_has_it
def test_the_states_after_a_row_are_torch_s_level_by_level_forward_first(kind: str, depth: int, bidirectional: bool) -> None:
    stack, peer = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert isinstance(peer, TorchPeer)
    x = features(LENGTHS)
    _, states = stack.chunk(x, EVERYTHING, None)
    for row, data in enumerate(inputs.rows(x)):
        _, after = peer.rnn(data.double())
        for name, expected in zip(("hidden", "cell"), after if kind == "lstm" else [after], strict=False):
            ours = torch.stack([getattr(state, name)[row] for state in states])
            assert_close(ours, expected, steps=len(data))


@every_depth
@torch_has_it
def test_a_stack_starts_from_the_states_it_is_given_level_by_level_forward_first(
    kind: str, depth: int, bidirectional: bool
) -> None:
    stack, peer = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert isinstance(peer, TorchPeer)
    x = features([6])
    hidden, cell = torch.randn(2, depth * (1 + bidirectional), 1, baselines.HIDDEN)
    given = [LSTMState(*one) if kind == "lstm" else GRUState(one[0]) for one in zip(hidden, cell, strict=True)]
    encoded, _ = stack.chunk(x, EVERYTHING, given)
    initial = (hidden[:, 0].double(), cell[:, 0].double())
    steps, _ = peer.rnn(x.data.double(), initial if kind == "lstm" else initial[0])
    assert encoded.steps is not None
    assert_close(encoded.steps, steps, steps=6)


@pytest.mark.parametrize("cuts", [[0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]], ids=str)
@every_family
def test_a_unidirectional_stack_over_chunks_that_carry_the_states_gives_the_whole(form: Form, cuts: list[int]) -> None:
    stack, _ = stacked(form.also(depth=2))
    x = features(LENGTHS)
    whole, after_whole = stack.chunk(x, EVERYTHING, None)
    states: list[Any] | None = None
    written: list[list[Tensor]] = [[] for _ in LENGTHS]
    for begin, end in pairwise(cuts):
        chunk = inputs.joined([row[begin:end] for row in inputs.rows(x)])
        encoded, states = stack.chunk(chunk, EVERYTHING, states)
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None and whole.last is not None and encoded.last is not None and states is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=max(LENGTHS))
    # Of a row without steps in the last chunk, only a family that keeps a hidden state can say what was last.
    goes_on = torch.tensor([form.kind in ("lstm", "gru") or length > begin for length in LENGTHS])
    assert_close(encoded.last, whole.last.where(goes_on[:, None], 0.0), steps=max(LENGTHS))
    for carried, expected in zip(states, after_whole, strict=True):
        assert_states_alike(carried, expected, steps=max(LENGTHS))


@every_depth
@torch_has_it
def test_a_stack_says_which_backend_runs_it_and_what_it_holds(kind: str, depth: int, bidirectional: bool) -> None:
    stack, peer = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert stack.backend() == "framework"
    added = {"lstm": 4, "gru": 2}[kind]  # the gates whose two biases are one with us
    biases = added * baselines.HIDDEN * depth * (1 + bidirectional)
    assert sum(one.numel() for one in stack.tensors()) == sum(one.numel() for one in peer.parameters()) - biases


@pytest.mark.parametrize("form", baselines.EVERY_LAYER, ids=str)
def test_a_layer_holds_the_tensors_that_its_spec_names(form: Form) -> None:
    arrays = form.peer(baselines.WIDTH).arrays()
    assert {name: tuple(array.shape) for name, array in arrays.items()} == form.spec.tensors(baselines.WIDTH)
    runs = layers.build(form.spec, baselines.WIDTH, arrays, CPU)
    in_filters = ("magnitude", "norm") if form.kind in ("conv", "tcn") else ()
    kept = [array for name, array in arrays.items() if not name.endswith(in_filters)] if in_filters else [*arrays.values()]
    assert sum(one.numel() for one in runs.tensors()) == sum(array.numel() for array in kept)
    assert runs.backend() == "framework"
    assert runs.takes_ids is None
