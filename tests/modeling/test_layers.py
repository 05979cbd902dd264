"""Stacks of recurrent layers (depth, directions, states) compared with the same stacks in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.backend import AUTO
from kernels.gru.types import GRUState
from kernels.lstm.types import LSTMState
from kernels.ragged import Encoded, Outputs, Ragged
from service.modeling import layer_builder, recurrent
from service.modeling.recurrent import RecurrentStack
from service.modeling.spec import QRNNLayer, RecurrentLayer, SRULayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_states_close
from tests.modeling import reference_layers
from tests.modeling.reference_layers import Form, ReferenceLayer, ReferenceTorchRNN, fastest_on_cpu, last

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
every_family = pytest.mark.parametrize("form", reference_layers.RECURRENT, ids=str)
every_depth = pytest.mark.parametrize("depth, bidirectional", [(1, False), (1, True), (2, False), (2, True), (3, True)])
torch_has_it = pytest.mark.parametrize("kind", ["lstm", "gru"])


class StackAndReference(NamedTuple):
    """A stack and the reference layer with the same weights."""

    stack: RecurrentStack
    reference: ReferenceLayer


def stacked(form: Form, width: int = reference_layers.FEATURES) -> StackAndReference:
    reference = form.reference(width)
    stack = layer_builder.build_layer(form.spec, width, reference.arrays(), CPU)
    assert isinstance(stack, RecurrentStack)
    return StackAndReference(stack, reference)


def features(lengths: list[int], width: int = reference_layers.FEATURES) -> Ragged:
    return inputs.ragged(reference_layers.made_up_rows(lengths, width=width), lengths)


def assert_agrees(encoded: Encoded, x: Ragged, reference: ReferenceLayer, form: Form) -> None:
    """Assert that every output of every row agrees with the reference."""
    assert encoded.last is not None and encoded.mean is not None and encoded.max is not None
    for row, (data, ours) in enumerate(zip(inputs.rows(x), inputs.steps_by_row(encoded, x), strict=True)):
        steps = reference(data.double())
        assert_close(ours, steps, steps=len(data))
        assert_close(encoded.last[row], last(steps, form.spec), steps=len(data))
        assert_close(encoded.mean[row], steps.mean(0), steps=len(data))
        assert_close(encoded.max[row], steps.amax(0), steps=len(data))


@every_depth
@every_family
def test_stack_agrees_with_torch_on_each_row(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    stack, reference = stacked(form)
    x = features(LENGTHS)
    assert_agrees(stack(x, EVERYTHING), x, reference, form)


@every_depth
@pytest.mark.parametrize("form", [form for form in reference_layers.RECURRENT if form.kind == "sru"], ids=str)
def test_sru_skip_uses_the_columns_of_its_direction(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    width = form.spec.outputs
    stack, reference = stacked(form, width)
    x = features(LENGTHS, width)
    assert_agrees(stack(x, EVERYTHING), x, reference, form)


@every_family
def test_backward_direction_reads_the_reversed_row(form: Form) -> None:
    form = form.also(bidirectional=True)
    arrays = form.reference(reference_layers.FEATURES).arrays()
    other = {"forward": "backward", "backward": "forward"}
    swapped = {".".join(other.get(part, part) for part in name.split(".")): array for name, array in arrays.items()}
    if form.options.get("layer_norm") == "after":
        swapped["0.norm"] = arrays["0.norm"].roll(reference_layers.HIDDEN, 1)
    ours, theirs = (layer_builder.build_layer(form.spec, reference_layers.FEATURES, one, CPU) for one in (arrays, swapped))
    x = features(LENGTHS)
    there, back = ours(x, EVERYTHING), theirs(x.reversed(), EVERYTHING)
    assert there.steps is not None and back.steps is not None and there.last is not None and back.last is not None
    assert_close(
        Ragged(back.steps, x.offsets).reversed().data.roll(reference_layers.HIDDEN, 1), there.steps, steps=max(LENGTHS)
    )
    assert_close(back.last.roll(reference_layers.HIDDEN, 1), there.last, steps=max(LENGTHS))


@every_depth
@every_family
def test_row_without_steps_does_not_affect_other_rows(form: Form, depth: int, bidirectional: bool) -> None:
    form = form.also(depth=depth, bidirectional=bidirectional)
    stack, _ = stacked(form)
    with_gaps = features([0, 9, 0, 4, 0])
    ours, alone = stack(with_gaps, EVERYTHING), stack(inputs.ragged(with_gaps.data, [9, 4]), EVERYTHING)
    for name in ("last", "mean", "max"):
        assert_close(getattr(ours, name)[[1, 3]], getattr(alone, name), steps=9)
        assert not getattr(ours, name)[[0, 2, 4]].any()


@pytest.mark.parametrize("kind, layer", [("sru", SRULayer), ("qrnn", QRNNLayer)])
def test_both_directions_run_in_one_call(kind: str, layer: type[RecurrentLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    family, calls = recurrent.FAMILIES[layer], []

    def both(x: Ragged, weights: Any, states: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.append((weights, backend))
        return family.run_both(x, weights, states, want=want, backend=backend)

    def run(*_: Any, **__: Any) -> Encoded:
        pytest.fail("one direction was run alone")

    monkeypatch.setitem(recurrent.FAMILIES, layer, replace(family, run=run, run_both=both))
    form, x = Form(kind, depth=2, bidirectional=True), features(LENGTHS)
    stack, reference = stacked(form)
    assert_agrees(stack(x, EVERYTHING), x, reference, form)
    assert [(len(weights), backend) for weights, backend in calls] == [(2, AUTO), (2, AUTO)]


@every_depth
@torch_has_it
def test_states_agree_with_torch(kind: str, depth: int, bidirectional: bool) -> None:
    stack, reference = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert isinstance(reference, ReferenceTorchRNN)
    x = features(LENGTHS)
    _, states = stack.run_chunk(x, EVERYTHING, None)
    for row, data in enumerate(inputs.rows(x)):
        _, after = reference.rnn(data.double())
        for name, expected in zip(("hidden", "cell"), after if kind == "lstm" else [after], strict=False):
            ours = torch.stack([getattr(state, name)[row] for state in states])
            assert_close(ours, expected, steps=len(data))


@every_depth
@torch_has_it
def test_stack_starts_from_given_states(kind: str, depth: int, bidirectional: bool) -> None:
    stack, reference = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert isinstance(reference, ReferenceTorchRNN)
    x = features([6])
    hidden, cell = torch.randn(2, depth * (1 + bidirectional), 1, reference_layers.HIDDEN)
    given = [LSTMState(*one) if kind == "lstm" else GRUState(one[0]) for one in zip(hidden, cell, strict=True)]
    encoded, _ = stack.run_chunk(x, EVERYTHING, given)
    initial = (hidden[:, 0].double(), cell[:, 0].double())
    steps, _ = reference.rnn(x.data.double(), initial if kind == "lstm" else initial[0])
    assert encoded.steps is not None
    assert_close(encoded.steps, steps, steps=6)


@pytest.mark.parametrize("cuts", [[0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]], ids=str)
@every_family
def test_chunks_of_a_stack_give_the_same_steps(form: Form, cuts: list[int]) -> None:
    stack, _ = stacked(form.also(depth=2))
    x = features(LENGTHS)
    whole, after_whole = stack.run_chunk(x, EVERYTHING, None)
    states: list[Any] | None = None
    written: list[list[Tensor]] = [[] for _ in LENGTHS]
    for begin, end in pairwise(cuts):
        chunk = inputs.joined([row[begin:end] for row in inputs.rows(x)])
        encoded, states = stack.run_chunk(chunk, EVERYTHING, states)
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None and whole.last is not None and encoded.last is not None and states is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=max(LENGTHS))
    # For a row without steps in the last chunk, only families with a hidden state know the last output.
    goes_on = torch.tensor([form.kind in ("lstm", "gru") or length > begin for length in LENGTHS])
    assert_close(encoded.last, whole.last.where(goes_on[:, None], 0.0), steps=max(LENGTHS))
    for carried, expected in zip(states, after_whole, strict=True):
        assert_states_close(carried, expected, steps=max(LENGTHS))


@every_depth
@torch_has_it
def test_stack_reports_its_backend_and_tensors(kind: str, depth: int, bidirectional: bool) -> None:
    stack, reference = stacked(Form(kind, depth=depth, bidirectional=bidirectional))
    assert stack.backend() == fastest_on_cpu(Form(kind))
    added = {"lstm": 4, "gru": 2}[kind]  # gates whose two biases of torch are one bias here
    biases = added * reference_layers.HIDDEN * depth * (1 + bidirectional)
    assert sum(one.numel() for one in stack.tensors()) == sum(one.numel() for one in reference.parameters()) - biases


@pytest.mark.parametrize("form", reference_layers.EVERY_LAYER, ids=str)
def test_layer_holds_the_tensors_of_its_spec(form: Form) -> None:
    arrays = form.reference(reference_layers.WIDTH).arrays()
    assert {name: tuple(array.shape) for name, array in arrays.items()} == form.spec.tensors(reference_layers.WIDTH)
    runnable = layer_builder.build_layer(form.spec, reference_layers.WIDTH, arrays, CPU)
    in_filters = ("magnitude", "norm") if form.kind in ("conv", "tcn") else ()
    kept = [array for name, array in arrays.items() if not name.endswith(in_filters)] if in_filters else [*arrays.values()]
    assert sum(one.numel() for one in runnable.tensors()) == sum(array.numel() for array in kept)
    assert runnable.backend() == fastest_on_cpu(form)
    assert runnable.takes_ids is None
