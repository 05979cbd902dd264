"""Stacks of convolutions, with and without residuals, compared with the reference and with torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad

from kernels import conv
from kernels.backend import accepts_everything
from kernels.conv import framework
from kernels.conv.backend import ConvBackend
from kernels.conv.layer_by_layer import last_steps, receptive_field, stack_of
from kernels.conv.types import ConvBlock, ConvState, ConvWeights
from kernels.ragged import Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import cpu_backends
from tests.kernels.inputs import (
    OUTPUTS,
    assert_close,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    assert_states_close,
    caches_with_zero_slot,
    in_chunks,
    map_arrays,
    put_in_slots,
    run_from_slot_to_slot,
    with_shared_slots,
)
from tests.kernels.stacks import Maker, Stack

LENGTHS = [9, 0, 1, 31, 2, 17]
BACKENDS = [*cpu_backends("conv"), "reference"]
LAST = Outputs(last=True)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


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


CAUSAL = [tcn, gated]
OF_IDS = [embedded, folded]
KEEP_STEPS = [*CAUSAL, centred, *OF_IDS]
every_stack = pytest.mark.parametrize("make", [*KEEP_STEPS, strided])
every_stack_that_keeps_its_steps = pytest.mark.parametrize("make", KEEP_STEPS)
every_stack_of_vectors = pytest.mark.parametrize("make", [*CAUSAL, centred, strided])
every_causal_stack = pytest.mark.parametrize("make", CAUSAL)


def made(make: Any, lengths: list[int] = LENGTHS, *, with_states: bool = False, seed: int = 0) -> Stack:
    maker = Maker(3, seed)
    return maker.stack(lengths, *make(maker), with_states=with_states)


def assert_stacks_alike(actual: Encoded, expected: Encoded, *, steps: int) -> None:
    """Compare every expected output, the offsets and the state of every layer."""
    for name in OUTPUTS:
        array, expected_array = getattr(actual, name), getattr(expected, name)
        assert (array is None) == (expected_array is None), name
        if array is not None:
            assert_close(array, expected_array, steps=steps)
    assert (actual.offsets is None) == (expected.offsets is None)
    if actual.offsets is not None and expected.offsets is not None:
        assert actual.offsets.tolist() == expected.offsets.tolist()
    assert (actual.state is None) == (expected.state is None)
    for state, expected_state in zip(actual.state or (), expected.state or (), strict=True):
        assert_states_close(state, expected_state, steps=steps)


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [], [1]], ids=str)
@every_stack
def test_stack_agrees_with_the_reference(make: Any, lengths: list[int]) -> None:
    stack = made(make, lengths)
    assert_stacks_alike(stack.run(), stack.exact(), steps=max(lengths, default=0))


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], [], [1]], ids=str)
@every_stack_of_vectors
def test_stack_with_states_agrees_with_the_reference(make: Any, lengths: list[int]) -> None:
    stack = made(make, lengths, with_states=True)
    assert_stacks_alike(stack.run(), stack.exact(), steps=max(lengths, default=0))


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
some_lengths = st.lists(st.integers(0, 12), max_size=4)
some_seeds = st.integers(0, 2**31)


@hypothesis.given(
    lengths=some_lengths,
    plans=st.lists(st.lists(some_layers, min_size=1, max_size=2) | some_residuals, min_size=1, max_size=4),
    ids=st.sampled_from(["", "embedding", "tables"]),
    with_states=st.booleans(),
    seed=some_seeds,
)
def test_any_stack_agrees_with_the_reference(
    lengths: list[int], plans: list[Any], ids: str, with_states: bool, seed: int
) -> None:
    maker = Maker(3, seed)
    first = [ConvBlock((maker.causal(4, ids=ids),))] if ids else []
    stack = maker.stack(lengths, *first, *(planned(maker, plan) for plan in plans), with_states=with_states and not ids)
    assert_stacks_alike(stack.run(), stack.exact(), steps=max(lengths, default=0))


@hypothesis.given(lengths=some_lengths, plans=st.lists(some_residuals, min_size=1, max_size=3), seed=some_seeds)
def test_last_step_alone_equals_the_last_of_all_steps(lengths: list[int], plans: list[Any], seed: int) -> None:
    maker = Maker(3, seed)
    stack = maker.stack(lengths, *(planned(maker, plan) for plan in plans))
    alone, everything = stack.run(want=LAST), stack.exact()
    assert alone.last is not None and everything.last is not None
    assert_close(alone.last, everything.last, steps=max(lengths, default=0))


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


class TorchBlock(nn.Module):
    """Bai et al. 2018 with torch's modules over (channels, steps), and the weights of a ConvBlock."""

    def __init__(self, block: ConvBlock) -> None:
        super().__init__()
        self.before = [layer.left for layer in block.layers]
        self.convs = nn.ModuleList(torch_conv(layer) for layer in block.layers)
        self.projection = None if block.projection is None else torch_conv(block.projection)

    def forward(self, columns: Tensor) -> Tensor:
        convolved = columns
        for before, layer in zip(self.before, self.convs, strict=True):
            convolved = torch.relu(layer(pad(convolved, (before, 0))))
        return torch.relu(convolved + (columns if self.projection is None else self.projection(columns)))


def torch_conv(weights: ConvWeights) -> nn.Conv1d:
    width, columns, maps = weights.filters.shape
    module = nn.Conv1d(columns, maps, width, dilation=weights.dilation).double().requires_grad_(False)
    module.load_state_dict({"weight": weights.filters.permute(2, 1, 0), "bias": weights.bias})
    return module


@every_backend
def test_tcn_agrees_with_torch_on_each_row(backend: str) -> None:
    stack = made(tcn)
    network = nn.Sequential(*(TorchBlock(block) for block in stack.blocks))
    encoded = stack.run(backend=backend)
    for data, ours in zip(inputs.rows(stack.x), inputs.steps_by_row(encoded, stack.x), strict=True):
        if len(data):  # torch rejects empty rows
            assert_close(ours, network(data.double().T).T, steps=len(data))


@every_backend
@every_stack
def test_row_is_encoded_alike_alone_and_in_a_batch(make: Any, backend: str) -> None:
    stack = made(make)
    together = stack.run(backend=backend)
    for row, data in enumerate(inputs.rows(stack.x)):
        alone = stack._replace(x=inputs.joined([data])).run(backend=backend)
        assert alone.steps is not None
        assert_close(alone.steps, inputs.steps_by_row(together, stack.x)[row], steps=len(data))
        for name in ("last", "mean", "max"):
            assert_close(getattr(alone, name)[0], getattr(together, name)[row], steps=len(data))


@every_stack_of_vectors
def test_rows_do_not_affect_each_other(make: Any) -> None:
    stack = made(make, [3, 1, 0, 5, 2], with_states=True)
    clean, clean_rows = stack.run(), inputs.rows(stack.x)
    assert stack.states is not None
    for row in range(stack.x.rows):
        rows = [data if index == row else torch.full_like(data, torch.nan) for index, data in enumerate(clean_rows)]
        others = torch.arange(stack.x.rows) != row
        states = tuple(ConvState(state.left.masked_fill(others[:, None, None], torch.nan)) for state in stack.states)
        encoded = Stack(inputs.joined(rows), stack.blocks, states).run()
        assert_close(inputs.steps_by_row(encoded, stack.x)[row], inputs.steps_by_row(clean, stack.x)[row], steps=0)
        for name in ("last", "mean", "max"):
            assert_close(getattr(encoded, name)[row], getattr(clean, name)[row], steps=0)


@every_backend
@pytest.mark.parametrize("cuts", [[0, 7, 31], [0, 1, 2, 3, 31], [0, 0, 13, 31]], ids=str)
@every_causal_stack
def test_chunks_give_the_same_steps_as_the_whole_row(make: Any, cuts: list[int], backend: str) -> None:
    stack = made(make, with_states=True)
    whole, states = stack.run(backend=backend), stack.states
    written: list[list[Tensor]] = [[] for _ in LENGTHS]
    for begin, end in pairwise(cuts):
        chunk = inputs.joined([row[begin:end] for row in inputs.rows(stack.x)])
        encoded = Stack(chunk, stack.blocks, states).run(backend=backend)
        states = encoded.state
        for row, steps in zip(written, inputs.steps_by_row(encoded, chunk), strict=True):
            row.append(steps)
    assert whole.steps is not None and states is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=max(LENGTHS))
    for carried, expected in zip(states, whole.state, strict=True):
        assert_states_close(carried, expected, steps=max(LENGTHS))


@every_backend
@every_causal_stack
def test_zero_states_equal_no_states(make: Any, backend: str) -> None:
    stack = made(make, with_states=True)
    assert stack.states is not None
    zeros = stack._replace(states=tuple(map_arrays(state, torch.zeros_like) for state in stack.states)).run(backend=backend)
    without = stack._replace(states=None).run(backend=backend)
    assert without.state is None and zeros.state is not None
    for name in OUTPUTS:
        assert torch.equal(getattr(zeros, name), getattr(without, name))


@every_backend
@every_stack_of_vectors
def test_state_slots_are_read_and_written_in_place(make: Any, backend: str) -> None:
    stack = made(make, [4, 0, 2], with_states=True)
    expected = stack.run(backend=backend)
    assert stack.states is not None
    slabs = tuple(put_in_slots(state, torch.tensor([3, 0, 4]), places=6) for state in stack.states)
    encoded = stack._replace(states=slabs).run(backend=backend)
    for name in OUTPUTS:
        assert torch.equal(getattr(encoded, name), getattr(expected, name))
    for after, slab, state in zip(encoded.state, slabs, expected.state, strict=True):
        assert after is slab
        assert torch.equal(slab.left[[3, 0, 4]], state.left)
        assert bool((slab.left[[1, 2, 5]] == 9).all())


@every_backend
@every_causal_stack
def test_rows_share_the_zero_and_scrap_slots(make: Any, backend: str) -> None:
    stack = made(make, with_states=True)
    whole, slabs = stack._replace(states=None).run(backend=backend), tuple(map(caches_with_zero_slot, stack.states or ()))

    def run(chunk: Ragged, states: tuple[ConvState, ...]) -> Encoded:
        return Stack(chunk, stack.blocks, states).run(backend=backend)

    steps, after = run_from_slot_to_slot(run, in_chunks(stack.x, chunks=4), slabs)
    zeros = tuple(map_arrays(state, torch.zeros_like) for state in stack.states or ())
    expected = stack._replace(states=zeros).run(backend=backend).state
    assert whole.steps is not None
    assert_close(steps, whole.steps, steps=max(LENGTHS))
    for carried, state, slab in zip(after, expected, slabs, strict=True):
        assert_states_close(carried, state, steps=max(LENGTHS))
        assert_reserved_slots_unchanged(slab)


@every_backend
@every_stack_of_vectors
def test_rows_read_sources_and_write_slots(make: Any, backend: str) -> None:
    stack = made(make, [4, 0, 2, 3, 0, 0], with_states=True)
    assert stack.states is not None
    slabs = tuple(map(with_shared_slots, stack.states))
    expected = stack._replace(states=tuple(slab.by_row() for slab in slabs)).run(backend=backend)
    encoded = stack._replace(states=slabs).run(backend=backend)
    for name in OUTPUTS:
        assert torch.equal(getattr(encoded, name), getattr(expected, name))
    for after, state, expected_state in zip(encoded.state, stack.states, expected.state, strict=True):
        assert_shared_slots_result(after, state, expected_state)


@every_backend
@every_stack
def test_unwanted_outputs_are_none(make: Any, backend: str) -> None:
    stack = made(make)
    everything = stack.run(backend=backend)
    for requested in OUTPUTS:
        encoded = stack.run(want=Outputs(**{requested: True}), backend=backend)
        assert_close(getattr(encoded, requested), getattr(everything, requested), steps=max(LENGTHS))
        assert all(getattr(encoded, name) is None for name in OUTPUTS if name != requested)


@every_backend
@every_stack
def test_all_outputs_are_float32(make: Any, backend: str) -> None:
    encoded = made(make).run(backend=backend)
    assert {getattr(encoded, name).dtype for name in OUTPUTS} == {torch.float32}


def test_residual_of_float16_is_added_in_float32() -> None:
    stack = made(tcn)
    halved = stack._replace(x=Ragged(stack.x.data.half(), stack.x.offsets))
    same = stack._replace(x=Ragged(stack.x.data.half().float(), stack.x.offsets))
    for name in OUTPUTS:
        assert torch.equal(getattr(halved.run(), name), getattr(same.run(), name))


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


@every_stack_that_keeps_its_steps
def test_receptive_field_is_exact(make: Any) -> None:
    """The first step of the receptive field matters, and the step before it does not."""
    stack = made(make, [60])
    needed, changed = receptive_field(stack.blocks), []
    for step in (60 - needed, 60 - needed - 1):
        data = stack.x.data.clone()
        data[step] = (data[step] + 1) % 11 if stack.layers[0].takes_ids else torch.nan
        changed.append(not torch.equal(last_of_all(stack._replace(x=Ragged(data, stack.x.offsets))), last_of_all(stack)))
    assert changed == [True, False]


def last_of_all(stack: Stack) -> Tensor:
    """Return the last step of a call that returns all steps."""
    last = stack.run(want=Outputs(last=True, steps=True)).last
    assert last is not None
    return last


def test_strided_stack_computes_all_steps() -> None:
    stack = made(strided)
    assert_stacks_alike(stack.run(want=LAST), stack.exact(LAST), steps=max(LENGTHS))


@pytest.mark.parametrize("steps", [1, 3, 9, 40])
def test_last_steps_of_each_row(steps: int) -> None:
    x = inputs.ragged(torch.arange(sum(LENGTHS)), LENGTHS)
    expected = [row[max(0, len(row) - steps) :].tolist() for row in inputs.rows(x)]
    cut = last_steps(x, steps)
    assert [row.tolist() for row in inputs.rows(cut)] == expected


def test_backend_with_a_stack_function_runs_whole_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, returned = made(tcn), Encoded(None)

    def whole(x: Ragged, blocks: Sequence[ConvBlock], states: None, *, want: Outputs) -> Encoded:
        assert (x, blocks, states, want) == (*stack, LAST)
        return returned

    backend = ConvBackend("with a stack", framework.conv, accepts_everything, stack=whole)
    monkeypatch.setattr(conv, "BACKENDS", (backend,))
    assert stack.run(want=LAST, backend=backend.name) is returned
