"""Tests of refusals: invalid arguments are named before a kernel runs, and a choice of backend has reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kernels.backend import FAMILIES, PINNED, Backend, Problem, choose, explain
from kernels.ragged import ContractError
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import Arguments

Break = Callable[[Arguments], Arguments]

LSTM, GRU, SRU, QRNN = (Form(family) for family in ("lstm", "gru", "sru", "qrnn"))
COLUMNS = Form("sru", skip="columns")
SRU_OF_IDS, QRNN_OF_IDS = Form("sru", ids=True), Form("qrnn", ids=True)
CONV, CONV_OF_IDS = Form("conv", width=3, left=2), Form("conv", width=3, left=2, ids="tables")

every_family = pytest.mark.parametrize("form", [Form(family) for family in FAMILIES], ids=str)


def with_x(**changes: Any) -> Break:
    return lambda arguments: arguments._replace(x=replace(arguments.x, **changes))


def with_weights(**changes: Any) -> Break:
    return lambda arguments: arguments._replace(weights=replace(arguments.weights, **changes))


def with_state(**changes: Any) -> Break:
    return lambda arguments: arguments._replace(state=replace(arguments.state, **changes))


INPUT_AND_BIAS = "weights.input and weights.bias belong together: pass both, or neither"
KNOWN = "expected one of none, relu, tanh, gelu, glu, gated_tanh"
OF_IDS = "must be None because the data are ids"
BLOCKS = "must be None because the data are already the product with weights.input"
TWICE = "weights.skip_from must be None because weights.input has a skip block"
NO_STEPS = "weights.tables has a window of 0 steps, expected at least the present step"
NO_PADDING = "weights.tables has no rows, expected at least the row of padding"
SLOTS = torch.tensor([3, 0])
NO_SLOTS = "state.sources requires state.slots: pass both, or neither"
LEAST = "width, dilation and stride must be at least 1, left and right at least 0"


@pytest.mark.parametrize(
    "form, broken, message",
    [
        (LSTM, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (LSTM, with_x(data=torch.zeros(4)), "x.data has the shape (4,), expected (4, 3)"),
        (LSTM, with_x(offsets=torch.zeros(3, 1)), "x.offsets has the shape (3, 1), expected (3,)"),
        (LSTM, with_weights(recurrent=torch.zeros(5, 15)), "weights.recurrent has the shape (5, 15), expected (5, 20)"),
        (LSTM, with_weights(input=torch.zeros(3, 16)), "weights.input has the shape (3, 16), expected (3, 20)"),
        (LSTM, with_weights(bias=torch.zeros(5)), "weights.bias has the shape (5,), expected (20,)"),
        (LSTM, with_weights(input=None, bias=None), "x.data has the shape (4, 3), expected (4, 20)"),
        (LSTM, with_weights(bias=None), INPUT_AND_BIAS),
        (LSTM, with_weights(input=None), INPUT_AND_BIAS),
        (LSTM, with_state(hidden=torch.zeros(1, 5)), "state.hidden has the shape (1, 5), expected (2, 5)"),
        (LSTM, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (LSTM, with_state(slots=SLOTS, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (LSTM, with_state(sources=SLOTS), NO_SLOTS),
        (GRU, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (GRU, with_weights(recurrent=torch.zeros(5, 20)), "weights.recurrent has the shape (5, 20), expected (5, 15)"),
        (GRU, with_weights(input=torch.zeros(3, 20)), "weights.input has the shape (3, 20), expected (3, 15)"),
        (GRU, with_weights(bias=torch.zeros(5)), "weights.bias has the shape (5,), expected (15,)"),
        (GRU, with_weights(recurrent_bias=torch.zeros(15)), "weights.recurrent_bias has the shape (15,), expected (5,)"),
        (GRU, with_weights(input=None, bias=None), "x.data has the shape (4, 3), expected (4, 15)"),
        (GRU, with_weights(bias=None), INPUT_AND_BIAS),
        (GRU, with_state(hidden=torch.zeros(1, 5)), "state.hidden has the shape (1, 5), expected (2, 5)"),
        (GRU, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (GRU, with_state(hidden=torch.zeros(9, 6), slots=SLOTS), "state.hidden has the shape (9, 6), expected (9, 5)"),
        (GRU, with_state(slots=SLOTS, sources=torch.zeros(2, 1)), "state.sources has the shape (2, 1), expected (2,)"),
        (GRU, with_state(sources=SLOTS), NO_SLOTS),
        (SRU, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (
            SRU,
            with_weights(input=torch.zeros(3, 16)),
            "weights.input has the shape (3, 16), expected 3 or 4 blocks of 5 columns",
        ),
        (SRU, with_weights(input=None), "x.data has the shape (4, 3), expected 3 or 4 blocks of 5 columns"),
        (SRU, with_weights(bias=torch.zeros(11)), "weights.bias has the shape (11,), expected (10,)"),
        (SRU, with_weights(bias=torch.zeros(2, 5)), "weights.bias has the shape (2, 5), expected (2,)"),
        (SRU, with_weights(cell=torch.zeros(5)), "weights.cell has the shape (5,), expected (10,)"),
        (SRU, with_weights(skip_from=0), TWICE),
        (SRU, with_weights(projection=torch.zeros(3, 2)), "weights.projection has the shape (3, 2), expected (3, 3)"),
        (SRU, with_weights(projection=torch.zeros(2, 3)), "x.data has the shape (4, 3), expected (4, 2)"),
        (
            COLUMNS,
            with_weights(skip_from=4),
            "weights.skip_from is 4, expected 0 to 3: the skip takes 5 of the data's 8 columns",
        ),
        (
            COLUMNS,
            with_weights(skip_from=-1),
            "weights.skip_from is -1, expected 0 to 3: the skip takes 5 of the data's 8 columns",
        ),
        (SRU, with_weights(norm=torch.zeros(2, 4)), "weights.norm has the shape (2, 4), expected (2, 3)"),
        (SRU, with_weights(input=None, norm=torch.zeros(2, 20)), f"weights.norm {BLOCKS}"),
        (COLUMNS, with_weights(input=None), f"weights.skip_from {BLOCKS}"),
        (SRU, with_weights(table=torch.zeros(9, 20)), f"weights.input {OF_IDS}"),
        (
            SRU_OF_IDS,
            with_weights(table=torch.zeros(9, 12)),
            "weights.table has the shape (9, 12), expected 3 or 4 blocks of 5 columns",
        ),
        (SRU_OF_IDS, with_weights(projection=torch.zeros(3, 2)), f"weights.projection {OF_IDS}"),
        (SRU_OF_IDS, with_weights(skip_from=0), f"weights.skip_from {OF_IDS}"),
        (SRU_OF_IDS, with_weights(norm=torch.zeros(2, 3)), f"weights.norm {OF_IDS}"),
        (SRU_OF_IDS, with_x(data=torch.zeros(4, 1).int()), "x.data has the shape (4, 1), expected (4,)"),
        (SRU_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids: torch.int32 or torch.int64"),
        (SRU, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (SRU, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (SRU, with_state(cell=torch.zeros(9, 6), slots=SLOTS), "state.cell has the shape (9, 6), expected (9, 5)"),
        (SRU, with_state(slots=SLOTS, sources=torch.tensor(0)), "state.sources has the shape (), expected (2,)"),
        (SRU, with_state(sources=SLOTS), NO_SLOTS),
        (QRNN, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (QRNN, with_weights(input=torch.zeros(2, 3, 10)), "weights.input has the shape (2, 3, 10), expected (2, 3, 15)"),
        (QRNN, with_weights(input=None), "x.data has the shape (4, 3), expected (4, 15)"),
        (QRNN, with_weights(bias=torch.zeros(16)), "weights.bias has the shape (16,), expected (15,)"),
        (QRNN, with_weights(pooling="of"), "weights.pooling is 'of', expected one of f, fo, ifo"),
        (QRNN, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (QRNN, with_state(left=torch.zeros(2, 2, 3)), "state.left has the shape (2, 2, 3), expected (2, 1, 3)"),
        (QRNN, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (QRNN, with_state(left=torch.zeros(9, 1, 3), slots=SLOTS), "state.left has the shape (9, 1, 3), expected (2, 1, 3)"),
        (QRNN, with_state(slots=SLOTS, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (QRNN, with_state(sources=SLOTS), NO_SLOTS),
        (QRNN, with_weights(tables=torch.zeros(2, 9, 15)), f"weights.input {OF_IDS}"),
        (QRNN_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids: torch.int32 or torch.int64"),
        (QRNN_OF_IDS, with_x(data=torch.zeros(4, 1).int()), "x.data has the shape (4, 1), expected (4,)"),
        (
            QRNN_OF_IDS,
            with_weights(tables=torch.zeros(2, 9, 10)),
            "weights.tables has the shape (2, 9, 10), expected (2, 9, 15)",
        ),
        (QRNN_OF_IDS, with_weights(tables=torch.zeros(2, 0, 15)), NO_PADDING),
        (QRNN_OF_IDS, with_weights(tables=torch.zeros(0, 9, 15)), NO_STEPS),
        (QRNN_OF_IDS, with_state(left=torch.zeros(2, 2).long()), "state.left has the shape (2, 2), expected (2, 1)"),
        (
            QRNN_OF_IDS,
            with_state(left=torch.zeros(2, 1)),
            "state.left is torch.float32, expected rows of weights.tables: torch.int64",
        ),
        (CONV, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (CONV, with_weights(bias=torch.zeros(6)), "weights.bias has the shape (6,), expected (5,)"),
        (CONV, with_weights(activation="step"), f"weights.activation is 'step', {KNOWN}"),
        (
            CONV,
            with_weights(activation="glu"),
            "weights.filters has 5 maps, expected an even number for 'glu': values, then gates",
        ),
        (CONV, with_weights(embedding=torch.zeros(9, 4)), "weights.embedding has the shape (9, 4), expected (9, 3)"),
        (CONV, with_weights(tables=torch.zeros(2, 9, 5)), "weights.tables has the shape (2, 9, 5), expected (3, 9, 5)"),
        (CONV, with_weights(tables=torch.zeros(3, 9, 6)), "weights.tables has the shape (3, 9, 6), expected (3, 9, 5)"),
        (CONV, with_weights(tables=torch.zeros(3, 0, 5)), NO_PADDING),
        (CONV, with_weights(embedding=torch.zeros(9, 3)), "x.data has the shape (4, 3), expected (4,)"),
        (
            CONV_OF_IDS,
            with_weights(embedding=torch.zeros(9, 3)),
            "weights.embedding must be None because weights.tables has a value",
        ),
        (CONV_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids: torch.int32 or torch.int64"),
        (CONV, with_weights(filters=torch.zeros(0, 3, 5)), LEAST),
        (CONV, with_weights(dilation=0), LEAST),
        (CONV, with_weights(stride=0), LEAST),
        (CONV, with_weights(left=-1), LEAST),
        (CONV, with_weights(right=-1), LEAST),
        (CONV, with_state(left=torch.zeros(2, 3, 3)), "state.left has the shape (2, 3, 3), expected (2, 2, 3)"),
        (CONV, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (CONV, with_state(left=torch.zeros(9, 3, 3), slots=SLOTS), "state.left has the shape (9, 3, 3), expected (9, 2, 3)"),
        (CONV, with_state(slots=SLOTS, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (CONV, with_state(sources=SLOTS), NO_SLOTS),
    ],
    ids=str,
)
def test_invalid_argument_is_named_with_its_expected_value(form: Form, broken: Break, message: str) -> None:
    arguments = broken(form.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError) as caught:
        form.run(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "form, broken, message",
    [
        (SRU, with_weights(cell=None), "weights.cell is (10, torch.float32) forward and None backward, expected the same"),
        (SRU, with_weights(tanh=True), "weights.tanh is False forward and True backward, expected the same"),
        (COLUMNS, with_weights(skip_from=None), "weights.skip_from is True forward and False backward, expected the same"),
        (
            SRU_OF_IDS,
            with_weights(table=torch.zeros(9, 20)),
            "weights.table is (11, 20, torch.float32) forward and (9, 20, torch",
        ),
        (
            QRNN,
            with_weights(input=torch.zeros(1, 3, 15)),
            "weights.input is (2, 3, 15, torch.float32) forward and (1, 3, 15, torch",
        ),
        (QRNN, with_weights(input=torch.zeros(2, 4, 15)), "x.data has the shape (4, 3), expected (4, 4)"),
        (SRU, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
    ],
    ids=str,
)
def test_inconsistent_directions_are_refused(form: Form, broken: Break, message: str) -> None:
    arguments = form.arguments([3, 1], 5, 3)
    backward = broken(arguments)
    states = None if backward.weights is not arguments.weights else (arguments.state, backward.state)
    with pytest.raises(ContractError) as caught:
        form.bidirectional(arguments.x, (arguments.weights, backward.weights), states)
    assert str(caught.value).startswith(message)


def test_directions_may_skip_from_different_columns() -> None:
    x, weights, _ = COLUMNS.arguments([3, 1], 5, 3)
    assert COLUMNS.bidirectional(x, (weights, replace(weights, skip_from=0))).steps is not None


@pytest.mark.parametrize("with_a_state", [False, True])
def test_empty_window_raises_contract_error(with_a_state: bool) -> None:
    x, weights, state = with_weights(input=torch.zeros(0, 3, 15))(QRNN.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError, match=r"weights\.input|window"):
        QRNN.run(x, weights, state if with_a_state else None)


def test_projection_with_gate_inputs_raises_contract_error() -> None:
    x, weights, state = SRU.gated(SRU.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError, match=r"weights\.projection"):
        SRU.run(x, replace(weights, projection=torch.zeros(3, 2)), state)


@pytest.mark.parametrize(
    "form, broken",
    [
        *((form, with_x(data=torch.tensor(1.0))) for form in FORMS),
        *((form, with_x(offsets=torch.zeros(0))) for form in FORMS),
        (LSTM, with_weights(recurrent=torch.tensor(1.0))),
        (GRU, with_weights(recurrent=torch.tensor(1.0))),
        (SRU, with_weights(bias=torch.tensor(1.0))),
        (QRNN, with_weights(bias=torch.tensor(1.0))),
        (CONV, with_weights(filters=torch.tensor(1.0))),
    ],
    ids=str,
)
def test_scalar_array_raises_contract_error(form: Form, broken: Break) -> None:
    x, weights, _ = broken(form.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError):
        form.run(x, weights)


@every_family
@pytest.mark.parametrize("offsets", [[0, 3, 9], [0, 3, 3], [1, 3, 4], [0, 5, 4]], ids=str)
def test_invalid_offsets_raise_contract_error(form: Form, offsets: list[int]) -> None:
    arguments = with_x(offsets=torch.tensor(offsets))(form.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError, match="offsets"):
        form.run(*arguments)


@every_family
def test_unknown_backend_is_refused(form: Form) -> None:
    known = ", ".join(backend.name for backend in form.backends)
    with pytest.raises(ContractError, match=f"unknown backend 'abacus', expected one of {known}"):
        form.run(*form.arguments([3], 5, 3), backend="abacus")


@every_family
def test_requested_backend_is_chosen(form: Form) -> None:
    for backend in form.backends:
        choice = form.module.choice(form.arguments([1], 5, 3).weights, backend.name)
        assert choice.backend == backend
        assert choice.why == (f"{backend.name}: requested by name",)


def test_pinned_choice_passes_over_backends_that_adapt() -> None:
    problem = Problem(torch.device("cpu"), torch.float32, 5)
    run, accepts = Mock(), Mock(return_value=None)
    adapts, fixed = Backend("adapts", run, accepts, pinned=False), Backend("fixed", run, accepts)
    assert choose((adapts, fixed), problem).backend is adapts
    pinned = choose((adapts, fixed), problem, PINNED)
    assert pinned.backend is fixed
    assert pinned.why == ("adapts: the bits of a row may change with the number of rows in its batch", "fixed: chosen")


@every_family
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_explain_ends_with_the_chosen_backend(form: Form, dtype: str) -> None:
    lines = explain(form.family, device="cpu", dtype=dtype, hidden=151).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [backend.name for backend in form.backends[: len(lines)]]
    assert lines[-1].endswith(": chosen")
    assert not any(line.endswith(": chosen") for line in lines[:-1])


@every_family
def test_explain_names_the_backend_that_runs(form: Form) -> None:
    chosen = form.module.choice(form.arguments([1], 151, 3).weights)
    assert "\n".join(chosen.why) == explain(form.family, device="cpu", dtype="float32", hidden=151)


def test_explain_refuses_an_unknown_family() -> None:
    with pytest.raises(ContractError, match=f"unknown kernel family 'gnu', expected one of {', '.join(FAMILIES)}"):
        explain("gnu", device="cpu", dtype="float32", hidden=5)


@pytest.mark.parametrize("device, dtype", [("cpu", "float31"), ("toaster", "float32")])
def test_explain_refuses_an_unknown_device_or_dtype(device: str, dtype: str) -> None:
    with pytest.raises(ContractError, match=r"float31|toaster"):
        explain("lstm", device=device, dtype=dtype, hidden=5)


def test_backend_without_a_variant_is_refused_by_name() -> None:
    arguments = Form("lstm", peepholes=True).arguments([3], 5, 3)
    with pytest.raises(ContractError, match="the backend 'cpu' does not run peepholes"):
        Form("lstm").run(*arguments, backend="cpu")
