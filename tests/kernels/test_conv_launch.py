"""The launchers of the convolution's CUDA kernels on an emulated H200: launches, their shapes and grids, and the steps of each window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kernels.conv import launch as fused
from kernels.conv.geometry import BANKS
from kernels.conv.plan import HERE
from kernels.conv.types import ConvState
from kernels.ragged import Outputs, Ragged
from tests.kernels.devices import H200, FakeKernel, FakeLaunch, assert_passed, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments
from tests.kernels.sources import Member, members, undefined_names
from tests.kernels.stacks import Maker, Stack

HALF = torch.float16
LAST, STEPS = Outputs(last=True), Outputs(steps=True)
LENGTHS = [9, 0, 1, 3, 14, 2]


def names_of(member: Member) -> list[str]:
    """Return the names of a member of `Call`, with one name per array entry."""
    if member.kind == "Rows":
        return [f"{member.name}.{inner.name}" for inner in members(HERE / "conv.cuh", "Rows")]
    return [f"{member.name} {number}" for number in range(BANKS)] if member.sizes else [member.name]


CALLS = {
    source: [name for member in members(HERE / source, "Call") for name in names_of(member)]
    for source in ("product.cu", "folded.cu")
}


def halves(problem: Any) -> Any:
    """Return a problem in float16, with ids unchanged."""
    return problem.map_arrays(lambda array: array.half() if array.is_floating_point() else array)


def problem_of(form: Form, lengths: Sequence[int] = LENGTHS, outputs: int = 40, inputs: int = 24) -> Arguments:
    made: Arguments = halves(form.arguments(lengths, outputs, inputs))
    return made


def run(problem: Arguments, want: Outputs = EVERYTHING) -> Any:
    return fused.conv(*problem, want=want)


@pytest.fixture(autouse=True)
def made() -> Iterator[list[FakeKernel]]:
    with emulated(H200) as kernels:
        yield kernels


def calls_of(made: list[FakeKernel]) -> list[dict[str, int]]:
    """Return the members of the Call of each launch by name."""
    return [dict(zip(CALLS[one.kernel.source.name], one.members, strict=True)) for one in launches_of(made)]


def only(made: list[FakeKernel]) -> tuple[FakeLaunch, dict[str, int]]:
    """Return the only launch and its members, and forget it."""
    [launch], [call] = launches_of(made), calls_of(made)
    forget(made)
    return launch, call


def forget(made: list[FakeKernel]) -> None:
    for kernel in made:
        kernel.launches.clear()


def test_members_of_call_are_passed_in_order(made: list[FakeKernel]) -> None:
    x, layer, state = problem_of(Form("conv", width=3, left=4, right=1, dilation=2, activation="glu"))
    encoded = run(Arguments(Ragged(x.data, x.offsets.long()), layer, state), STEPS)
    launch, call = only(made)
    assert launch.kernel.constants.keys() | {"THREADS"} == undefined_names(HERE / "product.cu")
    arrays = {"x": x.data, "before": state.left, "after": encoded.state.left, "steps": encoded.steps}
    packed = {"filters 0": layer.packed["filters", 64], "bias 0": layer.packed["bias", 64]}
    sizes = {"inputs": 24, "dilation": 2, "columns": 40, "banks": 1, "width 0": 3, "outputs 0": 40, "first_tile 0": 0}
    rows = {"rows": 6, "wide": 1, "count": 0, "spacing": 1, "count_out": 0, "left": 4, "right": 1, "stride": 1}
    assert_passed(call, {**arrays, **packed, **sizes, **{f"batch.{name}": value for name, value in rows.items()}})
    assert not any(call[name] for name in ("known", "ids", "lines_after", "residual", "maxima", "filters 1", "width 7"))


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
def test_ids_embeddings_and_tables_are_not_copied(wide: torch.dtype, made: list[FakeKernel]) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding"))
    run(Arguments(Ragged(x.data.to(wide), x.offsets), layer, None))
    _, call = only(made)
    assert call["wide_ids"] == (wide == torch.int64) and call["x"] in {
        array.data_ptr() for array in (layer.embedding, layer.packed["embedding"])
    }
    assert not call["before"] and not call["after"], "ids have no state"
    x, layer, _ = problem_of(Form("conv", width=3, left=2, ids="tables"))
    encoded = run(Arguments(x, layer, None), STEPS)
    launch, call = only(made)
    assert launch.kernel.constants.keys() | {"THREADS"} == undefined_names(HERE / "folded.cu")
    sizes = {"height": layer.tables.shape[1], "stride 0": 40, "width 0": 3, "columns": 40}
    assert_passed(call, {"tables 0": layer.tables, "ids": x.data, "steps": encoded.steps, **sizes})


def stacked(*, states: bool = False) -> Stack:
    maker = Maker(24)
    made: Stack = halves(maker.stack(LENGTHS, *maker.tcn([24, 40, 40], width=3), with_states=states))
    return made


@pytest.mark.parametrize("states", [False, True])
def test_stack_is_one_launch_per_layer_and_projection(states: bool, made: list[FakeKernel]) -> None:
    stack = stacked(states=states)
    fused.stack(*stack, want=EVERYTHING)
    constants, calls = [launch.kernel.constants for launch in launches_of(made)], calls_of(made)
    assert len(calls) == len(stack.layers) + 1 == 7 and [one["RESIDUAL"] for one in constants].count(1) == 3
    assert sorted(one["STEPS_FLOAT32"] for one in constants) == [0] * 6 + [1], "the output of the stack is float32"
    assert [bool(call["after"]) for call in calls].count(True) == (len(stack.layers) if states else 0)


def test_last_step_alone_computes_only_the_needed_steps(made: list[FakeKernel]) -> None:
    fused.stack(*stacked(), want=LAST)
    assert all(launch.kernel.constants["THINNED"] for launch in launches_of(made))
    counts = [(call["batch.count_out"], call["batch.spacing_out"]) for call in calls_of(made)]
    assert sorted(counts) == sorted([(27, 1), (13, 2), (11, 2), (5, 4), (5, 4), (3, 4), (1, 1)])
    added = [[call[f"residual_{name}"] for name in ("count", "spacing", "apart")] for call in calls_of(made)]
    assert sorted(numbers for numbers in added if any(numbers)) == [[0, 1, 2], [5, 4, 1], [5, 4, 1]]


def test_writable_state_slots_are_written_in_place(made: list[FakeKernel]) -> None:
    x, layer, _ = problem_of(Form("conv", width=3, left=2), [3, 0, 4])
    slots, sources = torch.tensor([8, 1, 2]), torch.tensor([0, 0, 0])
    for slab, in_place in ((torch.ones(9, 2, 24, dtype=HALF), True), (torch.ones(9, 2, 24), False)):
        state = ConvState(slab, slots)
        assert fused.conv(x, layer, state, want=STEPS).state is state
        assert fused.conv(x, layer, ConvState(slab, slots, sources), want=STEPS).state == state
        call = calls_of(made)[-1]
        assert (call["after"] == slab.data_ptr()) == in_place == bool(call["lines_after"])
        # Another block may still read the old state after the new state was written.
        assert call["before"] not in (0, slab.data_ptr())


def test_launches_are_early_once_filters_are_packed(made: list[FakeKernel]) -> None:
    stack = stacked()
    for times in (1, 2):
        fused.stack(*stack, want=EVERYTHING)
        assert [launch.early for launch in launches_of(made)].count(True) == (0 if times == 1 else 7)
        # An earlier launch has read the same offsets.
        assert sorted(call["known"] for call in calls_of(made)) == [0, 1, 1, 1, 1, 1, 1]
        forget(made)


def test_filters_that_are_too_wide_use_the_framework(made: list[FakeKernel]) -> None:
    problem = halves(Form("conv", width=999, left=998).arguments([5, 3], 8, 24))
    encoded, expected = run(problem), Form("conv").exact(problem)
    assert not launches_of(made) and expected.steps is not None
    torch.testing.assert_close(encoded.steps, expected.steps.float(), rtol=1e-2, atol=1e-2)
