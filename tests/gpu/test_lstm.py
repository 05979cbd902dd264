"""The LSTM's CUDA kernels against the float64 reference: odd sizes, ragged rows, chunks, slots, graphs and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import launching
from kernels.backend import Problem, explain
from kernels.compile import resident_clusters
from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged
from kernels.lstm import BACKENDS, choice, launch, lstm
from tests.gpu.inputs import LSTM, TOLERANCE, agree, close, gated, joined, outputs, same, stored
from tests.gpu.inputs import lstm as given
from tests.gpu.sanitizer import TOOLS, finds_nothing
from tests.kernels import inputs
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    SCRAP,
    ZERO,
    Given,
    assert_only_slots_were_written,
    assert_went_on_from_shared_places,
    begun_in_zeros,
    from_place_to_place,
    from_shared_places,
    in_chunks,
    poisoned_memory,
)
from tests.kernels.shapes import found_anew

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
CLUSTER = [1, 33, 64, 100, 128, 151, 256, 300, 512, 640, 768]
GRID = [1, 100, 257, 512, 600, 768, 800, 1024, 1500, 2048]
SIZES = [*product(["cluster"], CLUSTER), *product(["grid"], GRID)]

both = pytest.mark.parametrize("backend", ["cluster", "grid"])
all_three = pytest.mark.parametrize("backend", ["persistent", "cluster", "grid"])
every_size = pytest.mark.parametrize("backend, hidden", SIZES)
every_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


@pytest.fixture(autouse=True, scope="module")
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


@every_size
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_all_outputs_and_the_state_agree_with_the_reference(backend: str, hidden: int, storage: torch.dtype) -> None:
    problem = given(RAGGED, hidden, storage=storage)
    agree(LSTM.run(*problem, backend=backend), LSTM.exact(problem), TOLERANCE[storage])


@both
@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_come_in_any_dtype(backend: str, data: torch.dtype) -> None:
    problem = stored(gated(RAGGED, 200), data)
    agree(LSTM.run(*problem, backend=backend), LSTM.exact(problem), TOLERANCE[torch.float16])


@all_three
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 64, 65, 256, 700, 4096])
def test_any_number_of_rows(backend: str, rows: int) -> None:
    chance = random.Random(rows)
    x, weights, state = given([chance.randint(0, 4) for _ in range(rows)], 72)
    encoded = outputs(LSTM.run(x, weights, state, backend=backend))
    some = sorted(chance.sample(range(rows), min(rows, 40)))
    mine = LSTMState(state.hidden[some], state.cell[some])
    each = inputs.rows(x)
    expected = outputs(LSTM.exact(Given(joined([each[row] for row in some]), weights, mine)))
    for name in ("last", "mean", "max", "hidden", "cell"):
        close(encoded[name][some], expected[name], TOLERANCE[torch.float16], name)


@pytest.mark.parametrize("hidden", [600, 1024, 1100, 2048])
def test_many_rows_of_a_large_layer(hidden: int) -> None:
    chance = random.Random(hidden)
    x, weights, state = gated([chance.randint(0, 9) for _ in range(150)], hidden)
    encoded = LSTM.run(x, weights, state, backend="grid")
    agree(encoded, LSTM.exact(Given(x, weights, state)), TOLERANCE[torch.float16])
    same(LSTM.run(x, weights, state), encoded)


@pytest.mark.parametrize("hidden", [1, 64, 130, 256, 400, 512])
def test_both_kernels_give_the_same_bits_where_the_number_of_rows_decides_between_them(hidden: int) -> None:
    problem = gated([7, 0, 3, 20, 1, 8, 8, 2, 5, *[4] * 40], hidden)
    same(LSTM.run(*problem, backend="grid"), LSTM.run(*problem, backend="cluster"))


@both
def test_gate_inputs_begin_anywhere(backend: str) -> None:
    x, weights, state = gated(RAGGED, 51)
    shifted = torch.cat([x.data.new_zeros(1), x.data.flatten()])[1:].view_as(x.data)
    assert shifted.data_ptr() % 4
    same(LSTM.run(Ragged(shifted, x.offsets), weights, state, backend=backend), LSTM.run(x, weights, state, backend=backend))


@all_three
@pytest.mark.parametrize("hidden", [40, 130, 520])
def test_a_row_is_the_same_to_the_bit_alone_in_any_batch_and_in_any_chunks(backend: str, hidden: int) -> None:
    x, weights, state = gated([3, 41, 0, 8, 19, *[5] * 90], hidden)
    whole = outputs(LSTM.run(x, weights, state, backend=backend))
    for row in (0, 1, 2, 4, 60):
        mine = LSTMState(state.hidden[row : row + 1], state.cell[row : row + 1])
        alone = outputs(LSTM.run(joined([inputs.rows(x)[row]]), weights, mine, backend=backend))
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in ("hidden", "cell", "last", "mean", "max"))
    cuts = [1, 7, 0, 4, 2, *[2] * 90]
    pieces = [(data[:cut], data[cut : 2 * cut], data[2 * cut :]) for data, cut in zip(inputs.rows(x), cuts, strict=True)]
    steps: list[list[Tensor]] = [[] for _ in pieces]
    for chunk in map(joined, zip(*pieces, strict=True)):
        encoded = LSTM.run(chunk, weights, state, backend=backend)
        state = encoded.state
        for so_far, part in zip(steps, inputs.rows(Ragged(outputs(encoded)["steps"], chunk.offsets)), strict=True):
            so_far.append(part)
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole["steps"])
    assert torch.equal(state.hidden, whole["hidden"])
    assert torch.equal(state.cell, whole["cell"])


@both
def test_poison_in_other_rows_does_not_reach_a_row(backend: str) -> None:
    x, weights, state = gated([4, 2, 0, 7, 7, 1, 3, 5, 6], 96)
    clean = outputs(LSTM.run(x, weights, state, backend=backend))
    data, hidden, cell = x.data.clone(), state.hidden.clone(), state.cell.clone()
    data[4:6], hidden[1], cell[3], data[-3:] = torch.nan, torch.inf, torch.nan, torch.nan
    encoded = outputs(LSTM.run(Ragged(data, x.offsets), weights, LSTMState(hidden, cell), backend=backend))
    for row in (0, 2, 4, 5, 6, 7):
        assert all(torch.equal(encoded[name][row], clean[name][row]) for name in ("hidden", "cell", "mean"))
    assert encoded["cell"][[3, 8]].isnan().all()


@both
@pytest.mark.parametrize("wanted", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")], ids=str)
def test_what_is_not_wanted_is_none_and_changes_nothing(backend: str, wanted: tuple[str, ...]) -> None:
    problem = gated(RAGGED, 48)
    everything = LSTM.run(*problem, backend=backend)
    encoded = LSTM.run(*problem, want=Outputs(**dict.fromkeys(wanted, True)), backend=backend)
    assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(wanted)
    same(encoded, everything)


@both
@every_index
def test_a_state_in_slots_is_read_and_written_in_place(backend: str, index: torch.dtype) -> None:
    x, weights, state = gated(RAGGED, 112)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: len(RAGGED)].to("cuda", index)
    others = torch.ones(40, dtype=torch.bool).index_fill(0, slots.long().cpu(), False).cuda()
    slabs = LSTMState(torch.randn(40, 112, device="cuda"), torch.randn(40, 112, device="cuda"), slots)
    slabs.hidden[slots.long()], slabs.cell[slots.long()] = state.hidden, state.cell
    before = slabs.hidden.clone(), slabs.cell.clone()
    expected = outputs(LSTM.run(x, weights, state, backend=backend))
    encoded = LSTM.run(x, weights, slabs, backend=backend)
    assert encoded.state is slabs
    assert torch.equal(outputs(encoded)["last"], expected["last"])
    for slab, name, old in zip((slabs.hidden, slabs.cell), ("hidden", "cell"), before, strict=True):
        assert torch.equal(slab[slots.long()], expected[name])
        assert torch.equal(slab[others], old[others])


@both
def test_a_graph_runs_with_other_lengths_slots_and_values(backend: str) -> None:
    first, second = gated([5, 9, 0, 30], 160), gated([20, 1, 17, 6], 160, seed=1)
    x = Ragged(torch.zeros(44, 640, dtype=torch.float16, device="cuda"), first.x.offsets.clone())
    slots = torch.tensor([3, 1, 0, 2], dtype=torch.int32, device="cuda")
    slabs = LSTMState(torch.zeros(4, 160, device="cuda"), torch.zeros(4, 160, device="cuda"), slots)
    weights: LSTMWeights = first.weights
    LSTM.run(x, weights, slabs, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(LSTM.run(x, weights, slabs, backend=backend))
    for problem, order in ((first, [0, 1, 2, 3]), (second, [2, 0, 3, 1])):
        tokens = len(problem.x.data)
        x.data[:tokens], slots[:] = problem.x.data, torch.tensor(order, dtype=torch.int32)
        x.offsets.copy_(problem.x.offsets)
        slabs.hidden[order], slabs.cell[order] = problem.state.hidden, problem.state.cell
        graph.replay()
        expected = outputs(LSTM.run(problem.x, weights, problem.state, backend=backend))
        assert torch.equal(encoded["steps"][:tokens], expected["steps"])
        assert all(torch.equal(encoded[name], expected[name]) for name in ("last", "mean", "max"))
        assert torch.equal(slabs.cell[order], expected["cell"])


def run_from(weights: LSTMWeights, backend: str, x: Ragged, state: LSTMState) -> Encoded:
    return LSTM.run(x, weights, state, backend=backend)


@all_three
@every_index
@pytest.mark.parametrize("hidden", [40, 130, 520])
def test_rows_begin_in_one_place_go_on_from_slot_to_slot_and_end_in_one(backend: str, index: torch.dtype, hidden: int) -> None:
    x, weights, state = gated([3, 41, 0, 8, 1, 19, *[5] * 90], hidden)
    whole, slabs = LSTM.run(x, weights, backend=backend), begun_in_zeros(state)
    steps, after = from_place_to_place(partial(run_from, weights, backend), in_chunks(x, chunks=4), slabs, index)
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    assert torch.equal(after.hidden, whole.state.hidden)
    assert torch.equal(after.cell, whole.state.cell)
    assert_only_slots_were_written(slabs)


@both
@every_index
@pytest.mark.parametrize(
    "lengths", [RAGGED, [9, 0, 0, 0], [0, 0, 0, 0], [*RAGGED * 30, 0, 0]], ids=["few", "mostly empty", "empty", "many"]
)
def test_rows_with_and_without_steps_go_on_from_their_sources_and_are_written_to_their_slots(
    backend: str, index: torch.dtype, lengths: list[int]
) -> None:
    x, weights, state = gated(lengths, 112)
    slabs = from_shared_places(state, index)
    expected = LSTM.run(x, weights, slabs.by_row(), backend=backend)
    encoded = LSTM.run(x, weights, slabs, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    assert_went_on_from_shared_places(encoded.state, state, expected.state)


@both
@every_index
def test_a_graph_goes_on_from_other_places_than_those_that_it_was_made_with(backend: str, index: torch.dtype) -> None:
    """Where all rows begin in one place at first, then where they end in one."""
    first, second = gated([5, 9, 0, 30], 160), gated([20, 0, 18, 6], 160, seed=1)
    weights: LSTMWeights = first.weights
    x = Ragged(torch.zeros_like(first.x.data), first.x.offsets.clone())
    slots, sources = torch.tensor([[3, 4, 5, 6], [ZERO] * 4], dtype=index, device="cuda")
    slabs = replace(begun_in_zeros(first.state), slots=slots, sources=sources)
    LSTM.run(x, weights, slabs, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(LSTM.run(x, weights, slabs, backend=backend))
    state, middle = None, [5, 3, 2, 7]
    for problem, origins, ends in ((first, [ZERO] * 4, middle), (second, middle, [SCRAP] * 4)):
        x.data.copy_(problem.x.data)
        x.offsets.copy_(problem.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        begun = slabs.cell[middle].clone()
        graph.replay()
        expected = LSTM.run(problem.x, weights, state, backend=backend)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)
        state = expected.state if state is None else state
        assert torch.equal(slabs.hidden[middle], state.hidden)
        assert torch.equal(slabs.cell[middle], state.cell)
        assert ends == middle or torch.equal(slabs.cell[middle], begun), "nobody writes where rows go on from"
        assert_only_slots_were_written(replace(slabs, slots=None, sources=None))


def test_what_runs_and_why() -> None:
    within = "persistent: chosen (clusters of 16 blocks up to 128 rows, the grid by 16 units)"
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=512) == within
    beyond = "persistent: chosen (the grid by 8 units up to 8 rows, the grid by 16 units)"
    assert explain("lstm", device="cuda:0", dtype="bfloat16", hidden=1024) == beyond
    assert explain("lstm", device="cuda:0", dtype="float32", hidden=512).splitlines()[-1] == "framework: chosen"
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=5000).splitlines() == [
        "persistent: this device has no room for 5000 hidden units",
        "cluster: no cluster that this device can hold has room for 5000 hidden units",
        "grid: this device has no room for 5000 hidden units",
        "framework: chosen",
    ]
    assert (
        explain("lstm", device="cuda:9", dtype="float16", hidden=512).splitlines()[0] == "persistent: there is no cuda:9 here"
    )


@pytest.fixture
def _another_device() -> Iterator[None]:
    """The shapes are found anew once the test has made the device another one."""
    with found_anew():
        yield


def chosen(hidden: int) -> str:
    problem = Problem(torch.device("cuda:0"), torch.float16, hidden)
    return next(backend.name for backend in BACKENDS if backend.refuses(problem) is None)


def shape_of(hidden: int, rows: int) -> launch.Shape | None:
    return launch._either_shape(launch.Layer(0, False, False, hidden), rows)


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize(
    "largest, hidden, shape", [(8, 256, "clusters of 8 blocks"), (8, 512, "the grid by 16 units"), (0, 128, "the grid")]
)
def test_a_device_that_holds_only_smaller_clusters(
    largest: int, hidden: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = resident_clusters
    monkeypatch.setattr(
        launch, "resident_clusters", lambda kernel, shared: resident(kernel, shared) if kernel.cluster <= largest else 0
    )
    assert chosen(hidden) == "persistent"
    assert str(shape_of(hidden, 4)).startswith(shape)
    made = given([3, 0, 11, 5], hidden)
    agree(LSTM.run(*made, backend="persistent"), LSTM.exact(made), TOLERANCE[torch.float16])


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize("capability, expected", [((8, 6), "persistent"), ((7, 5), "framework")])
def test_a_device_without_clusters(capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert chosen(256) == expected
    assert str(shape_of(256, 4)).startswith("the grid")


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize("hidden", [256, 768, 1024])
def test_without_lent_registers(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "lends_registers", lambda _: False)
    made = given([3, 0, 11, *[5] * 60], hidden)
    agree(LSTM.run(*made, backend="grid"), LSTM.exact(made), TOLERANCE[torch.float16])


def test_without_cupy_the_framework_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "installed", lambda: False)
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=96).splitlines()[-1] == "framework: chosen"


def test_the_choice_is_what_runs() -> None:
    x, weights, state = given([3, 4], 192)
    assert choice(weights).backend.name == "persistent"
    same(lstm(x, weights, state, want=EVERYTHING), LSTM.run(x, weights, state, backend="persistent"))


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    finds_nothing(tool, "tests.gpu.small_lstm")
