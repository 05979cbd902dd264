"""In which dtypes a recurrent layer on a CPU holds its arrays, by the precision of the model and the backend."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backend import Choice
from kernels.ragged import Encoded, Outputs, Ragged
from service.modeling import layer_builder, recurrent
from service.modeling.encoder import Encoder
from service.modeling.spec import RecurrentLayer
from tests.kernels.families import cpu_backends
from tests.modeling.reference_layers import BOTH_WAYS, FEATURES, RECURRENT, Form
from tests.modeling.reference_model import reference_model
from tests.modeling.test_encoder import CPU, batch, scores

MATRICES = {"input", "recurrent", "projection"}
every_form = pytest.mark.parametrize("form", [*RECURRENT, *BOTH_WAYS], ids=str)


def run_with_recorded_weights(
    monkeypatch: pytest.MonkeyPatch, form: Form, backend: str, precision: str
) -> tuple[list[Any], Tensor]:
    """Return the weights with which the kernels of a model are called, and the model's scores."""
    assert isinstance(form.spec, RecurrentLayer)
    kind = type(form.spec)
    family, calls = recurrent.FAMILIES[kind], list[Any]()
    chosen = next(each for each in import_module(f"kernels.{form.kind}").BACKENDS if each.name == backend)

    def run(x: Ragged, weights: Any, state: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.append(weights)
        encoded: Encoded = chosen.run(x, weights, state, want=want)
        return encoded

    def both(x: Ragged, weights: Any, states: Any, *, want: Outputs, backend: str) -> Encoded:
        calls.extend(weights)
        encoded: Encoded = chosen.run_bidirectional(x, weights, states, want=want)
        return encoded

    named = replace(family, run=run, run_both=both, choice=lambda *_: Choice(chosen, ()))
    monkeypatch.setitem(recurrent.FAMILIES, kind, named)
    model = reference_model(form, embedded=False)
    storage = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    arrays = {name: array.to(storage) for name, array in model.arrays().items()}
    return calls, scores(Encoder(model.spec(precision), arrays, CPU)(batch(model)))


def dtypes(weights: Any) -> dict[str, torch.dtype]:
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: value.dtype for name, value in values.items() if isinstance(value, Tensor)}


@every_form
def test_compiled_loops_get_bfloat16_matrices(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    if "cpu" not in cpu_backends(form.kind):
        pytest.skip("the loops are not compiled")
    calls, actual = run_with_recorded_weights(monkeypatch, form, "cpu", "bfloat16")
    assert calls
    for weights in calls:
        for name, dtype in dtypes(weights).items():
            assert dtype == (torch.bfloat16 if name in MATRICES else torch.float32), name
    model = reference_model(form, embedded=False)
    rounded = {name: array.bfloat16().float() for name, array in model.arrays().items()}
    monkeypatch.undo()
    assert torch.equal(actual, scores(Encoder(model.spec(), rounded, CPU)(batch(model))))


@every_form
@pytest.mark.parametrize("backend, precision", [("framework", "bfloat16"), ("framework", "float16"), ("cpu", "float16")])
def test_other_matrices_are_float32(monkeypatch: pytest.MonkeyPatch, form: Form, backend: str, precision: str) -> None:
    if backend not in cpu_backends(form.kind):
        pytest.skip("the loops are not compiled")
    calls, _ = run_with_recorded_weights(monkeypatch, form, backend, precision)
    assert calls and all(set(dtypes(weights).values()) == {torch.float32} for weights in calls)


@every_form
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_kernels_know_of_int8_weights(monkeypatch: pytest.MonkeyPatch, form: Form, precision: str) -> None:
    calls, _ = run_with_recorded_weights(monkeypatch, form, "framework", precision)
    assert calls and all(weights.int8 == (precision == "int8") for weights in calls)
    assert all(set(dtypes(weights).values()) == {torch.float32} for weights in calls)


@every_form
def test_states_of_a_bfloat16_layer_are_float32(form: Form) -> None:
    arrays = {name: array.bfloat16() for name, array in form.reference(FEATURES).arrays().items()}
    stack = layer_builder.build_layer(form.spec, FEATURES, arrays, CPU)
    states = [getattr(state, field.name) for state in stack.allocate_states(4) for field in fields(state)]
    assert {state.dtype for state in states if state is not None} == {torch.float32}
