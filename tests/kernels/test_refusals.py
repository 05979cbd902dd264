"""Invalid arguments are named with their expected values before a kernel runs, and a choice of backend has reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kernels.backend import FAMILIES, PINNED, Backend, Problem, choose, explain
from kernels.conv.types import ConvBlock, ConvState, ConvWeights
from kernels.ragged import ContractError, Ragged
from tests.kernels.families import FORMS, Form
from tests.kernels.inputs import Arguments
from tests.kernels.stacks import Maker, Stack

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


def shape(name: str, actual: str, expected: str) -> str:
    return f"{name} has the shape {actual}, expected {expected}"


def value(name: str, actual: str, expected: str) -> str:
    return f"{name} is {actual}, expected {expected}"


zeros, SLOTS = torch.zeros, torch.tensor([3, 0])
INPUT_AND_BIAS = "weights.input and weights.bias belong together: pass both, or neither"
OF_IDS = "must be None because the data are ids"
BLOCKS = "must be None because the data are already the product with weights.input"
LEAST = "width, dilation and stride must be at least 1, left and right at least 0"
NO_SLOTS = "state.sources requires state.slots: pass both, or neither"
NO_IDS = value("x.data", "torch.float32", "ids: torch.int32 or torch.int64")
NO_ROWS = "weights.tables has no rows, expected at least the row of padding"
NO_WINDOW = "weights.tables has a window of 0 steps, expected at least the present step"
NO_LINES = value("state.left", "torch.float32", "rows of weights.tables: torch.int64")
BEYOND = value("weights.skip_from", "4", "0 to 3: the skip takes 5 of the data's 8 columns")
ODD_MAPS = "weights.filters has 5 maps, expected an even number for 'glu': values, then gates"
TWO_WAYS = "weights.embedding must be None because weights.tables has a value"
ACTIVATIONS = "one of none, relu, tanh, gelu"


@pytest.mark.parametrize(
    "form, broken, message",
    [
        (LSTM, with_x(data=zeros(4, 2)), shape("x.data", "(4, 2)", "(4, 3)")),
        (LSTM, with_x(offsets=zeros(3, 1)), shape("x.offsets", "(3, 1)", "(3,)")),
        (LSTM, with_weights(recurrent=zeros(5, 15)), shape("weights.recurrent", "(5, 15)", "(5, 20)")),
        (LSTM, with_weights(input=zeros(3, 16)), shape("weights.input", "(3, 16)", "(3, 20)")),
        (LSTM, with_weights(bias=zeros(5)), shape("weights.bias", "(5,)", "(20,)")),
        (LSTM, with_weights(input=None, bias=None), shape("x.data", "(4, 3)", "(4, 20)")),
        (LSTM, with_weights(bias=None), INPUT_AND_BIAS),
        (LSTM, with_weights(input=None), INPUT_AND_BIAS),
        (LSTM, with_weights(table=zeros(9, 20)), f"weights.input {OF_IDS}"),
        (LSTM, with_weights(recurrent_norm=zeros(2, 5)), shape("weights.recurrent_norm", "(2, 5)", "(2, 20)")),
        (LSTM, with_state(hidden=zeros(1, 5)), shape("state.hidden", "(1, 5)", "(2, 5)")),
        (LSTM, with_state(cell=zeros(2, 6)), shape("state.cell", "(2, 6)", "(2, 5)")),
        (LSTM, with_state(slots=SLOTS, sources=SLOTS[:1]), shape("state.sources", "(1,)", "(2,)")),
        (LSTM, with_state(slots=SLOTS[:1]), shape("state.slots", "(1,)", "(2,)")),
        (LSTM, with_state(hidden=zeros(9, 6), slots=SLOTS), shape("state.hidden", "(9, 6)", "(9, 5)")),
        (LSTM, with_state(sources=SLOTS), NO_SLOTS),
        (GRU, with_weights(recurrent_bias=zeros(15)), shape("weights.recurrent_bias", "(15,)", "(5,)")),
        (SRU, with_weights(input=zeros(3, 16)), shape("weights.input", "(3, 16)", "3 or 4 blocks of 5 columns")),
        (SRU, with_weights(input=None), shape("x.data", "(4, 3)", "3 or 4 blocks of 5 columns")),
        (SRU, with_weights(skip_from=0), "weights.skip_from must be None because weights.input has a skip block"),
        (SRU, with_weights(projection=zeros(3, 2)), shape("weights.projection", "(3, 2)", "(3, 3)")),
        (COLUMNS, with_weights(skip_from=4), BEYOND),
        (SRU, with_weights(input=None, norm=zeros(2, 20)), f"weights.norm {BLOCKS}"),
        (SRU_OF_IDS, with_weights(table=zeros(9, 12)), shape("weights.table", "(9, 12)", "3 or 4 blocks of 5 columns")),
        (SRU_OF_IDS, with_weights(projection=zeros(3, 2)), f"weights.projection {OF_IDS}"),
        (SRU_OF_IDS, with_x(data=zeros(4, 1).int()), shape("x.data", "(4, 1)", "(4,)")),
        (SRU_OF_IDS, with_x(data=zeros(4)), NO_IDS),
        (QRNN, with_weights(input=zeros(2, 3, 10)), shape("weights.input", "(2, 3, 10)", "(2, 3, 15)")),
        (QRNN, with_weights(pooling="of"), value("weights.pooling", "'of'", "one of f, fo, ifo")),
        (QRNN, with_state(left=zeros(2, 2, 3)), shape("state.left", "(2, 2, 3)", "(2, 1, 3)")),
        (QRNN_OF_IDS, with_weights(tables=zeros(2, 9, 10)), shape("weights.tables", "(2, 9, 10)", "(2, 9, 15)")),
        (QRNN_OF_IDS, with_weights(tables=zeros(2, 0, 15)), NO_ROWS),
        (QRNN_OF_IDS, with_weights(tables=zeros(0, 9, 15)), NO_WINDOW),
        (QRNN_OF_IDS, with_state(left=zeros(2, 1)), NO_LINES),
        (CONV, with_weights(activation="step"), value("weights.activation", "'step'", f"{ACTIVATIONS}, glu, gated_tanh")),
        (CONV, with_weights(activation="glu"), ODD_MAPS),
        (CONV, with_weights(tables=zeros(3, 9, 6)), shape("weights.tables", "(3, 9, 6)", "(3, 9, 5)")),
        (CONV_OF_IDS, with_weights(embedding=zeros(9, 3)), TWO_WAYS),
        (CONV, with_weights(filters=zeros(0, 3, 5)), LEAST),
        *(
            (CONV, with_weights(**{name: value}), LEAST)
            for name, value in (("dilation", 0), ("stride", 0), ("left", -1), ("right", -1))
        ),
        (CONV, with_state(left=zeros(2, 3, 3)), shape("state.left", "(2, 3, 3)", "(2, 2, 3)")),
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
        (QRNN, with_weights(input=zeros(2, 4, 15)), "x.data has the shape (4, 3), expected (4, 4)"),
        (SRU, with_state(cell=zeros(2, 6)), "state.cell has the shape (2, 6), expected (2, 5)"),
    ],
    ids=str,
)
def test_inconsistent_directions_are_refused(form: Form, broken: Break, message: str) -> None:
    arguments = form.arguments([3, 1], 5, 3)
    backward = broken(arguments)
    states = None if backward.weights is not arguments.weights else (arguments.state, backward.state)
    with pytest.raises(ContractError) as caught:
        form.bidirectional(arguments.x, (arguments.weights, backward.weights), states)
    assert str(caught.value) == message


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scalar_array_is_refused(form: Form) -> None:
    scalar = torch.tensor(1.0)
    first = next(name for name in ("recurrent", "filters", "bias") if hasattr(form.arguments([1], 1, 1).weights, name))
    for broken in (with_x(data=scalar), with_x(offsets=zeros(0)), with_weights(**{first: scalar})):
        x, weights, _ = broken(form.arguments([3, 1], 5, 3))
        with pytest.raises(ContractError):
            form.run(x, weights)


@every_family
@pytest.mark.parametrize("offsets", [[0, 3, 9], [0, 3, 3], [1, 3, 4], [0, 5, 4]], ids=str)
def test_invalid_offsets_raise_contract_error(form: Form, offsets: list[int]) -> None:
    arguments = with_x(offsets=torch.tensor(offsets))(form.arguments([3, 1], 5, 3))
    with pytest.raises(ContractError, match="offsets"):
        form.run(*arguments)


# Stacks of convolutions.

Change = Callable[[Stack], Stack]
ChangeBlock = Callable[[ConvBlock], ConvBlock]


def linear(inputs: int, outputs: int, **others: Any) -> ConvWeights:
    return ConvWeights(zeros(1, inputs, outputs), zeros(outputs), **others)


def second(change: ChangeBlock) -> Change:
    """Change the second block of a stack, which has a residual. Its states are left out."""
    return lambda stack: stack._replace(blocks=(stack.blocks[0], change(stack.blocks[1])), states=None)


def with_block(**changes: Any) -> Change:
    return second(lambda block: replace(block, **changes))


def with_last_layer(**changes: Any) -> Change:
    return second(lambda block: replace(block, layers=(block.layers[0], replace(block.layers[1], **changes))))


def with_states(**changes: Any) -> Change:
    return lambda stack: stack._replace(states=tuple(replace(state, **changes) for state in stack.states or ()))


def with_contexts(*left: int) -> Change:
    """Give each layer a state of this number of steps."""
    states = tuple(ConvState(zeros(2, steps, columns)) for steps, columns in zip(left, (3, 3, 4, 4), strict=False))
    return lambda stack: stack._replace(states=states)


def columns(layer: int, taken: int, given: int) -> str:
    return f"blocks[1].layers[{layer}] takes {taken} columns and its input has {given}"


NO_COLUMNS = "blocks[1].projection maps None to 5 columns, expected 4 to 5"
LATE_IDS = "blocks[1].layers[0] takes ids, which only the first layer of a stack can do"
NO_LAYERS = "blocks is empty, or has a block without layers: a stack needs at least one layer in every block"
NO_RESIDUAL = "blocks[1] has a projection or an activation but residual is False: set residual"
NOT_LINEAR = "blocks[1].projection must have width 1 and no padding, stride or activation"
NO_STEPS = "blocks[1] has a residual and layers[1] does not keep the steps: use stride 1 and left + right = reach - 1"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda stack: stack._replace(blocks=()), NO_LAYERS),
        (lambda stack: stack._replace(blocks=(*stack.blocks, ConvBlock(()))), NO_LAYERS),
        (lambda stack: stack._replace(x=Ragged(stack.x.data[:, :2], stack.x.offsets)), shape("x.data", "(4, 2)", "(4, 3)")),
        (lambda stack: stack._replace(blocks=(stack.blocks[0],) * 2, states=None), columns(0, 3, 4)),
        (second(lambda block: replace(block, layers=(*block.layers[::-1], block.layers[0]))), columns(1, 4, 5)),
        (second(lambda block: replace(block, layers=(Maker(4).causal(4, 2, ids="tables"), block.layers[1]))), LATE_IDS),
        (with_block(residual=False), NO_RESIDUAL),
        (with_block(projection=None), "blocks[1] adds 4 columns to 5: add a projection"),
        (with_block(activation="glu"), value("blocks[1].activation", "'glu'", ACTIVATIONS)),
        (with_block(projection=linear(4, 5, embedding=zeros(9, 4))), NO_COLUMNS),
        (with_block(projection=ConvWeights(zeros(2, 4, 5), zeros(5), left=1)), NOT_LINEAR),
        *((with_block(projection=linear(4, 5, **{name: 2})), NOT_LINEAR) for name in ("left", "stride")),
        *((with_last_layer(**{name: value}), NO_STEPS) for name, value in (("stride", 2), ("left", 0), ("right", 1))),
        (with_contexts(1, 2, 1, 2), shape("states[3].left", "(2, 2, 4)", "(2, 1, 4)")),
        (with_states(slots=SLOTS[:1]), shape("states[0].slots", "(1,)", "(2,)")),
        (with_states(sources=SLOTS), "states[0].sources requires states[0].slots: pass both, or neither"),
    ],
)
def test_blocks_of_a_stack_must_fit_together(change: Change, message: str) -> None:
    maker = Maker(3)
    first = ConvBlock((maker.causal(3, 2), maker.causal(4, 3)))
    layers = maker.causal(4, 2), maker.causal(5, 2)
    residual = ConvBlock(layers, residual=True, projection=linear(4, 5), activation="relu")
    with pytest.raises(ContractError) as caught:
        change(maker.stack([3, 1], first, residual, with_states=True)).run()
    assert str(caught.value) == message


# The choice of a backend.


@every_family
def test_backend_is_requested_by_name(form: Form) -> None:
    for backend in form.backends:
        choice = form.module.choice(form.arguments([1], 5, 3).weights, backend.name)
        assert (choice.backend, choice.why) == (backend, (f"{backend.name}: requested by name",))
    known = ", ".join(backend.name for backend in form.backends)
    with pytest.raises(ContractError, match=f"unknown backend 'abacus', expected one of {known}"):
        form.run(*form.arguments([3], 5, 3), backend="abacus")


def test_pinned_choice_passes_over_backends_that_adapt() -> None:
    problem = Problem(torch.device("cpu"), torch.float32, 5)
    run, accepts = Mock(), Mock(return_value=None)
    adapts, fixed = Backend("adapts", run, accepts, pinned=False), Backend("fixed", run, accepts)
    assert choose((adapts, fixed), problem).backend is adapts
    pinned = choose((adapts, fixed), problem, PINNED)
    assert pinned.backend is fixed
    assert pinned.why == ("adapts: the bits of a row may change with the number of rows in its batch", "fixed: chosen")


@every_family
def test_explain_ends_with_the_backend_that_runs(form: Form) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        lines = explain(form.family, device="cpu", dtype=dtype, hidden=151).splitlines()
        assert [line.partition(": ")[0] for line in lines] == [backend.name for backend in form.backends[: len(lines)]]
        assert [line.endswith(": chosen") for line in lines] == [False] * (len(lines) - 1) + [True]
    chosen = form.module.choice(form.arguments([1], 151, 3).weights)
    assert "\n".join(chosen.why) == explain(form.family, device="cpu", dtype="float32", hidden=151)


@pytest.mark.parametrize(
    "family, device, dtype, message",
    [
        ("gnu", "cpu", "float32", f"unknown kernel family 'gnu', expected one of {', '.join(FAMILIES)}"),
        ("lstm", "cpu", "float31", "float31"),
        ("lstm", "toaster", "float32", "toaster"),
    ],
)
def test_explain_refuses_what_it_does_not_know(family: str, device: str, dtype: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        explain(family, device=device, dtype=dtype, hidden=5)


def test_backend_without_a_variant_is_refused_by_name() -> None:
    arguments = Form("lstm", peepholes=True).arguments([3], 5, 3)
    with pytest.raises(ContractError, match="the backend 'cpu' does not run peepholes"):
        Form("lstm").run(*arguments, backend="cpu")
