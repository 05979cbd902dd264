"""Tests of the launchers of LSTMs and GRUs without a GPU: packed weights, launch shapes, tuned shapes and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gru, launching, lstm
from kernels.backend import AUTO, PINNED, Problem, choose
from kernels.compile import registers
from kernels.gated import PEEPHOLES
from kernels.gru.types import GRUState, GRUWeights
from kernels.lstm.types import LSTMState
from kernels.persistent import cluster, grid, launch, wide
from kernels.persistent.cluster import OCTETS, ClusterShape
from kernels.persistent.grid import OWNERS_REGISTERS, GridShape
from kernels.persistent.packing import HERE, OCTET, SAME_SUMS, SORTED, Variant, WidePacking, pack, pack_wide
from kernels.persistent.wide import TILES, WideShape
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from kernels.tuning import load_tuned, matching_shapes
from service.modeling.runnable_layer import weight_tensors
from tests.kernels.families import Form
from tests.kernels.shapes import fresh_shape_caches

H200_SHARED_BYTES = 232_448
run_cluster = partial(launch.encode, lstm.FUSED, launch.cluster_shape)
CELL = (HERE / "cell.cuh").read_text()


class Properties:
    name = "NVIDIA H200"
    multi_processor_count = 132


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cluster, grid, wide):
        monkeypatch.setattr(module, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(grid, "lends_registers", lambda _: True)
    monkeypatch.setattr(WideShape, "_kernel", lambda *_: None)
    monkeypatch.setattr(wide, "resident_clusters", lambda *_: 66)
    monkeypatch.setattr(GridShape, "resident", lambda shape: shape.blocks_per_multiprocessor)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


def through_fragments(packed: Tensor, hidden: Tensor) -> Tensor:
    """Return the gates of 8 rows, (8, 4, units), as m16n8k16 products compute them. hidden: (8, 32 x chunks)."""
    groups, chunks = packed.shape[:2]
    gates = torch.zeros(8, 4, groups, 8)
    for group in range(groups):
        for chunk in range(chunks):
            pieces = hidden[:, 32 * chunk : 32 * chunk + 32].view(8, 4, 8)  # row, q, unit of the piece
            for product in range(2):
                for tile in range(2):
                    lanes = packed[group, chunk, product, tile].view(8, 4, 2, 2, 2)  # g, q, upper, lower, value
                    # Rows g and g + 8 of the left operand; columns 2q, 2q + 1 and then 2q + 8, 2q + 9.
                    left = lanes.permute(3, 0, 2, 1, 4).reshape(16, 16)
                    right = pieces[:, :, 4 * product : 4 * product + 4].view(8, 4, 2, 2).permute(0, 2, 1, 3).reshape(8, 16)
                    two_gates = (right @ left.T).view(8, 2, 8)
                    gates[:, 2 * tile : 2 * tile + 2, group] += two_gates
    return gates.view(8, 4, groups * 8)


def test_packed_weights_are_tensor_core_operands() -> None:
    generator = torch.Generator().manual_seed(0)
    recurrent = torch.randn(40, 160, generator=generator)
    hidden = torch.zeros(8, 64)
    hidden[:, :40] = torch.randn(8, 40, generator=generator)
    gates = through_fragments(pack(recurrent, groups=6, chunks=2), hidden)
    torch.testing.assert_close(gates[:, :, :40].reshape(8, 160), hidden[:, :40] @ recurrent, rtol=1e-5, atol=1e-5)
    assert not gates[:, :, 40:].any(), "padding units have no weights"


def test_fourth_gate_of_a_gru_is_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    recurrent, hidden = torch.randn(40, 120, generator=generator), torch.zeros(8, 64)
    hidden[:, :40] = torch.randn(8, 40, generator=generator)
    gates = through_fragments(pack(recurrent, groups=6, chunks=2), hidden)
    torch.testing.assert_close(gates[:, :3, :40].reshape(8, 120), hidden[:, :40] @ recurrent, rtol=1e-5, atol=1e-5)
    assert not gates[:, 3].any()


@pytest.mark.parametrize("hidden", [1, 64, 65, 128, 200, 512, 700, 768])
def test_packing_does_not_depend_on_the_cluster_size(hidden: int) -> None:
    shapes = [ClusterShape(Variant(0, torch.float16, False, hidden), blocks) for blocks in (4, 8, 16)]
    fitting = [shape for shape in shapes if shape.fits(1)]
    assert fitting
    assert len({(shape.groups, shape.chunks) for shape in fitting}) == 1
    for shape in fitting:
        assert shape.units * shape.blocks >= hidden
        assert shape.threads <= 1024
        assert shape.chunks % 2 == 0, "each half has whole chunks"


def test_too_large_layer_does_not_fit_a_cluster() -> None:
    assert not any(ClusterShape(Variant(0, torch.float16, False, 1024), blocks).fits(1) for blocks in (4, 8, 16))
    assert ClusterShape(Variant(0, torch.float16, False, 768), 16).fits(1)
    assert not ClusterShape(Variant(0, torch.float16, False, 768), 8).fits(1)


@pytest.mark.parametrize(
    "rows, octets, width, tiles",
    [(1, 1, 1, 1), (7, 1, 1, 7), (8, 1, 2, 4), (56, 1, 8, 7), (57, 2, 5, 6), (100, 2, 8, 7), (256, 5, 8, 7), (4096, 5, 8, 103)],
)
def test_rows_are_spread_over_resident_clusters(
    rows: int, octets: int, width: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterShape, "resident", lambda _: 7)
    monkeypatch.setattr(ClusterShape, "kernel", lambda *_: None)
    plan = ClusterShape(Variant(0, torch.float16, False, 512), 16).launch(rows)
    assert (plan.octets, plan.width, plan.blocks) == (octets, width, 16 * tiles)
    assert plan.octets in OCTETS
    assert plan.shared <= H200_SHARED_BYTES


@pytest.mark.parametrize("rows", [1, 8, 100, 500])
@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize(
    "hidden, units",
    [(100, 16), (128, 24), (128, 32), (256, 16), (512, 16), (768, 8), (768, 24), (1024, 8), (1024, 16), (1500, 16), (2048, 16)],
)
def test_all_teams_of_a_grid_are_resident(
    hidden: int, units: int, lends: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "lends_registers", lambda _: lends)
    monkeypatch.setattr(GridShape, "_kernel", lambda *_: None)
    shape = GridShape(Variant(0, torch.float16, False, hidden), units)
    assert shape.runs()
    rows = min(rows, shape.max_rows())
    plan = shape.launch(rows)
    assert plan.blocks <= 132 * shape.blocks_per_multiprocessor
    assert plan.blocks // shape.members * plan.octets * plan.width >= rows
    assert (plan.shared + 1024) * shape.blocks_per_multiprocessor <= H200_SHARED_BYTES + 1024
    assert plan.octets * plan.width <= SORTED
    multiply, before = 32 * shape.parts, registers(shape.threads * shape.blocks_per_multiprocessor)
    after = multiply * shape.registers + (shape.threads - multiply) * (OWNERS_REGISTERS if shape.lends else before)
    assert after <= before * shape.threads, "warps would wait for registers that no warp releases"
    assert not shape.lends or shape.threads % 128 == 0, "registers move between groups of four warps"


def products_of_warp_groups(packed: Tensor, hidden: Tensor) -> Tensor:
    """Return the gates of rows, (rows, 4, units), as wgmma computes them from swizzled pieces. hidden: (rows, units)."""
    row = torch.arange(64)[:, None]
    straight = packed[:, :, row, torch.arange(8) ^ row % 8].reshape(*packed.shape[:3], 64)  # block, chunk, gate row, entry
    rows = torch.einsum("bcre,nce->nbr", straight, hidden.view(len(hidden), -1, 64))
    lanes = rows.view(len(hidden), -1, 4, 2, 4, 2)  # block, warp, upper, unit of the warp, odd
    return lanes.permute(0, 5, 3, 1, 2, 4).reshape(len(hidden), 4, -1)


@pytest.mark.parametrize("gates", [3, 4])
def test_wide_weights_are_operands_of_warp_groups(gates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    recurrent, hidden = torch.randn(128, gates * 128, generator=generator), torch.randn(5, 128, generator=generator)
    products = products_of_warp_groups(pack_wide(recurrent), hidden)
    torch.testing.assert_close(products[:, :gates].reshape(5, -1), hidden @ recurrent, rtol=1e-5, atol=1e-4)
    assert not products[:, gates:].any()


@pytest.mark.parametrize("rows", [1, 40, 64, 65, 128, 200, 256, 400])
@pytest.mark.parametrize("hidden, tile", [(64, 64), (512, 32), (768, 64), (1024, 64), (1024, 128), (2048, 64), (2048, 128)])
@pytest.mark.parametrize("gates_float32", [False, True])
def test_all_teams_of_a_wide_launch_are_resident(hidden: int, tile: int, rows: int, gates_float32: bool) -> None:
    shape = WideShape(Variant(0, torch.float16, gates_float32, hidden), tile)
    assert shape.runs()
    rows = min(rows, shape.max_rows())
    plan = shape.launch(rows)
    assert plan.blocks <= 132 and plan.blocks % 2 == 0
    assert plan.blocks // shape.members * plan.octets * plan.width >= rows
    assert plan.octets * OCTET in (tile, TILES * tile)
    assert plan.width <= OCTET and plan.octets * plan.width <= SORTED
    assert plan.shared <= H200_SHARED_BYTES
    counters, buffers = 32 * 4, 2 * hidden * tile * 2
    assert plan.exchange_words * 4 == plan.blocks // shape.members * (plan.octets * OCTET // tile) * (counters + buffers)


@pytest.mark.parametrize("hidden, storage", [(100, torch.float16), (2112, torch.float16), (512, torch.float32)])
def test_wide_kernel_needs_whole_chunks_and_16_bits(hidden: int, storage: torch.dtype) -> None:
    assert not WideShape(Variant(0, storage, False, hidden), 64).runs()


def test_wide_kernel_runs_on_capability_9_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not WideShape(Variant(0, torch.float16, False, 512), 64).runs()


@pytest.mark.parametrize("hidden", [130, 256, 300, 512])
def test_both_kernels_share_the_chunks_of_packed_weights(hidden: int) -> None:
    variant = Variant(0, torch.float16, False, hidden)
    clusters, teams = ClusterShape(variant, 16), GridShape(variant, 16)
    assert clusters.chunks == teams.chunks
    assert teams.chunks % teams.parts == 0
    assert clusters.groups >= teams.groups


@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_rows_decide_only_between_kernels_with_the_same_sums(family: str) -> None:
    shapes = load_tuned(HERE / "tuned", "NVIDIA H200")[family]
    for hidden in range(1, 2113):
        kinds = {
            next(matching_shapes(shapes, ("blocks", "units"), hidden=hidden, rows=rows, directions=directions))[0]
            for rows in (1, 8, 32, 64, 256, 4096)
            for directions in (1, 2)
        }
        assert hidden <= SAME_SUMS or kinds == {"units"}


class FakeKernel:
    """A fake kernel that records the members of Calls by name: for each direction, the members of its Call, and the blocks."""

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []
        self.grids: list[tuple[int, int, int]] = []

    def launch(self, grid: tuple[int, int, int], shared: int, members: Sequence[int]) -> None:
        *sides, blocks = members
        size = len(CALL) - 1
        self.grids.append(grid)
        self.calls += [
            dict(zip(CALL, [*sides[begin : begin + size], blocks], strict=True)) for begin in range(0, len(sides), size)
        ]


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    fake = FakeKernel()
    monkeypatch.setattr(ClusterShape, "resident", lambda _: 7)
    monkeypatch.setattr(ClusterShape, "kernel", lambda *_: fake)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(launch, "_tuned_shapes", lambda _: load_tuned(HERE / "tuned", "NVIDIA H200")["lstm"])
    with fresh_shape_caches():
        yield fake


CALL = [
    name
    for declared in re.findall(
        r"^    (?:const )?(?:\w+\*|long long) ([\w, ]+);", CELL[CELL.index("struct Call") :], re.MULTILINE
    )
    for name in declared.split(", ")
][:26]


def test_launcher_passes_the_members_of_call_in_order(fake_kernel: FakeKernel) -> None:
    assert CALL[0] == "gates"
    assert CALL[-1] == "blocks"
    x, weights, state = Form("lstm").arguments([3, 0, 4], 40, 8, storage=torch.float16)
    x = Ragged(x.data.half(), x.offsets.long())
    encoded = run_cluster(x, weights, state, want=Outputs(steps=True, mean=True))
    (call,) = fake_kernel.calls
    numbers = {"wide": 1, "first": 0, "until": 3, "hidden": 40, "octets": 1, "width": 1, "forward": 1}
    numbers |= {"gates_apart": 160, "outputs_apart": 40}
    assert {name: call[name] for name in numbers} == numbers
    addresses = {
        "packed": weights.packed[8, 2],
        "offsets": x.offsets,
        "hidden_before": state.hidden,
        "cell_before": state.cell,
        "hidden_after": encoded.state.hidden,
        "cell_after": encoded.state.cell,
        "steps": encoded.steps,
        "mean": encoded.mean,
    }
    assert {name: call[name] for name in addresses} == {name: array.data_ptr() for name, array in addresses.items()}
    assert [name for name in CALL[:16] if call[name] == 0] == [
        "scale",
        "own",
        "slots_before",
        "slots_after",
        "last",
        "max",
        "exchange",
    ]


def test_gru_passes_its_bias_and_no_cell(fake_kernel: FakeKernel) -> None:
    x, weights, state = Form("gru", reset="after").arguments([3, 0, 4], 40, 8, storage=torch.float16)
    encoded = launch.encode(gru.FUSED, launch.cluster_shape, x, weights, state, want=Outputs(last=True))
    (call,) = fake_kernel.calls
    assert call["packed"] == weights.packed[8, 2].data_ptr() and call["own"] == weights.packed["own"].data_ptr()
    assert weights.packed["own"].dtype == torch.float32
    assert (call["hidden_before"], call["hidden_after"]) == (state.hidden.data_ptr(), encoded.state.hidden.data_ptr())
    assert call["cell_before"] == call["cell_after"] == 0
    assert isinstance(encoded.state, GRUState) and encoded.last is encoded.state.hidden


def test_tf32_runs_float32_layers_with_float16_weights(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "allows_tf32", lambda *_: True)
    x, weights, state = Form("lstm").arguments([3, 0, 4], 40, 8)
    weights = replace(weights, recurrent=weights.recurrent.float() * 1e6)
    encoded = run_cluster(x, weights, state, want=Outputs(last=True))
    (call,) = fake_kernel.calls
    held = weights.packed[(8, 2), torch.float16]
    assert call["packed"] == held.data_ptr() and call["scale"] == 0
    assert torch.equal(held, pack(weights.recurrent.clamp(-65504, 65504).half(), 8, 2))
    assert held.isfinite().all()
    assert encoded.last is not None and encoded.last.dtype == torch.float32


def test_tf32_runs_sizes_that_two_terms_have_no_room_for() -> None:
    problem = Problem(torch.device("cuda:0"), torch.float32, 1024)
    exact, tf32 = (lstm.FUSED.variant(one) for one in (problem, replace(problem, tf32=True)))
    assert (exact.terms, tf32.terms) == (2, 1)
    assert launch.fastest_shape(exact, 8, 1) is None
    assert isinstance(launch.fastest_shape(tf32, 8, 1), GridShape)


def test_gate_inputs_end_with_a_whole_word(fake_kernel: FakeKernel) -> None:
    """The grid kernel reads words, and three gate inputs of 16 bits may end within one."""
    form = Form("gru", reset="after")
    x, weights, state = form.gated(form.arguments([3, 0, 4], 5, 8))
    half = Ragged(x.data.half(), x.offsets)
    halves = GRUWeights(None, weights.recurrent.half(), None, weights.recurrent_bias)
    launch.encode(gru.FUSED, launch.cluster_shape, half, halves, state, want=Outputs())
    (call,) = fake_kernel.calls
    assert half.data.numel() % 2 and call["gates"] % 4 == 0 and call["gates"] != half.data.data_ptr()


def test_peepholes_are_passed_as_they_are(fake_kernel: FakeKernel) -> None:
    x, weights, state = Form("lstm", peepholes=True).arguments([3], 40, 8, storage=torch.float16)
    run_cluster(x, weights, state, want=Outputs())
    (call,) = fake_kernel.calls
    assert call["own"] == weights.packed["own"].data_ptr()
    torch.testing.assert_close(weights.packed["own"], weights.peephole.float())


def test_both_directions_share_a_launch(fake_kernel: FakeKernel) -> None:
    forward, backward = (Form("lstm").arguments([3, 0, 4], 40, 8, storage=torch.float16, seed=seed) for seed in (0, 1))
    x, pair = Ragged(forward.x.data.half(), forward.x.offsets), (forward.weights, backward.weights)
    states = forward.state, backward.state
    encoded = launch.encode_both(lstm.FUSED, launch.cluster_shape, x, pair, states, want=Outputs(steps=True, last=True))
    first, second = fake_kernel.calls
    assert fake_kernel.grids == [(2 * first["blocks"], 1, 1)]
    assert (first["forward"], second["forward"]) == (1, 0)
    assert first["gates_apart"] == second["gates_apart"] == 320 and second["gates"] == first["gates"] + 160 * 2
    assert first["outputs_apart"] == second["outputs_apart"] == 80
    assert encoded.steps is not None and encoded.last is not None
    for name, output in (("steps", encoded.steps), ("last", encoded.last)):
        assert output.shape[1] == 80 and (first[name], second[name]) == (output.data_ptr(), output.data_ptr() + 40 * 4)
    for call, weights, before, after in zip((first, second), pair, states, encoded.state, strict=True):
        assert call["packed"] == weights.packed[8, 2].data_ptr()
        assert (call["hidden_before"], call["cell_after"]) == (before.hidden.data_ptr(), after.cell.data_ptr())


def test_directions_run_one_after_the_other_without_room_for_both(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GridShape, "_kernel", lambda *_: fake_kernel)
    pair = tuple(
        Form("gru", reset="after").arguments([2], 2048, 8, storage=torch.float16, seed=seed).weights for seed in (0, 1)
    )
    x = Ragged(torch.zeros(2, 8).half(), torch.tensor([0, 2], dtype=torch.int32))
    launch.encode_both(gru.FUSED, launch.grid_shape, x, pair, None, want=Outputs(last=True))
    first, second = fake_kernel.calls
    assert fake_kernel.grids == [(first["blocks"], 1, 1), (second["blocks"], 1, 1)]
    assert (first["forward"], second["forward"]) == (1, 0) and first["exchange"] and second["exchange"]


def test_products_of_both_directions_are_joined_once(fake_kernel: FakeKernel) -> None:
    first, second, third = (Form("lstm").arguments([3], 40, 8, storage=torch.float16, seed=seed) for seed in range(3))
    x = Ragged(first.x.data.half(), first.x.offsets)
    run = partial(launch.encode_both, lstm.FUSED, launch.cluster_shape, x, want=Outputs())
    for other in (second, second, third):
        run((first.weights, other.weights), None)
        kept = first.weights.packed["both", "input"]
        assert kept.second is other.weights
        [joined] = kept.arrays
        assert torch.equal(joined, torch.cat((first.weights.input, other.weights.input), dim=1))
        assert any(tensor is joined for tensor in weight_tensors(first.weights)), "its bytes are counted"


def levels_of(form: Form, hidden: int, levels: int) -> tuple[Ragged, list[Any], list[Any]]:
    """Return the data, and the weights and states of each level."""
    first, *above = (
        form.arguments([3, 0, 4], hidden, width, storage=torch.float16, seed=level)
        for level, width in enumerate([8, *[hidden] * (levels - 1)])
    )
    x = Ragged(first.x.data.half(), first.x.offsets)
    return x, [level.weights for level in (first, *above)], [level.state for level in (first, *above)]


@pytest.fixture
def together(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    """Run as many levels at once as there is room for."""
    monkeypatch.setattr(WideShape, "_kernel", lambda *_: fake_kernel)
    monkeypatch.setattr(launch, "_tuned", lambda _: {**load_tuned(HERE / "tuned", "NVIDIA H200"), "levels": [{"tile": 32}]})
    return fake_kernel


@pytest.mark.parametrize("form", [Form("lstm"), Form("gru", reset="after")], ids=str)
def test_levels_share_a_launch(together: FakeKernel, form: Form) -> None:
    x, weights, states = levels_of(form, 64, 3)
    family = lstm.FUSED if form.family == "lstm" else gru.FUSED
    encoded = launch.encode_levels(family, x, weights, states, want=Outputs(steps=True, last=True))
    calls = together.calls
    assert len(calls) == 3 and together.grids == [(3 * calls[0]["blocks"], 1, 1)]
    columns = weights[0].bias.numel()
    assert [call["gates_apart"] for call in calls] == [columns, 0, 0], (
        "every token of a level above has the bias as its gate inputs"
    )
    assert [call["gates"] for call in calls[1:]] == [layer.packed["bias", torch.float16].data_ptr() for layer in weights[1:]]
    assert [bool(call["steps"]) for call in calls] == [False, False, True], (
        "only the outputs of the last level leave the kernel"
    )
    assert len({call["exchange"] for call in calls}) == 3 and all(call["forward"] == 1 for call in calls)
    for call, before, after in zip(calls, states, encoded.state, strict=True):
        assert (call["hidden_before"], call["hidden_after"]) == (before.hidden.data_ptr(), after.hidden.data_ptr())
    assert encoded.last is encoded.state[-1].hidden


@pytest.mark.parametrize("gates", [3, 4])
def test_level_above_the_first_multiplies_its_inputs_first(gates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, recurrent = torch.randn(2, 128, gates * 128, generator=generator)
    vectors = torch.randn(5, 256, generator=generator)
    below, own = vectors[:, :128], vectors[:, 128:]
    products = products_of_warp_groups(WidePacking().pack_with_inputs(inputs, recurrent), vectors)
    from_inputs, from_hidden = ((left @ right).view(5, gates, 128) for left, right in ((below, inputs), (own, recurrent)))
    sums = [from_inputs[:, gate] + from_hidden[:, gate] for gate in range(gates)]
    if gates == 3:  # the product of a GRU's new gate and its input are separate sums
        sums = [*sums[:2], from_hidden[:, 2], from_inputs[:, 2]]
    torch.testing.assert_close(products, torch.stack(sums, dim=1), rtol=1e-5, atol=1e-4)


def test_levels_beyond_the_room_of_the_device_run_in_another_launch(together: FakeKernel) -> None:
    x, weights, states = levels_of(Form("lstm"), 512, 7)
    launch.encode_levels(lstm.FUSED, x, weights, states, want=Outputs(last=True))
    assert together.grids == [(128, 1, 1), (96, 1, 1)]
    assert [call["gates_apart"] > 0 for call in together.calls] == [True, False, False, False, True, False, False]
    assert together.calls[3]["steps"], "the next launch reads the steps of this one"


@pytest.mark.parametrize("different", [{"hidden": 128}, {"storage": torch.float32}, {"projection": True}])
def test_levels_that_the_kernel_does_not_run_at_once(
    different: dict[str, Any], together: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def encode(_: Any, __: Any, x: Ragged, weights: Sequence[Any], *___: Any) -> Encoded:
        counted.append(len(weights))
        return Encoded((None,), steps=torch.zeros(7, 8))

    monkeypatch.setattr(launch, "_encode", encode)
    hidden, storage = different.get("hidden", 64), different.get("storage", torch.float16)
    form = Form("lstm", projection=True) if "projection" in different else Form("lstm")
    below = form.arguments([3, 0, 4], 64, 8, storage=storage)
    above = form.arguments([3, 0, 4], hidden, 64, storage=storage).weights
    x = Ragged(below.x.data.to(storage), below.x.offsets)
    launch.encode_levels(lstm.FUSED, x, [below.weights, above], None, want=Outputs(last=True))
    assert counted == [1, 1] and not together.calls


def test_backend_for_several_levels_is_adaptive(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "cupy_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for hidden, levels, expected in (
        (512, 1, "persistent"),
        (512, 2, "adaptive"),
        (512, 7, "adaptive"),
        (128, 2, "persistent"),
    ):
        problem = Problem(torch.device("cuda:0"), torch.float16, hidden, levels=levels)
        assert choose(lstm.BACKENDS, problem).backend.name == expected
        assert choose(lstm.BACKENDS, problem, PINNED).backend.name == "persistent"


@pytest.mark.parametrize("levels", [1, 2, 4])
@pytest.mark.parametrize("hidden, tile", [(64, 16), (256, 64), (512, 32)])
def test_all_levels_of_a_launch_are_resident(hidden: int, tile: int, levels: int) -> None:
    shape = WideShape(Variant(0, torch.float16, False, hidden), tile, levels)
    assert shape.runs()
    plan = shape.launch(shape.max_rows())
    assert levels * plan.blocks <= 132 and plan.shared <= H200_SHARED_BYTES
    assert not WideShape(Variant(0, torch.float16, False, hidden), tile, 132 * 16 // hidden + 1).has_room()


def test_state_in_slots_is_updated_in_place(fake_kernel: FakeKernel) -> None:
    x, weights, _ = Form("lstm").arguments([3, 0, 4], 40, 8, storage=torch.float16)
    caches = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), torch.tensor([8, 1, 2], dtype=torch.int32))
    encoded = run_cluster(x, weights, caches, want=Outputs(last=True))
    (call,) = fake_kernel.calls
    assert encoded.state is caches
    assert call["slots_before"] == call["slots_after"] == caches.slots.data_ptr()
    assert call["hidden_before"] == call["hidden_after"] == caches.hidden.data_ptr()
    assert encoded.last is not None
    assert call["last"] == encoded.last.data_ptr()
    with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
        run_cluster(x, weights, LSTMState(caches.hidden, caches.cell.half(), caches.slots), want=Outputs())


def test_state_is_read_from_sources_and_written_to_slots(fake_kernel: FakeKernel) -> None:
    x, weights, _ = Form("lstm").arguments([3, 0, 4], 40, 8, storage=torch.float16)
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    caches = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), slots, sources)
    after = run_cluster(x, weights, caches, want=Outputs(last=True)).state
    (call,) = fake_kernel.calls
    assert (call["slots_before"], call["slots_after"]) == (sources.data_ptr(), slots.data_ptr())
    assert call["hidden_before"] == call["hidden_after"] == caches.hidden.data_ptr()
    assert after.hidden is caches.hidden and after.slots is slots and after.sources is None


def test_weights_are_packed_once(fake_kernel: FakeKernel) -> None:
    x, weights, state = Form("lstm").arguments([3, 0, 4], 40, 8, storage=torch.bfloat16)
    for _ in range(2):
        run_cluster(x, weights, state, want=Outputs())
    first, second = fake_kernel.calls
    assert first["packed"] == second["packed"]
    assert len(weights.packed) == 1


def test_batch_without_rows_launches_nothing(fake_kernel: FakeKernel) -> None:
    x, weights, state = Form("lstm").arguments([], 40, 8, storage=torch.float16)
    encoded = run_cluster(x, weights, state, want=Outputs(steps=True, last=True, mean=True, max=True))
    assert not fake_kernel.calls
    assert encoded.steps is not None
    assert encoded.steps.shape == (0, 40)


def test_matching_shapes_respects_the_bounds() -> None:
    shapes = [{"hidden": 128, "rows": 8, "blocks": 4}, {"hidden": 128, "units": 2}, {"rows": 9, "blocks": 1}]
    assert list(matching_shapes(shapes, ("blocks", "units"), hidden=128, rows=8)) == [
        ("blocks", 4),
        ("units", 2),
        ("blocks", 1),
    ]
    assert list(matching_shapes(shapes, ("blocks",), hidden=128, rows=8)) == [("blocks", 4), ("blocks", 1)]
    assert list(matching_shapes(shapes, ("blocks", "units"), hidden=1, rows=9)) == [("units", 2), ("blocks", 1)]
    assert list(matching_shapes(shapes, ("blocks", "units"), hidden=129, rows=10)) == []


def test_describe_names_the_kernel_for_each_number_of_rows(fake_kernel: FakeKernel) -> None:
    few = "the grid with 8 units per block up to 8 rows, the grid with 16 units per block"
    for backend, hidden, description in (
        ("persistent", 128, "clusters of 8 blocks up to 64 rows, clusters of 2 blocks"),
        ("persistent", 512, "clusters of 16 blocks up to 128 rows, the grid with 16 units per block"),
        ("persistent", 1024, few),
        ("adaptive", 1024, f"{few} up to 64 rows, wide tiles of 64 rows"),
        (
            "adaptive",
            2048,
            "the grid with 16 units per block up to 32 rows, wide tiles of 64 rows up to 64 rows, wide tiles of 128 rows",
        ),
    ):
        describe = next(one for one in lstm.BACKENDS if one.name == backend).describe
        assert describe is not None
        assert describe(Problem(torch.device("cuda:0"), torch.float16, hidden)) == description


@pytest.mark.parametrize(
    "hidden, storage, variants, requested, name",
    [
        (1024, torch.float16, (), AUTO, "adaptive"),
        (1024, torch.float16, (), PINNED, "persistent"),
        (768, torch.bfloat16, (PEEPHOLES,), AUTO, "adaptive"),
        (512, torch.float16, (), AUTO, "persistent"),
        (1000, torch.float16, (), AUTO, "persistent"),
        (512, torch.float32, (), AUTO, "persistent"),
    ],
)
def test_backend_adapts_to_the_rows_unless_it_is_pinned(
    fake_kernel: FakeKernel,
    hidden: int,
    storage: torch.dtype,
    variants: tuple[str, ...],
    requested: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "cupy_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose(lstm.BACKENDS, Problem(torch.device("cuda:0"), storage, hidden, variants), requested).backend.name == name


def test_device_uses_the_shapes_with_its_name(tmp_path: Path) -> None:
    for name in ("h200", "h100"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": name}))
    assert load_tuned(tmp_path, "NVIDIA H100 80GB HBM3")["device"] == "h100"
    assert load_tuned(tmp_path, "NVIDIA H200")["device"] == "h200"
    assert load_tuned(tmp_path, "NVIDIA B200")["device"] == "h200", "the default for devices that were not measured"
