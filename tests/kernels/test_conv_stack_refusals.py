"""Stacks whose layers, residuals or states do not fit together are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.contract import ContractError, ConvBlock, ConvState, ConvWeights, Ragged
from tests.kernels.stacks import Maker, Stack


def blocks() -> tuple[Maker, ConvBlock, ConvBlock]:
    """Layers from 3 to 4 columns, then 4 to 5 with a residual and its projection."""
    maker = Maker(3)
    first = ConvBlock((maker.causal(3, 2), maker.causal(4, 3)))
    residual = ConvBlock((maker.causal(4, 2), maker.causal(5, 2)), residual=True, projection=linear(4, 5), activation="relu")
    return maker, first, residual


def linear(inputs: int, outputs: int) -> ConvWeights:
    return ConvWeights(torch.zeros(1, inputs, outputs), torch.zeros(outputs))


def of_a_stack(change: Callable[[Stack], Stack]) -> str:
    """What is said of it once it is changed."""
    maker, *both = blocks()
    with pytest.raises(ContractError) as caught:
        change(maker.stack([3, 1], *both, with_states=True)).run()
    return str(caught.value)


def of_a_residual(change: Callable[[ConvBlock], ConvBlock]) -> str:
    return of_a_stack(lambda given: given._replace(blocks=(given.blocks[0], change(given.blocks[1])), states=None))


def test_a_stack_needs_a_block_and_a_block_a_layer() -> None:
    said = "a stack has at least one block, and each of them at least one layer"
    assert of_a_stack(lambda given: given._replace(blocks=())) == said
    assert of_a_stack(lambda given: given._replace(blocks=(*given.blocks, ConvBlock(())))) == said


def test_the_first_layer_takes_what_comes_in_and_each_other_what_the_one_before_it_gives() -> None:
    narrow = of_a_stack(lambda given: given._replace(x=Ragged(given.x.data[:, :2], given.x.offsets)))
    assert narrow == "x.data has the shape (4, 2), expected (4, 3)"
    swapped = of_a_stack(lambda given: given._replace(blocks=(given.blocks[0],) * 2, states=None))
    assert swapped == "blocks[1].layers[0] takes 3 columns, and 4 come in"
    within = of_a_residual(lambda block: replace(block, layers=(block.layers[1], block.layers[0], block.layers[0])))
    assert within == "blocks[1].layers[1] takes 4 columns, and 5 come in"


@pytest.mark.parametrize("ids", ["embedding", "tables"])
def test_only_the_first_layer_takes_ids_and_nothing_is_added_to_them(ids: str) -> None:
    maker = Maker(4)
    layer = maker.causal(4, 2, ids=ids)
    said = of_a_residual(lambda block: replace(block, layers=(layer, block.layers[1])))
    assert said == "blocks[1].layers[0] takes ids, which only the first layer of a stack may"
    with pytest.raises(ContractError, match=r"blocks\[0\] has a residual although the data are ids"):
        maker.stack([3, 1], ConvBlock((layer,), residual=True)).run()
    with pytest.raises(ContractError, match=r"states\[0\] is given although the data are ids"):
        maker.stack([3, 1], ConvBlock((layer,)), with_states=True).run()


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda block: replace(block, residual=False),
            "blocks[1] has a projection or an activation although it has no residual",
        ),
        (
            lambda block: replace(block, residual=False, projection=None),
            "blocks[1] has a projection or an activation although it has no residual",
        ),
        (lambda block: replace(block, projection=None), "blocks[1] adds 4 columns to 5: a projection is missing"),
        (
            lambda block: replace(block, activation="glu"),
            "blocks[1].activation is 'glu'; known are none, relu, tanh, gelu",
        ),
        (
            lambda block: replace(block, projection=linear(3, 5)),
            "blocks[1].projection goes from 3 to 5 columns, expected 4 to 5",
        ),
        (
            lambda block: replace(block, projection=linear(4, 6)),
            "blocks[1].projection goes from 4 to 6 columns, expected 4 to 5",
        ),
        (
            lambda block: replace(block, projection=replace(linear(4, 5), embedding=torch.zeros(9, 4))),
            "blocks[1].projection goes from None to 5 columns, expected 4 to 5",
        ),
    ],
)
def test_what_is_added_fits_what_it_is_added_to(change: Callable[[ConvBlock], ConvBlock], says: str) -> None:
    assert of_a_residual(change) == says


@pytest.mark.parametrize(
    "projection",
    [
        ConvWeights(torch.zeros(2, 4, 5), torch.zeros(5), left=1),
        replace(linear(4, 5), left=1),
        replace(linear(4, 5), stride=2),
        replace(linear(4, 5), activation="relu"),
    ],
)
def test_a_projection_is_a_product_of_each_step(projection: ConvWeights) -> None:
    said = of_a_residual(lambda block: replace(block, projection=projection))
    assert said == "blocks[1].projection is of width 1, without padding, stride and activation"


@pytest.mark.parametrize("name, value", [("stride", 2), ("left", 0), ("right", 1)])
def test_nothing_is_added_where_not_every_step_gives_one(name: str, value: int) -> None:
    change: dict[str, Any] = {name: value}
    said = of_a_residual(lambda block: replace(block, layers=(block.layers[0], replace(block.layers[1], **change))))
    assert said == "blocks[1] has a residual although layers[1] does not give a step for every step"


@pytest.mark.parametrize(
    "states, says",
    [
        ((), "states has 0 of them, expected one for each of 4 layers"),
        ((1, 2, 1, 2), "states[3].left has the shape (2, 2, 4), expected (2, 1, 4)"),
        ((1, 1, 1, 1), "states[1].left has the shape (2, 1, 3), expected (2, 2, 3)"),
    ],
)
def test_there_is_a_state_for_each_layer(states: tuple[int, ...], says: str) -> None:
    made = tuple(ConvState(torch.zeros(2, left, columns)) for left, columns in zip(states, (3, 3, 4, 4), strict=False))
    assert of_a_stack(lambda given: given._replace(states=made)) == says


def test_slots_are_as_many_as_the_rows() -> None:
    slots = torch.tensor([0])
    said = of_a_stack(lambda given: given._replace(states=tuple(replace(one, slots=slots) for one in given.states or ())))
    assert said == "states[0].slots has the shape (1,), expected (2,)"
    said = of_a_stack(lambda given: given._replace(states=tuple(replace(one, sources=slots) for one in given.states or ())))
    assert said == "states[0].sources is given although states[0].slots is not"
