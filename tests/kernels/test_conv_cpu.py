"""Stacks of convolutions on the CPU: sizes around the tiles and the windows of a product, stored dtypes, threads, and values that are not
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.conv import cpu_stack
from kernels.conv.types import ConvBlock, ConvWeights
from kernels.cpu import threads
from kernels.embedding import FIRST
from kernels.ragged import Outputs
from tests.kernels.families import VOCABULARY, cpu_backends
from tests.kernels.inputs import EVERYTHING, OUTPUTS, assert_close, map_arrays, ragged
from tests.kernels.stacks import Maker, Stack

pytestmark = pytest.mark.skipif("cpu" not in cpu_backends("conv"), reason="the CPU kernels are not compiled")
LENGTHS = [9, 0, 1, 133, 4, 2]
"""One row has more windows than a product takes together."""


def tcn(channels: Sequence[int], *, inputs: int = 6, **options: Any) -> Stack:
    maker = Maker(inputs)
    return maker.stack(LENGTHS, *maker.tcn(channels, width=3), **options)


def assert_exact(stack: Stack, want: Outputs = EVERYTHING) -> None:
    ours, exact = stack.run(want=want, backend="cpu"), stack.exact(want)
    for name in OUTPUTS:
        array, expected = getattr(ours, name), getattr(exact, name)
        assert (array is None) == (expected is None)
        if array is not None:
            assert_close(array, expected, steps=max(LENGTHS))


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 63, 64, 65, 130])
def test_any_number_of_maps_matches_the_reference(outputs: int) -> None:
    assert_exact(tcn([outputs, outputs], with_states=True))


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu", "glu", "gated_tanh"])
@pytest.mark.parametrize("ids", ["", "embedding", "tables"])
def test_every_activation_of_maps_around_a_vector_matches_the_reference(activation: str, ids: str) -> None:
    for outputs in (1, 17, 150):
        maker = Maker(6)
        first = ConvBlock((maker.layer(outputs, 5, left=3, right=1, ids=ids, activation=activation),))
        second = ConvBlock((maker.causal(outputs, 2),), residual=True, activation="gelu")
        assert_exact(maker.stack(LENGTHS, first, second))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stored_halves_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    stack = tcn([37, 37])
    blocks = tuple(stored(block, dtype) for block in stack.blocks)
    assert_exact(stack._replace(blocks=blocks))


def stored(block: ConvBlock, dtype: torch.dtype) -> ConvBlock:
    layers = tuple(replace(layer, filters=layer.filters.to(dtype)) for layer in block.layers)
    projection = None if block.projection is None else replace(block.projection, filters=block.projection.filters.to(dtype))
    return replace(block, layers=layers, projection=projection)


def test_last_step_alone_has_the_bits_of_all_steps() -> None:
    stack = tcn([20, 20, 20])
    alone, everything = stack.run(want=Outputs(last=True), backend="cpu"), stack.run(backend="cpu")
    assert alone.last is not None and everything.last is not None
    assert torch.equal(alone.last, everything.last)


def test_two_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = tcn([50, 50], with_states=True)
    alone = stack.run(backend="cpu")
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    shared = stack.run(backend="cpu")
    for name in OUTPUTS:
        assert torch.equal(getattr(alone, name), getattr(shared, name))
    for one, other in zip(alone.state, shared.state, strict=True):
        assert torch.equal(one.left, other.left)


def test_values_that_are_not_numbers_show_in_their_windows_alone() -> None:
    maker = Maker(4)
    stack = maker.stack([5, 8, 3], ConvBlock((maker.layer(20, 3, left=1, right=1, activation="relu"),)))
    stack.x.data[7, 2] = torch.nan  # step 2 of the second row
    encoded = stack.run(backend="cpu")
    assert encoded.steps is not None and encoded.max is not None and encoded.mean is not None
    assert encoded.steps.isnan().all(1).nonzero().flatten().tolist() == [6, 7, 8]
    for pooled in (encoded.max, encoded.mean):
        assert pooled.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("inputs, outputs", [(0, 3), (3, 0), (0, 0)])
def test_steps_without_numbers_match_the_reference(inputs: int, outputs: int) -> None:
    filters, ones = torch.zeros(2, inputs, outputs), torch.ones(outputs)
    projection = ConvWeights(torch.zeros(1, inputs, outputs), ones)
    block = ConvBlock((ConvWeights(filters, ones, left=1),), residual=True, projection=projection)
    assert_exact(Stack(ragged(torch.zeros(5, inputs), [2, 0, 3]), (block,), None))


def test_gelu_is_exact_to_a_few_bits() -> None:
    values = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, 30.0, 1e30, torch.inf])))
    layer = ConvWeights(torch.ones(1, 1, 1), torch.zeros(1), activation="gelu")
    ours = Stack(ragged(values[:, None], [len(values)]), (ConvBlock((layer,)),), None).run(backend="cpu").steps
    assert ours is not None
    exact = torch.nn.functional.gelu(values.double())
    assert torch.allclose(ours[:, 0].double(), exact, rtol=5e-7, atol=6e-8)


def test_filters_are_packed_once_for_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[ConvWeights] = []
    pack = cpu_stack._pack_layer

    def counted(layer: ConvWeights) -> cpu_stack.PackedLayer:
        packed.append(layer)
        return pack(layer)

    monkeypatch.setattr(cpu_stack, "_pack_layer", counted)
    stack = tcn([8, 8])
    for blocks in (stack.blocks, stack.blocks[:1], tuple(replace(block) for block in stack.blocks)):
        stack._replace(blocks=blocks).run(backend="cpu")
    assert len(packed) == len(stack.layers) + 1, "each layer and the projection of the first block"


def test_same_first_layer_in_another_stack_is_packed_again() -> None:
    stack = tcn([8, 8])
    for blocks in (stack.blocks, stack.blocks[:1], (*stack.blocks, *stack.blocks[1:])):
        assert_exact(stack._replace(blocks=blocks))


@pytest.mark.parametrize(
    "id, dtype",
    [(-1, torch.int32), (VOCABULARY, torch.int32), (2**31 - 1, torch.int32), (-1, torch.int64), (2**63 - 1, torch.int64)],
    ids=str,
)
def test_id_outside_of_the_tables_is_refused(id: int, dtype: torch.dtype) -> None:
    maker = Maker(6)
    stack = maker.stack([3, 4], ConvBlock((maker.causal(5, 3, ids="tables"),)))
    stack = stack._replace(x=map_arrays(stack.x, lambda array: array.clone()))
    ids = stack.x.data.to(dtype)
    ids[5] = id
    with pytest.raises(IndexError, match="outside of the table"):
        stack._replace(x=replace(stack.x, data=ids)).run(backend="cpu")
    tables = stack.layers[0].tables
    assert tables is not None and tables.shape[1] == FIRST + VOCABULARY
