"""Stacks of convolutions, with and without residuals, compared with the reference and with torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from kernels.conv import cpu_stack, framework
from kernels.conv.layer_by_layer import receptive_field, stack_of
from kernels.conv.types import ConvBlock, ConvState, ConvWeights
from kernels.cpu import threads
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import VOCABULARY, cpu_backends
from tests.kernels.stacks import Maker, Stack

LENGTHS = [9, 0, 1, 31, 2, 17]
LAST = Outputs(last=True)
every_backend = pytest.mark.parametrize("backend", cpu_backends("conv"))


def tcn(maker: Maker) -> tuple[ConvBlock, ...]:
    return maker.tcn([5, 5, 7], width=3)


def gated(maker: Maker) -> tuple[ConvBlock, ...]:
    """A plain block, then a block with a residual and an activation after it."""
    first = ConvBlock((maker.causal(5, 3, activation="glu"),))
    inner = maker.causal(4, 2, dilation=4, activation="gated_tanh"), maker.layer(5, 1)
    return first, ConvBlock(inner, residual=True, activation="tanh"), ConvBlock((maker.causal(3, 2),))


def centred(maker: Maker) -> tuple[ConvBlock, ...]:
    first = maker.layer(3, 3, left=1, right=1, activation="relu")
    second = maker.layer(3, 4, left=2, right=4, dilation=2, activation="gelu")
    return ConvBlock((first, second), residual=True), ConvBlock((maker.layer(5, 2, right=1),))


def strided(maker: Maker) -> tuple[ConvBlock, ...]:
    """A block with fewer output steps than input steps, then a block with a residual."""
    first = ConvBlock((maker.layer(5, 3, left=1, stride=2), maker.layer(4, 2, activation="relu")))
    return first, ConvBlock((maker.causal(4, 2),), residual=True, activation="relu")


def embedded(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(5, 3, ids="embedding", activation="relu"),)), *maker.tcn([5, 3])


def folded(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(5, 3, ids="tables", activation="glu"),)), *maker.tcn([5, 3])


CAUSAL, OF_IDS = [tcn, gated], [embedded, folded]
every_stack = pytest.mark.parametrize("make", [*CAUSAL, centred, *OF_IDS, strided])
every_stack_of_vectors = pytest.mark.parametrize("make", [*CAUSAL, centred, strided])
every_causal_stack = pytest.mark.parametrize("make", CAUSAL)


def made(make: Any, lengths: list[int] = LENGTHS, *, with_states: bool = False) -> Stack:
    maker = Maker(3)
    return maker.stack(lengths, *make(maker), with_states=with_states)


def assert_stacks_alike(actual: Encoded, expected: Encoded, *, steps: int) -> None:
    """Compare every expected output, the offsets and the state of every layer."""
    for name in inputs.OUTPUTS:
        array, expected_array = getattr(actual, name), getattr(expected, name)
        assert (array is None) == (expected_array is None), name
        if array is not None:
            assert array.dtype == torch.float32
            inputs.assert_close(array, expected_array, steps=steps)
    assert (actual.offsets is None) == (expected.offsets is None)
    if actual.offsets is not None and expected.offsets is not None:
        assert actual.offsets.tolist() == expected.offsets.tolist()
    assert (actual.state is None) == (expected.state is None)
    for state, expected_state in zip(actual.state or (), expected.state or (), strict=True):
        inputs.assert_states_close(state, expected_state, steps=steps)


@every_backend
@every_stack
def test_stack_agrees_with_the_reference(make: Any, backend: str) -> None:
    for lengths in (LENGTHS, [0, 0], [], [1]):
        for with_states in {False, make not in OF_IDS}:
            stack = made(make, lengths, with_states=with_states)
            everything, steps = stack.run(backend=backend), max(lengths, default=0)
            assert_stacks_alike(everything, stack.exact(), steps=steps)
            for name in inputs.OUTPUTS:
                encoded = stack.run(want=Outputs(**{name: True}), backend=backend)
                inputs.assert_close(getattr(encoded, name), getattr(everything, name), steps=steps)
                assert all(getattr(encoded, other) is None for other in inputs.OUTPUTS if other != name)


some_layers = st.fixed_dictionaries(
    {
        "outputs": st.integers(1, 5),
        "width": st.integers(1, 4),
        "left": st.integers(0, 5),
        "right": st.integers(0, 5),
        "dilation": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "activation": st.sampled_from(["none", "relu", "tanh", "gelu", "glu", "gated_tanh"]),
    }
)
some_residuals = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["none", "relu", "tanh", "gelu"])
)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 12), max_size=4),
    plans=st.lists(st.lists(some_layers, min_size=1, max_size=2) | some_residuals, min_size=1, max_size=4),
    ids=st.sampled_from(["", "embedding", "tables"]),
    with_states=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=50)
def test_any_stack_agrees_with_the_reference(
    lengths: list[int], plans: list[Any], ids: str, with_states: bool, seed: int
) -> None:
    """Also the last step alone, for which only the steps that it needs are computed."""
    maker = Maker(3, seed)
    first = [ConvBlock((maker.causal(4, ids=ids),))] if ids else []
    stack = maker.stack(lengths, *first, *(planned(maker, plan) for plan in plans), with_states=with_states and not ids)
    exact, steps = stack.exact(), max(lengths, default=0)
    assert_stacks_alike(stack.run(), exact, steps=steps)
    alone = stack.run(want=LAST)
    assert alone.last is not None and exact.last is not None
    inputs.assert_close(alone.last, exact.last, steps=steps)


def planned(maker: Maker, plan: Any) -> ConvBlock:
    """Return a plain block, or a residual block with a first layer that reads later steps."""
    if isinstance(plan, list):
        return ConvBlock(tuple(maker.layer(**layer) for layer in plan))
    outputs, width, dilation, activation = plan
    columns, reach = maker.columns, (width - 1) * dilation
    layers = (
        maker.layer(outputs, width, left=reach - reach // 2, right=reach // 2, dilation=dilation, activation="relu"),
        maker.causal(outputs, 2),
    )
    projection = ConvWeights(maker.normal(1, columns, outputs), maker.normal(outputs)) if columns != outputs else None
    return ConvBlock(layers, residual=True, projection=projection, activation=activation)


@every_backend
@every_stack_of_vectors
def test_row_does_not_depend_on_the_other_rows(make: Any, backend: str) -> None:
    stack = made(make, [3, 1, 0, 5, 2], with_states=True)
    clean, clean_rows = stack.run(backend=backend), inputs.rows(stack.x)
    for row in range(stack.x.rows):
        rows = [data if index == row else torch.full_like(data, torch.nan) for index, data in enumerate(clean_rows)]
        others = torch.arange(stack.x.rows) != row
        states = tuple(ConvState(state.left.masked_fill(others[:, None, None], torch.nan)) for state in stack.states or ())
        own = tuple(ConvState(state.left[row : row + 1]) for state in stack.states or ())
        beside = Stack(inputs.joined(rows), stack.blocks, states).run(backend=backend)
        alone = Stack(inputs.joined(clean_rows[row : row + 1]), stack.blocks, own).run(backend=backend)
        for encoded, at in ((beside, row), (alone, 0)):
            x = stack.x if encoded is beside else inputs.joined(clean_rows[row : row + 1])
            inputs.assert_close(inputs.steps_by_row(encoded, x)[at], inputs.steps_by_row(clean, stack.x)[row], steps=0)
            for name in ("last", "mean", "max"):
                inputs.assert_close(getattr(encoded, name)[at], getattr(clean, name)[row], steps=0)


@every_backend
@every_causal_stack
def test_chunks_give_the_same_steps_as_the_whole_row(make: Any, backend: str) -> None:
    """Rows start from the slot of zeros and end in the scrap slot. Zeros equal no state."""
    stack = made(make, with_states=True)
    zeros = tuple(inputs.map_arrays(state, torch.zeros_like) for state in stack.states or ())
    whole, without = (stack._replace(states=states).run(backend=backend) for states in (zeros, None))
    assert whole.steps is not None and without.state is None
    assert all(torch.equal(getattr(whole, name), getattr(without, name)) for name in inputs.OUTPUTS)

    def run(chunk: Ragged, states: tuple[ConvState, ...]) -> Encoded:
        return Stack(chunk, stack.blocks, states).run(backend=backend)

    slabs = tuple(map(inputs.caches_with_zero_slot, stack.states or ()))
    steps, after = inputs.run_from_slot_to_slot(run, inputs.in_chunks(stack.x, chunks=4), slabs)
    inputs.assert_close(steps, whole.steps, steps=max(LENGTHS))
    for carried, state, slab in zip(after, whole.state, slabs, strict=True):
        inputs.assert_states_close(carried, state, steps=max(LENGTHS))
        inputs.assert_reserved_slots_unchanged(slab)


@every_backend
@every_stack_of_vectors
def test_state_slots_are_read_and_written_in_place(make: Any, backend: str) -> None:
    stack = made(make, [4, 0, 2], with_states=True)
    expected = stack.run(backend=backend)
    slabs = tuple(inputs.put_in_slots(state, torch.tensor([3, 0, 4]), places=6) for state in stack.states or ())
    encoded = stack._replace(states=slabs).run(backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in inputs.OUTPUTS)
    for after, slab, state in zip(encoded.state, slabs, expected.state, strict=True):
        assert after is slab and torch.equal(slab.left[[3, 0, 4]], state.left)
        assert bool((slab.left[[1, 2, 5]] == 9).all())


# The steps that the last step needs.


@pytest.mark.parametrize("states", [False, True])
def test_last_step_alone_computes_only_the_needed_steps(states: bool) -> None:
    stack, computed = made(tcn, [100, 3, 0], with_states=states), []

    def counted(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
        computed.append(x.lengths.tolist())
        return framework.conv(x, weights, state, want=want)

    needed = 1 + 2 * (2 + 4 + 8)
    encoded = stack_of(counted)(*stack, want=LAST)
    assert all(lengths == [100 if states else needed, 3, 0] for lengths in computed)
    assert (encoded.state is None) != states
    assert receptive_field(stack.blocks) == needed


# The compiled loops of a CPU.

LONG_ROW = [9, 0, 133, 4]
"""One row has more windows than a product takes together."""


def wide_tcn(channels: Sequence[int], **options: Any) -> Stack:
    maker = Maker(6)
    return maker.stack(LONG_ROW, *maker.tcn(channels, width=3), **options)


def assert_exact(stack: Stack) -> None:
    assert_stacks_alike(stack.run(backend="cpu"), stack.exact(), steps=max(LONG_ROW))


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 63, 65, 130])
def test_loops_take_any_number_of_maps(outputs: int) -> None:
    assert_exact(wide_tcn([outputs, outputs], with_states=True))


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu", "glu", "gated_tanh"])
def test_loops_apply_every_activation_to_maps_around_a_vector(activation: str) -> None:
    for outputs, ids in ((1, "embedding"), (17, "tables"), (150, "")):
        maker = Maker(6)
        first = ConvBlock((maker.layer(outputs, 5, left=3, right=1, ids=ids, activation=activation),))
        second = ConvBlock((maker.causal(outputs, 2),), residual=True, activation="gelu")
        assert_exact(maker.stack(LONG_ROW, first, second))


def test_two_threads_and_the_last_step_alone_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = wide_tcn([50, 50], with_states=True)
    alone, last = stack.run(backend="cpu"), stack._replace(states=None)
    assert last.run(want=LAST, backend="cpu").last.equal(last.run(backend="cpu").last)  # type: ignore[union-attr,arg-type]
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    shared = stack.run(backend="cpu")
    assert all(torch.equal(getattr(alone, name), getattr(shared, name)) for name in inputs.OUTPUTS)
    assert all(torch.equal(one.left, other.left) for one, other in zip(alone.state, shared.state, strict=True))


def test_values_that_are_not_numbers_show_in_their_windows_alone() -> None:
    maker = Maker(4)
    stack = maker.stack([5, 8, 3], ConvBlock((maker.layer(20, 3, left=1, right=1, activation="relu"),)))
    stack.x.data[7, 2] = torch.nan  # step 2 of the second row
    encoded = stack.run(backend="cpu")
    assert encoded.steps is not None and encoded.max is not None and encoded.mean is not None
    assert encoded.steps.isnan().all(1).nonzero().flatten().tolist() == [6, 7, 8]
    assert all(pooled.isnan().all(1).tolist() == [False, True, False] for pooled in (encoded.max, encoded.mean))


def test_gelu_is_exact_to_a_few_bits() -> None:
    values = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, 30.0, 1e30, torch.inf])))
    layer = ConvWeights(torch.ones(1, 1, 1), torch.zeros(1), activation="gelu")
    ours = Stack(inputs.ragged(values[:, None], [len(values)]), (ConvBlock((layer,)),), None).run(backend="cpu").steps
    assert ours is not None
    exact = nn.functional.gelu(values.double())
    assert torch.allclose(ours[:, 0].double(), exact, rtol=5e-7, atol=6e-8)


def test_filters_are_packed_once_for_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same first layer in another stack is packed again."""
    packed, pack = [], cpu_stack._pack_layer
    monkeypatch.setattr(cpu_stack, "_pack_layer", lambda layer: packed.append(layer) or pack(layer))  # type: ignore[func-returns-value]
    stack = wide_tcn([8, 8])
    same = tuple(replace(block) for block in stack.blocks)
    for blocks in (stack.blocks, stack.blocks[:1], same, (*stack.blocks, *stack.blocks[1:])):
        assert_exact(stack._replace(blocks=blocks))
    assert len(packed) == len(stack.layers) + 1, "each layer and the projection of the first block"


@pytest.mark.parametrize(
    "id, dtype", [(-1, torch.int32), (VOCABULARY, torch.int32), (VOCABULARY, torch.int64), (2**63 - 1, torch.int64)], ids=str
)
def test_id_outside_of_the_tables_is_refused(id: int, dtype: torch.dtype) -> None:
    maker = Maker(6)
    stack = maker.stack([3, 4], ConvBlock((maker.causal(5, 3, ids="tables"),)))
    ids = stack.x.data.to(dtype, copy=True)
    ids[5] = id
    with pytest.raises(IndexError, match="outside of the table"):
        stack._replace(x=replace(stack.x, data=ids)).run(backend="cpu")
