"""The checks of stacks: layers, residuals and states that do not fit together raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.conv.types import ConvBlock, ConvState, ConvWeights
from kernels.ragged import ContractError, Ragged
from tests.kernels.stacks import Maker, Stack


def blocks() -> tuple[Maker, ConvBlock, ConvBlock]:
    """Return a block from 3 to 4 columns and a block from 4 to 5 columns with a residual and its projection."""
    maker = Maker(3)
    first = ConvBlock((maker.causal(3, 2), maker.causal(4, 3)))
    residual = ConvBlock((maker.causal(4, 2), maker.causal(5, 2)), residual=True, projection=linear(4, 5), activation="relu")
    return maker, first, residual


def linear(inputs: int, outputs: int) -> ConvWeights:
    return ConvWeights(torch.zeros(1, inputs, outputs), torch.zeros(outputs))


def error_of_stack(change: Callable[[Stack], Stack]) -> str:
    """Return the error message of the changed stack."""
    maker, *both = blocks()
    with pytest.raises(ContractError) as caught:
        change(maker.stack([3, 1], *both, with_states=True)).run()
    return str(caught.value)


def error_of_residual(change: Callable[[ConvBlock], ConvBlock]) -> str:
    return error_of_stack(lambda stack: stack._replace(blocks=(stack.blocks[0], change(stack.blocks[1])), states=None))


def test_stack_without_layers_is_rejected() -> None:
    expected = "blocks is empty, or has a block without layers: a stack needs at least one layer in every block"
    assert error_of_stack(lambda stack: stack._replace(blocks=())) == expected
    assert error_of_stack(lambda stack: stack._replace(blocks=(*stack.blocks, ConvBlock(())))) == expected


def test_columns_of_consecutive_layers_must_match() -> None:
    narrow = error_of_stack(lambda stack: stack._replace(x=Ragged(stack.x.data[:, :2], stack.x.offsets)))
    assert narrow == "x.data has the shape (4, 2), expected (4, 3)"
    swapped = error_of_stack(lambda stack: stack._replace(blocks=(stack.blocks[0],) * 2, states=None))
    assert swapped == "blocks[1].layers[0] takes 3 columns and its input has 4"
    within = error_of_residual(lambda block: replace(block, layers=(block.layers[1], block.layers[0], block.layers[0])))
    assert within == "blocks[1].layers[1] takes 4 columns and its input has 5"


@pytest.mark.parametrize("ids", ["embedding", "tables"])
def test_only_the_first_layer_takes_ids_without_residual(ids: str) -> None:
    maker = Maker(4)
    layer = maker.causal(4, 2, ids=ids)
    error = error_of_residual(lambda block: replace(block, layers=(layer, block.layers[1])))
    assert error == "blocks[1].layers[0] takes ids, which only the first layer of a stack can do"
    with pytest.raises(ContractError, match=r"blocks\[0\] has a residual and the data are ids"):
        maker.stack([3, 1], ConvBlock((layer,), residual=True)).run()
    with pytest.raises(ContractError, match=r"states\[0\] must be None because the data are ids"):
        maker.stack([3, 1], ConvBlock((layer,)), with_states=True).run()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda block: replace(block, residual=False),
            "blocks[1] has a projection or an activation but residual is False: set residual",
        ),
        (
            lambda block: replace(block, residual=False, projection=None),
            "blocks[1] has a projection or an activation but residual is False: set residual",
        ),
        (lambda block: replace(block, projection=None), "blocks[1] adds 4 columns to 5: add a projection"),
        (
            lambda block: replace(block, activation="glu"),
            "blocks[1].activation is 'glu', expected one of none, relu, tanh, gelu",
        ),
        (
            lambda block: replace(block, projection=linear(3, 5)),
            "blocks[1].projection maps 3 to 5 columns, expected 4 to 5",
        ),
        (
            lambda block: replace(block, projection=linear(4, 6)),
            "blocks[1].projection maps 4 to 6 columns, expected 4 to 5",
        ),
        (
            lambda block: replace(block, projection=replace(linear(4, 5), embedding=torch.zeros(9, 4))),
            "blocks[1].projection maps None to 5 columns, expected 4 to 5",
        ),
    ],
)
def test_residual_must_fit_the_output(change: Callable[[ConvBlock], ConvBlock], message: str) -> None:
    assert error_of_residual(change) == message


@pytest.mark.parametrize(
    "projection",
    [
        ConvWeights(torch.zeros(2, 4, 5), torch.zeros(5), left=1),
        replace(linear(4, 5), left=1),
        replace(linear(4, 5), stride=2),
        replace(linear(4, 5), activation="relu"),
    ],
)
def test_projection_must_be_a_linear_layer(projection: ConvWeights) -> None:
    error = error_of_residual(lambda block: replace(block, projection=projection))
    assert error == "blocks[1].projection must have width 1 and no padding, stride or activation"


@pytest.mark.parametrize("name, value", [("stride", 2), ("left", 0), ("right", 1)])
def test_residual_requires_layers_that_keep_steps(name: str, value: int) -> None:
    change: dict[str, Any] = {name: value}
    error = error_of_residual(lambda block: replace(block, layers=(block.layers[0], replace(block.layers[1], **change))))
    assert error == "blocks[1] has a residual and layers[1] does not keep the steps: use stride 1 and left + right = reach - 1"


@pytest.mark.parametrize(
    "states, message",
    [
        ((), "states has 0 entries, expected 4: one per layer"),
        ((1, 2, 1, 2), "states[3].left has the shape (2, 2, 4), expected (2, 1, 4)"),
        ((1, 1, 1, 1), "states[1].left has the shape (2, 1, 3), expected (2, 2, 3)"),
    ],
)
def test_every_layer_needs_a_state(states: tuple[int, ...], message: str) -> None:
    made = tuple(ConvState(torch.zeros(2, left, columns)) for left, columns in zip(states, (3, 3, 4, 4), strict=False))
    assert error_of_stack(lambda stack: stack._replace(states=made)) == message


def test_every_row_needs_a_slot() -> None:
    slots = torch.tensor([0])
    error = error_of_stack(
        lambda stack: stack._replace(states=tuple(replace(state, slots=slots) for state in stack.states or ()))
    )
    assert error == "states[0].slots has the shape (1,), expected (2,)"
    error = error_of_stack(
        lambda stack: stack._replace(states=tuple(replace(state, sources=slots) for state in stack.states or ()))
    )
    assert error == "states[0].sources requires states[0].slots: pass both, or neither"
