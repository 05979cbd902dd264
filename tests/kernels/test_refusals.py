"""What does not fit is refused by name before a kernel runs, and a choice of backend says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.backend import FAMILIES, explain
from kernels.contract import ContractError
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import Given

Break = Callable[[Given], Given]

LSTM, GRU, SRU, QRNN = (Form(family) for family in ("lstm", "gru", "sru", "qrnn"))
COLUMNS = Form("sru", skip="columns")
SRU_OF_IDS, QRNN_OF_IDS = Form("sru", ids=True), Form("qrnn", ids=True)
CONV, CONV_OF_IDS = Form("conv", width=3, left=2), Form("conv", width=3, left=2, ids="tables")

every_family = pytest.mark.parametrize("form", [Form(family) for family in FAMILIES], ids=str)


def with_x(**changes: Any) -> Break:
    return lambda given: given._replace(x=replace(given.x, **changes))


def with_weights(**changes: Any) -> Break:
    return lambda given: given._replace(weights=replace(given.weights, **changes))


def with_state(**changes: Any) -> Break:
    return lambda given: given._replace(state=replace(given.state, **changes))


TOGETHER = "weights.input and weights.bias are given together or not at all"
KNOWN = "known are none, relu, tanh, gelu, glu, gated_tanh"
OF_IDS = "is given although the data are ids"
BLOCKS = "is given although the data already are the product with weights.input"
TWICE = "weights.skip_from is given although the skip is a block of its own"
NO_STEPS = "weights.tables has a window of 0 steps, expected at least the present one"
NO_PADDING = "weights.tables has no rows, expected at least the one of padding"
PLACES = torch.tensor([3, 0])
NO_SLOTS = "state.sources is given although state.slots is not"
LEAST = "width, dilation and stride are at least 1, left and right at least 0"


@pytest.mark.parametrize(
    "form, broken, says",
    [
        (LSTM, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (LSTM, with_x(data=torch.zeros(4)), "x.data has the shape (4,), expected (4, 3)"),
        (LSTM, with_x(offsets=torch.zeros(3, 1)), "x.offsets has the shape (3, 1), expected (3,)"),
        (LSTM, with_weights(recurrent=torch.zeros(5, 15)), "weights.recurrent has the shape (5, 15), expected (5, 20)"),
        (LSTM, with_weights(input=torch.zeros(3, 16)), "weights.input has the shape (3, 16), expected (3, 20)"),
        (LSTM, with_weights(bias=torch.zeros(5)), "weights.bias has the shape (5,), expected (20,)"),
        (LSTM, with_weights(input=None, bias=None), "x.data has the shape (4, 3), expected (4, 20)"),
        (LSTM, with_weights(bias=None), TOGETHER),
        (LSTM, with_weights(input=None), TOGETHER),
        (LSTM, with_state(hidden=torch.zeros(1, 5)), "state.hidden has the shape (1, 5), expected (2, 5)"),
        (LSTM, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (LSTM, with_state(slots=PLACES, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (LSTM, with_state(sources=PLACES), NO_SLOTS),
        (GRU, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (GRU, with_weights(recurrent=torch.zeros(5, 20)), "weights.recurrent has the shape (5, 20), expected (5, 15)"),
        (GRU, with_weights(input=torch.zeros(3, 20)), "weights.input has the shape (3, 20), expected (3, 15)"),
        (GRU, with_weights(bias=torch.zeros(5)), "weights.bias has the shape (5,), expected (15,)"),
        (GRU, with_weights(recurrent_bias=torch.zeros(15)), "weights.recurrent_bias has the shape (15,), expected (5,)"),
        (GRU, with_weights(input=None, bias=None), "x.data has the shape (4, 3), expected (4, 15)"),
        (GRU, with_weights(bias=None), TOGETHER),
        (GRU, with_state(hidden=torch.zeros(1, 5)), "state.hidden has the shape (1, 5), expected (2, 5)"),
        (GRU, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (GRU, with_state(hidden=torch.zeros(9, 6), slots=PLACES), "state.hidden has the shape (9, 6), expected (9, 5)"),
        (GRU, with_state(slots=PLACES, sources=torch.zeros(2, 1)), "state.sources has the shape (2, 1), expected (2,)"),
        (GRU, with_state(sources=PLACES), NO_SLOTS),
        (SRU, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (SRU, with_weights(input=torch.zeros(3, 16)), "weights.input has the shape (3, 16), expected 3 or 4 blocks of 5"),
        (SRU, with_weights(input=None), "x.data has the shape (4, 3), expected 3 or 4 blocks of 5"),
        (SRU, with_weights(bias=torch.zeros(11)), "weights.bias has the shape (11,), expected (10,)"),
        (SRU, with_weights(bias=torch.zeros(2, 5)), "weights.bias has the shape (2, 5), expected (2,)"),
        (SRU, with_weights(cell=torch.zeros(5)), "weights.cell has the shape (5,), expected (10,)"),
        (SRU, with_weights(skip_from=0), TWICE),
        (SRU, with_weights(projection=torch.zeros(3, 2)), "weights.projection has the shape (3, 2), expected (3, 3)"),
        (SRU, with_weights(projection=torch.zeros(2, 3)), "x.data has the shape (4, 3), expected (4, 2)"),
        (COLUMNS, with_weights(skip_from=4), "weights.skip_from is 4 of 8 columns, 5 are needed"),
        (COLUMNS, with_weights(skip_from=-1), "weights.skip_from is -1 of 8 columns, 5 are needed"),
        (SRU, with_weights(norm=torch.zeros(2, 4)), "weights.norm has the shape (2, 4), expected (2, 3)"),
        (SRU, with_weights(input=None, norm=torch.zeros(2, 20)), f"weights.norm {BLOCKS}"),
        (COLUMNS, with_weights(input=None), f"weights.skip_from {BLOCKS}"),
        (SRU, with_weights(table=torch.zeros(9, 20)), f"weights.input {OF_IDS}"),
        (
            SRU_OF_IDS,
            with_weights(table=torch.zeros(9, 12)),
            "weights.table has the shape (9, 12), expected 3 or 4 blocks of 5",
        ),
        (SRU_OF_IDS, with_weights(projection=torch.zeros(3, 2)), f"weights.projection {OF_IDS}"),
        (SRU_OF_IDS, with_weights(skip_from=0), f"weights.skip_from {OF_IDS}"),
        (SRU_OF_IDS, with_weights(norm=torch.zeros(2, 3)), f"weights.norm {OF_IDS}"),
        (SRU_OF_IDS, with_x(data=torch.zeros(4, 1).int()), "x.data has the shape (4, 1), expected (4,)"),
        (SRU_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids, torch.int32 or torch.int64"),
        (SRU, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (SRU, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (SRU, with_state(cell=torch.zeros(9, 6), slots=PLACES), "state.cell has the shape (9, 6), expected (9, 5)"),
        (SRU, with_state(slots=PLACES, sources=torch.tensor(0)), "state.sources has the shape (), expected (2,)"),
        (SRU, with_state(sources=PLACES), NO_SLOTS),
        (QRNN, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (QRNN, with_weights(input=torch.zeros(2, 3, 10)), "weights.input has the shape (2, 3, 10), expected (2, 3, 15)"),
        (QRNN, with_weights(input=None), "x.data has the shape (4, 3), expected (4, 15)"),
        (QRNN, with_weights(bias=torch.zeros(16)), "weights.bias has the shape (16,), expected (15,)"),
        (QRNN, with_weights(pooling="of"), "weights.pooling is 'of'; known are f, fo, ifo"),
        (QRNN, with_state(cell=torch.zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
        (QRNN, with_state(left=torch.zeros(2, 2, 3)), "state.left has the shape (2, 2, 3), expected (2, 1, 3)"),
        (QRNN, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (QRNN, with_state(left=torch.zeros(9, 1, 3), slots=PLACES), "state.left has the shape (9, 1, 3), expected (2, 1, 3)"),
        (QRNN, with_state(slots=PLACES, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (QRNN, with_state(sources=PLACES), NO_SLOTS),
        (QRNN, with_weights(tables=torch.zeros(2, 9, 15)), f"weights.input {OF_IDS}"),
        (QRNN_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids, torch.int32 or torch.int64"),
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
            "state.left is torch.float32, expected rows of weights.tables, torch.int64",
        ),
        (CONV, with_x(data=torch.zeros(4, 2)), "x.data has the shape (4, 2), expected (4, 3)"),
        (CONV, with_weights(bias=torch.zeros(6)), "weights.bias has the shape (6,), expected (5,)"),
        (CONV, with_weights(activation="step"), f"weights.activation is 'step'; {KNOWN}"),
        (CONV, with_weights(activation="glu"), "weights.filters has 5 maps, expected as many gates as values for 'glu'"),
        (CONV, with_weights(embedding=torch.zeros(9, 4)), "weights.embedding has the shape (9, 4), expected (9, 3)"),
        (CONV, with_weights(tables=torch.zeros(2, 9, 5)), "weights.tables has the shape (2, 9, 5), expected (3, 9, 5)"),
        (CONV, with_weights(tables=torch.zeros(3, 9, 6)), "weights.tables has the shape (3, 9, 6), expected (3, 9, 5)"),
        (CONV, with_weights(tables=torch.zeros(3, 0, 5)), NO_PADDING),
        (CONV, with_weights(embedding=torch.zeros(9, 3)), "x.data has the shape (4, 3), expected (4,)"),
        (CONV_OF_IDS, with_weights(embedding=torch.zeros(9, 3)), "weights.embedding is given although weights.tables are"),
        (CONV_OF_IDS, with_x(data=torch.zeros(4)), "x.data is torch.float32, expected ids, torch.int32 or torch.int64"),
        (CONV, with_weights(filters=torch.zeros(0, 3, 5)), LEAST),
        (CONV, with_weights(dilation=0), LEAST),
        (CONV, with_weights(stride=0), LEAST),
        (CONV, with_weights(left=-1), LEAST),
        (CONV, with_weights(right=-1), LEAST),
        (CONV, with_state(left=torch.zeros(2, 3, 3)), "state.left has the shape (2, 3, 3), expected (2, 2, 3)"),
        (CONV, with_state(slots=torch.tensor([0])), "state.slots has the shape (1,), expected (2,)"),
        (CONV, with_state(left=torch.zeros(9, 3, 3), slots=PLACES), "state.left has the shape (9, 3, 3), expected (9, 2, 3)"),
        (CONV, with_state(slots=PLACES, sources=torch.tensor([0])), "state.sources has the shape (1,), expected (2,)"),
        (CONV, with_state(sources=PLACES), NO_SLOTS),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_with_what_it_is_and_what_it_should_be(form: Form, broken: Break, says: str) -> None:
    given = broken(form.given([3, 1], 5, 3))
    with pytest.raises(ContractError) as caught:
        form.run(*given)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "form, broken, says",
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
def test_two_directions_that_do_not_fit_the_data_or_each_other_are_named(form: Form, broken: Break, says: str) -> None:
    given = form.given([3, 1], 5, 3)
    backward = broken(given)
    states = None if backward.weights is not given.weights else (given.state, backward.state)
    with pytest.raises(ContractError) as caught:
        form.both(given.x, (given.weights, backward.weights), states)
    assert str(caught.value).startswith(says)


def test_of_two_directions_the_own_columns_may_begin_in_different_places() -> None:
    x, weights, _ = COLUMNS.given([3, 1], 5, 3)
    assert COLUMNS.both(x, (weights, replace(weights, skip_from=0))).steps is not None


@pytest.mark.parametrize("with_a_state", [False, True])
def test_a_window_without_steps_is_a_contract_error(with_a_state: bool) -> None:
    x, weights, state = with_weights(input=torch.zeros(0, 3, 15))(QRNN.given([3, 1], 5, 3))
    with pytest.raises(ContractError, match=r"weights\.input|window"):
        QRNN.run(x, weights, state if with_a_state else None)


def test_a_projection_before_gate_inputs_is_a_contract_error() -> None:
    x, weights, state = SRU.gated(SRU.given([3, 1], 5, 3))
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
def test_an_array_without_any_size_is_a_contract_error_too(form: Form, broken: Break) -> None:
    x, weights, _ = broken(form.given([3, 1], 5, 3))
    with pytest.raises(ContractError):
        form.run(x, weights)


@every_family
@pytest.mark.parametrize("offsets", [[0, 3, 9], [0, 3, 3], [1, 3, 4], [0, 5, 4]], ids=str)
def test_offsets_that_do_not_lay_out_the_tokens_are_a_contract_error(form: Form, offsets: list[int]) -> None:
    given = with_x(offsets=torch.tensor(offsets))(form.given([3, 1], 5, 3))
    with pytest.raises(ContractError, match="offsets"):
        form.run(*given)


@every_family
def test_an_unknown_backend_is_refused_with_the_known_ones(form: Form) -> None:
    known = ", ".join(backend.name for backend in form.backends)
    with pytest.raises(ContractError, match=f"unknown backend 'abacus'; known are {known}"):
        form.run(*form.given([3], 5, 3), backend="abacus")


@every_family
def test_a_backend_asked_for_by_name_is_taken(form: Form) -> None:
    for backend in form.backends:
        taken = form.module.choice(form.given([1], 5, 3).weights, backend.name)
        assert taken.backend == backend
        assert taken.why == (f"{backend.name}: asked for by name",)


@every_family
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_explain_says_of_each_backend_considered_why_and_ends_with_the_chosen(form: Form, dtype: str) -> None:
    lines = explain(form.family, device="cpu", dtype=dtype, hidden=151).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [backend.name for backend in form.backends[: len(lines)]]
    assert lines[-1].endswith(": chosen")
    assert not any(line.endswith(": chosen") for line in lines[:-1])


@every_family
def test_explain_names_the_backend_that_runs(form: Form) -> None:
    chosen = form.module.choice(form.given([1], 151, 3).weights)
    assert "\n".join(chosen.why) == explain(form.family, device="cpu", dtype="float32", hidden=151)


def test_explain_refuses_an_unknown_family_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match=f"unknown kernel family 'gnu'; known are {', '.join(FAMILIES)}"):
        explain("gnu", device="cpu", dtype="float32", hidden=5)


@pytest.mark.parametrize("device, dtype", [("cpu", "float31"), ("toaster", "float32")])
def test_explain_refuses_a_device_or_a_dtype_that_does_not_exist(device: str, dtype: str) -> None:
    with pytest.raises(ContractError, match=r"float31|toaster"):
        explain("lstm", device=device, dtype=dtype, hidden=5)
