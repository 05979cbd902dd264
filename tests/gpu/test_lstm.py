"""Tests of the LSTM's CUDA kernels against the float64 reference: odd sizes, ragged rows, chunks, slots, graphs and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import compile as compiler
from kernels import launching
from kernels.backend import Problem, explain
from kernels.compile import resident_clusters
from kernels.lstm import BACKENDS, choice, lstm
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.persistent import cluster, grid, launch
from kernels.persistent.packing import Variant
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import LSTM, TOLERANCE, agree, close, gated, joined, outputs, same, stored
from tests.gpu.inputs import lstm as arguments
from tests.gpu.sanitizer import TOOLS, assert_no_findings
from tests.kernels import inputs
from tests.kernels.inputs import (
    EVERYTHING,
    OUTPUTS,
    SCRAP_SLOT,
    ZERO_SLOT,
    Arguments,
    assert_reserved_slots_unchanged,
    assert_shared_slots_result,
    caches_with_zero_slot,
    in_chunks,
    run_from_slot_to_slot,
    with_shared_slots,
)
from tests.kernels.shapes import fresh_shape_caches

pytestmark = pytest.mark.usefixtures("poisoned")

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
CLUSTER = [1, 33, 64, 100, 128, 151, 256, 300, 512, 640, 768]
GRID = [1, 100, 257, 512, 600, 768, 800, 1024, 1500, 2048]
SIZES = [*product(["cluster"], CLUSTER), *product(["grid"], GRID)]

both_kernels = pytest.mark.parametrize("backend", ["cluster", "grid"])
all_backends = pytest.mark.parametrize("backend", ["persistent", "cluster", "grid"])
every_size = pytest.mark.parametrize("backend, hidden", SIZES)
every_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


@every_size
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_state_match_the_reference(backend: str, hidden: int, storage: torch.dtype) -> None:
    problem = arguments(RAGGED, hidden, storage=storage)
    agree(LSTM.run(*problem, backend=backend), LSTM.exact(problem), TOLERANCE[storage])


@both_kernels
@pytest.mark.parametrize("data", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_gate_inputs_may_have_any_dtype(backend: str, data: torch.dtype) -> None:
    problem = stored(gated(RAGGED, 200), data)
    agree(LSTM.run(*problem, backend=backend), LSTM.exact(problem), TOLERANCE[torch.float16])


@all_backends
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 64, 65, 256, 700, 4096])
def test_any_number_of_rows(backend: str, rows: int) -> None:
    chance = random.Random(rows)
    x, weights, state = arguments([chance.randint(0, 4) for _ in range(rows)], 72)
    encoded = outputs(LSTM.run(x, weights, state, backend=backend))
    some = sorted(chance.sample(range(rows), min(rows, 40)))
    sampled = LSTMState(state.hidden[some], state.cell[some])
    each = inputs.rows(x)
    expected = outputs(LSTM.exact(Arguments(joined([each[row] for row in some]), weights, sampled)))
    for name in ("last", "mean", "max", "hidden", "cell"):
        close(encoded[name][some], expected[name], TOLERANCE[torch.float16], name)


@pytest.mark.parametrize("hidden", [600, 1024, 1100, 2048])
def test_many_rows_of_a_large_layer(hidden: int) -> None:
    chance = random.Random(hidden)
    x, weights, state = gated([chance.randint(0, 9) for _ in range(150)], hidden)
    encoded = LSTM.run(x, weights, state, backend="grid")
    agree(encoded, LSTM.exact(Arguments(x, weights, state)), TOLERANCE[torch.float16])
    same(LSTM.run(x, weights, state, backend="persistent"), encoded)


@pytest.mark.parametrize("hidden", [1, 64, 130, 256, 400, 512])
def test_both_kernels_give_the_same_bits_for_small_layers(hidden: int) -> None:
    problem = gated([7, 0, 3, 20, 1, 8, 8, 2, 5, *[4] * 40], hidden)
    same(LSTM.run(*problem, backend="grid"), LSTM.run(*problem, backend="cluster"))


@both_kernels
def test_gate_inputs_may_begin_at_any_address(backend: str) -> None:
    x, weights, state = gated(RAGGED, 51)
    shifted = torch.cat([x.data.new_zeros(1), x.data.flatten()])[1:].view_as(x.data)
    assert shifted.data_ptr() % 4
    same(LSTM.run(Ragged(shifted, x.offsets), weights, state, backend=backend), LSTM.run(x, weights, state, backend=backend))


@all_backends
@pytest.mark.parametrize("hidden", [40, 130, 520])
def test_row_is_bit_equal_alone_in_a_batch_and_in_chunks(backend: str, hidden: int) -> None:
    x, weights, state = gated([3, 41, 0, 8, 19, *[5] * 90], hidden)
    whole = outputs(LSTM.run(x, weights, state, backend=backend))
    for row in (0, 1, 2, 4, 60):
        row_state = LSTMState(state.hidden[row : row + 1], state.cell[row : row + 1])
        alone = outputs(LSTM.run(joined([inputs.rows(x)[row]]), weights, row_state, backend=backend))
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in ("hidden", "cell", "last", "mean", "max"))
    cuts = [1, 7, 0, 4, 2, *[2] * 90]
    pieces = [(data[:cut], data[cut : 2 * cut], data[2 * cut :]) for data, cut in zip(inputs.rows(x), cuts, strict=True)]
    steps: list[list[Tensor]] = [[] for _ in pieces]
    for chunk in map(joined, zip(*pieces, strict=True)):
        encoded = LSTM.run(chunk, weights, state, backend=backend)
        state = encoded.state
        for row_steps, part in zip(steps, inputs.rows(Ragged(outputs(encoded)["steps"], chunk.offsets)), strict=True):
            row_steps.append(part)
    assert torch.equal(torch.cat([part for row in steps for part in row]), whole["steps"])
    assert torch.equal(state.hidden, whole["hidden"])
    assert torch.equal(state.cell, whole["cell"])


@both_kernels
def test_nan_in_other_rows_does_not_reach_a_row(backend: str) -> None:
    x, weights, state = gated([4, 2, 0, 7, 7, 1, 3, 5, 6], 96)
    clean = outputs(LSTM.run(x, weights, state, backend=backend))
    data, hidden, cell = x.data.clone(), state.hidden.clone(), state.cell.clone()
    data[4:6], hidden[1], cell[3], data[-3:] = torch.nan, torch.inf, torch.nan, torch.nan
    encoded = outputs(LSTM.run(Ragged(data, x.offsets), weights, LSTMState(hidden, cell), backend=backend))
    for row in (0, 2, 4, 5, 6, 7):
        assert all(torch.equal(encoded[name][row], clean[name][row]) for name in ("hidden", "cell", "mean"))
    assert encoded["cell"][[3, 8]].isnan().all()


@both_kernels
@pytest.mark.parametrize("requested", [(), ("steps",), ("last",), ("mean",), ("max",), ("steps", "max")], ids=str)
def test_unrequested_outputs_are_none_and_change_nothing(backend: str, requested: tuple[str, ...]) -> None:
    problem = gated(RAGGED, 48)
    everything = LSTM.run(*problem, backend=backend)
    encoded = LSTM.run(*problem, want=Outputs(**dict.fromkeys(requested, True)), backend=backend)
    assert {name for name in OUTPUTS if getattr(encoded, name) is not None} == set(requested)
    same(encoded, everything)


@both_kernels
@every_index
def test_state_in_slots_is_read_and_written_in_place(backend: str, index: torch.dtype) -> None:
    x, weights, state = gated(RAGGED, 112)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: len(RAGGED)].to("cuda", index)
    others = torch.ones(40, dtype=torch.bool).index_fill(0, slots.long().cpu(), False).cuda()
    caches = LSTMState(torch.randn(40, 112, device="cuda"), torch.randn(40, 112, device="cuda"), slots)
    caches.hidden[slots.long()], caches.cell[slots.long()] = state.hidden, state.cell
    before = caches.hidden.clone(), caches.cell.clone()
    expected = outputs(LSTM.run(x, weights, state, backend=backend))
    encoded = LSTM.run(x, weights, caches, backend=backend)
    assert encoded.state is caches
    assert torch.equal(outputs(encoded)["last"], expected["last"])
    for cache, name, old in zip((caches.hidden, caches.cell), ("hidden", "cell"), before, strict=True):
        assert torch.equal(cache[slots.long()], expected[name])
        assert torch.equal(cache[others], old[others])


@both_kernels
def test_cuda_graph_serves_other_lengths_slots_and_values(backend: str) -> None:
    first, second = gated([5, 9, 0, 30], 160), gated([20, 1, 17, 6], 160, seed=1)
    x = Ragged(torch.zeros(44, 640, dtype=torch.float16, device="cuda"), first.x.offsets.clone())
    slots = torch.tensor([3, 1, 0, 2], dtype=torch.int32, device="cuda")
    caches = LSTMState(torch.zeros(4, 160, device="cuda"), torch.zeros(4, 160, device="cuda"), slots)
    weights: LSTMWeights = first.weights
    LSTM.run(x, weights, caches, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(LSTM.run(x, weights, caches, backend=backend))
    for problem, order in ((first, [0, 1, 2, 3]), (second, [2, 0, 3, 1])):
        tokens = len(problem.x.data)
        x.data[:tokens], slots[:] = problem.x.data, torch.tensor(order, dtype=torch.int32)
        x.offsets.copy_(problem.x.offsets)
        caches.hidden[order], caches.cell[order] = problem.state.hidden, problem.state.cell
        graph.replay()
        expected = outputs(LSTM.run(problem.x, weights, problem.state, backend=backend))
        assert torch.equal(encoded["steps"][:tokens], expected["steps"])
        assert all(torch.equal(encoded[name], expected[name]) for name in ("last", "mean", "max"))
        assert torch.equal(caches.cell[order], expected["cell"])


def run_from(weights: LSTMWeights, backend: str, x: Ragged, state: LSTMState) -> Encoded:
    return LSTM.run(x, weights, state, backend=backend)


@all_backends
@every_index
@pytest.mark.parametrize("hidden", [40, 130, 520])
def test_rows_share_a_first_slot_and_a_last_slot(backend: str, index: torch.dtype, hidden: int) -> None:
    x, weights, state = gated([3, 41, 0, 8, 1, 19, *[5] * 90], hidden)
    whole, caches = LSTM.run(x, weights, backend=backend), caches_with_zero_slot(state)
    steps, after = run_from_slot_to_slot(partial(run_from, weights, backend), in_chunks(x, chunks=4), caches, index)
    assert whole.steps is not None
    assert torch.equal(steps, whole.steps)
    assert torch.equal(after.hidden, whole.state.hidden)
    assert torch.equal(after.cell, whole.state.cell)
    assert_reserved_slots_unchanged(caches)


@both_kernels
@every_index
@pytest.mark.parametrize(
    "lengths", [RAGGED, [9, 0, 0, 0], [0, 0, 0, 0], [*RAGGED * 30, 0, 0]], ids=["few", "mostly empty", "empty", "many"]
)
def test_rows_start_from_sources_and_write_to_slots(backend: str, index: torch.dtype, lengths: list[int]) -> None:
    x, weights, state = gated(lengths, 112)
    caches = with_shared_slots(state, index)
    expected = LSTM.run(x, weights, caches.by_row(), backend=backend)
    encoded = LSTM.run(x, weights, caches, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    assert_shared_slots_result(encoded.state, state, expected.state)


@both_kernels
@every_index
def test_cuda_graph_serves_other_slots_and_sources(backend: str, index: torch.dtype) -> None:
    """First all rows start from one slot, then all rows write one slot."""
    first, second = gated([5, 9, 0, 30], 160), gated([20, 0, 18, 6], 160, seed=1)
    weights: LSTMWeights = first.weights
    x = Ragged(torch.zeros_like(first.x.data), first.x.offsets.clone())
    slots, sources = torch.tensor([[3, 4, 5, 6], [ZERO_SLOT] * 4], dtype=index, device="cuda")
    caches = replace(caches_with_zero_slot(first.state), slots=slots, sources=sources)
    LSTM.run(x, weights, caches, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(LSTM.run(x, weights, caches, backend=backend))
    state, middle = None, [5, 3, 2, 7]
    for problem, origins, ends in ((first, [ZERO_SLOT] * 4, middle), (second, middle, [SCRAP_SLOT] * 4)):
        x.data.copy_(problem.x.data)
        x.offsets.copy_(problem.x.offsets)
        slots.copy_(torch.tensor(ends))
        sources.copy_(torch.tensor(origins))
        begun = caches.cell[middle].clone()
        graph.replay()
        expected = LSTM.run(problem.x, weights, state, backend=backend)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)
        state = expected.state if state is None else state
        assert torch.equal(caches.hidden[middle], state.hidden)
        assert torch.equal(caches.cell[middle], state.cell)
        assert ends == middle or torch.equal(caches.cell[middle], begun), "no row writes a slot that others start from"
        assert_reserved_slots_unchanged(replace(caches, slots=None, sources=None))


def test_explain_names_the_kernel_and_the_reasons() -> None:
    within = "persistent: chosen (clusters of 16 blocks up to 128 rows, the grid with 16 units per block)"
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=512).splitlines()[1:] == [within]
    beyond = "persistent: chosen (the grid with 8 units per block up to 8 rows, the grid with 16 units per block)"
    assert explain("lstm", device="cuda:0", dtype="bfloat16", hidden=1000).splitlines()[1:] == [beyond]
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=5000).splitlines() == [
        "adaptive: no other kernel runs many rows of 5000 hidden units faster",
        "persistent: this device has no room for 5000 hidden units, at most for 2112",
        "cluster: no cluster of this device has room for 5000 hidden units, at most for 768",
        "grid: this device has no room for 5000 hidden units, at most for 2112",
        "wide: this device has no room for 5000 hidden units, at most for 2048",
        "cpu: runs on a CPU only",
        "framework: chosen",
    ]
    assert (
        explain("lstm", device="cuda:9", dtype="float16", hidden=512).splitlines()[0] == "adaptive: this machine has no cuda:9"
    )


@pytest.fixture
def _another_device() -> Iterator[None]:
    """Clear the cached shapes, because the test replaces the device."""
    with fresh_shape_caches():
        yield


def chosen(hidden: int) -> str:
    problem = Problem(torch.device("cuda:0"), torch.float16, hidden)
    return next(backend.name for backend in BACKENDS if backend.refuses(problem) is None)


def shape_of(hidden: int, rows: int) -> launch.PersistentShape | None:
    return launch.fastest_shape(Variant(0, torch.float16, False, hidden), rows, 1)


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize(
    "largest, hidden, shape",
    [(8, 256, "clusters of 8 blocks"), (8, 512, "the grid with 16 units per block"), (0, 128, "the grid")],
)
def test_smaller_clusters_run_on_a_smaller_device(
    largest: int, hidden: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = resident_clusters
    monkeypatch.setattr(
        cluster, "resident_clusters", lambda kernel, shared: resident(kernel, shared) if kernel.cluster <= largest else 0
    )
    assert chosen(hidden) == "persistent"
    assert str(shape_of(hidden, 4)).startswith(shape)
    made = arguments([3, 0, 11, 5], hidden)
    agree(LSTM.run(*made, backend="persistent"), LSTM.exact(made), TOLERANCE[torch.float16])


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize("capability, expected", [((8, 6), "persistent"), ((7, 5), "framework")])
def test_grid_kernel_runs_without_clusters(capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(compiler, "_architecture", lambda _: "compute_80")
    assert chosen(256) == expected
    assert str(shape_of(256, 4)).startswith("the grid")


@pytest.mark.usefixtures("_another_device")
@pytest.mark.parametrize("hidden", [256, 768, 1024])
def test_grid_kernel_runs_without_lent_registers(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "lends_registers", lambda _: False)
    made = arguments([3, 0, 11, *[5] * 60], hidden)
    agree(LSTM.run(*made, backend="grid"), LSTM.exact(made), TOLERANCE[torch.float16])


def test_framework_runs_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "cupy_installed", lambda: False)
    assert explain("lstm", device="cuda:0", dtype="float16", hidden=96).splitlines()[-1] == "framework: chosen"


def test_chosen_backend_runs() -> None:
    x, weights, state = arguments([3, 4], 192)
    assert choice(weights).backend.name == "persistent"
    same(lstm(x, weights, state, want=EVERYTHING), LSTM.run(x, weights, state, backend="persistent"))


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_reports_no_errors(tool: str) -> None:
    assert_no_findings(tool, "tests.gpu.small_lstm")
