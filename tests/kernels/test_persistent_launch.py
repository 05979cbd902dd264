"""The launchers of LSTMs and GRUs on an emulated H200: packed weights, launch shapes, tuned shapes and arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gru, lstm
from kernels.backend import AUTO, PINNED, Problem, choose
from kernels.compile import registers
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMState
from kernels.persistent import grid, launch
from kernels.persistent.cluster import OCTETS, ClusterShape
from kernels.persistent.grid import OWNERS_REGISTERS, GridShape
from kernels.persistent.packing import HERE, OCTET, SAME_SUMS, SORTED, Variant, WidePacking, pack, pack_wide
from kernels.persistent.two_products import THREADS, TwoProductsCluster, TwoProductsGrid
from kernels.persistent.wide import TILES, WideShape
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from kernels.tuning import load_tuned, matching_shapes
from service.modeling.runnable_layer import weight_tensors
from tests.kernels.devices import H200, FakeKernel, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING
from tests.kernels.sources import members

SHARED_BYTES, PROCESSORS = H200.shared_memory_per_block_optin, H200.multi_processor_count
HALF, CUDA = torch.float16, torch.device("cuda:0")
FAMILIES = {"lstm": lstm.FUSED, "gru": gru.FUSED}
LSTM, GRU, LENGTHS = Form("lstm"), Form("gru", reset="after"), [3, 0, 4]
RESET, PROJECTED = Form("gru", reset="before"), Form("lstm", projection=True, peepholes=True)
LAST = Outputs(last=True)
CALL = [member.name for member in members(HERE / "cell.cuh", "Call")]
cluster_shape = launch.cluster_shape


@pytest.fixture(autouse=True)
def made() -> Iterator[list[FakeKernel]]:
    with emulated(H200) as kernels:
        yield kernels


def plain(hidden: int, **changes: Any) -> Variant:
    return Variant(0, HALF, False, hidden)._replace(**changes)


def two_products(form: Form, hidden: int, vector: int) -> Variant:
    return plain(hidden, gru=form.family == "gru", vector=vector)


# Packed weights.


def through_fragments(packed: Tensor, hidden: Tensor) -> Tensor:
    """Return the gates of 8 rows, (8, 4, units), as m16n8k16 products compute them. hidden: (8, 32 x chunks)."""
    groups, chunks = packed.shape[:2]
    # Rows g and g + 8 of the left operand; columns 2q, 2q + 1 and then 2q + 8, 2q + 9.
    left = packed.float().view(groups, chunks, 2, 2, 8, 4, 2, 2, 2)  # group, chunk, product, tile, g, q, upper, lower, value
    right = hidden.view(8, chunks, 4, 2, 2, 2)  # row, chunk, q, product, upper, value
    sums = torch.einsum("ncpxgqulv,rcqpuv->rxlng", left, right)
    return sums.reshape(8, 4, groups * 8)


@pytest.mark.parametrize("gates", [3, 4])
def test_packed_weights_are_tensor_core_operands(gates: int) -> None:
    """The fourth gate of a GRU is zero, and so are padding units."""
    generator = torch.Generator().manual_seed(0)
    recurrent, hidden = torch.randn(40, gates * 40, generator=generator), torch.zeros(8, 64)
    hidden[:, :40] = torch.randn(8, 40, generator=generator)
    products = through_fragments(pack(recurrent, groups=6, chunks=2), hidden)
    expected = hidden[:, :40] @ recurrent
    torch.testing.assert_close(products[:, :gates, :40].reshape(8, -1), expected, rtol=1e-5, atol=1e-5)
    assert not products[:, :, 40:].any() and not products[:, gates:].any()


def products_of_warp_groups(packed: Tensor, hidden: Tensor) -> Tensor:
    """Return the gates of rows, (rows, 4, units), as wgmma computes them from swizzled pieces. hidden: (rows, units)."""
    row = torch.arange(64)[:, None]
    straight = packed[:, :, row, torch.arange(8) ^ row % 8].reshape(*packed.shape[:3], 64)  # block, chunk, gate row, entry
    rows = torch.einsum("bcre,nce->nbr", straight, hidden.view(len(hidden), -1, 64))
    lanes = rows.view(len(hidden), -1, 4, 2, 4, 2)  # block, warp, upper, unit of the warp, odd
    return lanes.permute(0, 5, 3, 1, 2, 4).reshape(len(hidden), 4, -1)


@pytest.mark.parametrize("gates", [3, 4])
def test_wide_weights_are_operands_of_warp_groups(gates: int) -> None:
    """A level above the first multiplies its inputs first."""
    generator = torch.Generator().manual_seed(0)
    inputs, recurrent = torch.randn(2, 128, gates * 128, generator=generator)
    vectors = torch.randn(5, 256, generator=generator)
    below, own = vectors[:, :128], vectors[:, 128:]
    from_inputs, from_hidden = ((left @ right).view(5, gates, 128) for left, right in ((below, inputs), (own, recurrent)))
    alone = products_of_warp_groups(pack_wide(recurrent), own.contiguous())
    torch.testing.assert_close(alone[:, :gates], from_hidden, rtol=1e-5, atol=1e-4)
    assert not alone[:, gates:].any()
    sums = [from_inputs[:, gate] + from_hidden[:, gate] for gate in range(gates)]
    if gates == 3:  # the product of a GRU's new gate and its input are separate sums
        sums = [*sums[:2], from_hidden[:, 2], from_inputs[:, 2]]
    both = products_of_warp_groups(WidePacking().pack_with_inputs(inputs, recurrent), vectors)
    torch.testing.assert_close(both, torch.stack(sums, dim=1), rtol=1e-5, atol=1e-4)


# Launch shapes.


@pytest.mark.parametrize("hidden", [1, 65, 200, 512, 768])
def test_packing_does_not_depend_on_the_launch_shape(hidden: int) -> None:
    clusters = [ClusterShape(plain(hidden), blocks) for blocks in (4, 8, 16)]
    fitting, teams = [shape for shape in clusters if shape.fits(1)], GridShape(plain(hidden), 16)
    assert len({(shape.groups, shape.chunks) for shape in fitting}) == 1
    for shape in fitting:
        assert shape.units * shape.blocks >= hidden and shape.threads <= 1024
        assert shape.chunks % 2 == 0, "each half has whole chunks"
        assert hidden < 130 or (shape.chunks == teams.chunks and shape.groups >= teams.groups)
    assert teams.chunks % teams.parts == 0


def test_too_large_layers_fit_no_cluster() -> None:
    fits = {
        (hidden, blocks): ClusterShape(plain(hidden), blocks).fits(1) for hidden, blocks in ((1024, 16), (768, 16), (768, 8))
    }
    assert fits == {(1024, 16): False, (768, 16): True, (768, 8): False}
    assert TwoProductsCluster(two_products(RESET, 512, 512), 16).fits(1)
    assert not TwoProductsCluster(two_products(RESET, 1024, 1024), 16).fits(1)
    assert TwoProductsGrid(two_products(PROJECTED, 4096, 512), 32).runs()


@pytest.mark.parametrize(
    "rows, octets, width, tiles",
    [(1, 1, 1, 1), (7, 1, 1, 7), (8, 1, 2, 4), (56, 1, 8, 7), (57, 2, 5, 6), (100, 2, 8, 7), (256, 5, 8, 7), (4096, 5, 8, 103)],
)
def test_rows_are_spread_over_resident_clusters(rows: int, octets: int, width: int, tiles: int) -> None:
    plan = ClusterShape(plain(512), 16).launch(rows)
    assert (plan.octets, plan.width, plan.blocks) == (octets, width, 16 * tiles)
    assert plan.octets in OCTETS and plan.shared <= SHARED_BYTES


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("hidden, units", [(100, 16), (128, 32), (256, 16), (768, 24), (1024, 8), (1500, 16), (2048, 16)])
def test_all_teams_of_a_grid_are_resident(hidden: int, units: int, lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "lends_registers", lambda _: lends)
    shape = GridShape(plain(hidden), units)
    for rows in (1, 8, 500):
        rows = min(rows, shape.max_rows())
        plan = shape.launch(rows)
        assert plan.blocks <= PROCESSORS * shape.blocks_per_multiprocessor
        assert plan.blocks // shape.members * plan.octets * plan.width >= rows
        assert (plan.shared + 1024) * shape.blocks_per_multiprocessor <= SHARED_BYTES + 1024
        assert plan.octets * plan.width <= SORTED
    multiply, before = 32 * shape.parts, registers(shape.threads * shape.blocks_per_multiprocessor)
    after = multiply * shape.registers + (shape.threads - multiply) * (OWNERS_REGISTERS if shape.lends else before)
    assert after <= before * shape.threads, "warps would wait for registers that no warp releases"
    assert not shape.lends or shape.threads % 128 == 0, "registers move between groups of four warps"


@pytest.mark.parametrize("hidden, tile", [(64, 64), (512, 32), (768, 64), (1024, 128), (2048, 64)])
@pytest.mark.parametrize("gates_float32", [False, True])
def test_all_teams_of_a_wide_launch_are_resident(hidden: int, tile: int, gates_float32: bool) -> None:
    shape = WideShape(plain(hidden, gates_float32=gates_float32), tile)
    for rows in (1, 40, 65, 200, 400):
        rows = min(rows, shape.max_rows())
        plan = shape.launch(rows)
        assert plan.blocks <= PROCESSORS and plan.blocks % 2 == 0 and plan.shared <= SHARED_BYTES
        assert plan.blocks // shape.members * plan.octets * plan.width >= rows
        assert plan.octets * OCTET in (tile, TILES * tile)
        assert plan.width <= OCTET and plan.octets * plan.width <= SORTED
        counters, buffers = 32 * 4, 2 * hidden * tile * 2
        assert plan.exchange_words * 4 == plan.blocks // shape.members * (plan.octets * OCTET // tile) * (counters + buffers)


def test_wide_kernel_needs_whole_chunks_16_bits_and_capability_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WideShape(plain(512), 64).runs()
    for variant in (plain(100), plain(2112), plain(512, storage=torch.float32)):
        assert not WideShape(variant, 64).runs()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not WideShape(plain(512), 64).runs()


@pytest.mark.parametrize("form", [RESET, PROJECTED], ids=str)
@pytest.mark.parametrize("hidden", [8, 100, 512, 1024, 2048])
def test_launches_of_two_products_have_room_for_their_rows(form: Form, hidden: int) -> None:
    variant = two_products(form, hidden, hidden if form is RESET else hidden // 2)
    shapes: list[Any] = [TwoProductsCluster(variant, size) for size in (2, 8, 16)]
    shapes += [TwoProductsGrid(variant, size) for size in (8, 16, 32)]
    running = [shape for shape in shapes if shape.runs()]
    assert running and all(launch.fastest_shape(variant, rows, 1) for rows in (1, 100, 5000))
    for shape in running:
        fitting = min(500, shape.max_rows())
        plan = shape.launch(fitting)
        assert plan.blocks // shape.members * plan.octets * plan.width >= fitting
        assert shape.units * shape.members >= variant.hidden and shape.outputs * shape.members >= variant.vector
        assert plan.shared <= SHARED_BYTES and 0 < 4 * shape.held(plan.octets) < registers(THREADS)
        assert (plan.exchange_words == 0) == shape.cluster
        assert shape.cluster or plan.blocks <= PROCESSORS, "all blocks of a cooperative launch are resident"
    exchanged = TwoProductsGrid(two_products(form, 100, 100 if form is RESET else 30), 16).launch(1).exchange_words
    # The hidden state of a projection takes twice its size.
    assert exchanged * 4 == (2 * 128 * 16 if form is RESET else 2 * 32 * 16 + 128 * 16)


# Tuned shapes.


@pytest.mark.parametrize("family", ["lstm", "gru"])
def test_rows_decide_only_between_kernels_with_the_same_sums(family: str) -> None:
    tuned = load_tuned(HERE / "tuned", "NVIDIA H200")
    for hidden in (*range(1, 2113, 64), SAME_SUMS, SAME_SUMS + 1):
        kinds = {
            next(matching_shapes(tuned[family], ("blocks", "units"), hidden=hidden, rows=rows, directions=directions))[0]
            for rows in (1, 8, 32, 64, 256, 4096)
            for directions in (1, 2)
        }
        assert hidden <= SAME_SUMS or kinds == {"units"}
    assert all(set(shape) & set(launch.TWO_PRODUCTS) for shape in tuned[f"{family}, two products"])


def test_matching_shapes_respects_the_bounds() -> None:
    shapes = [{"hidden": 128, "rows": 8, "blocks": 4}, {"hidden": 128, "units": 2}, {"rows": 9, "blocks": 1}]
    for hidden, rows, expected in (
        (128, 8, [("blocks", 4), ("units", 2), ("blocks", 1)]),
        (1, 9, [("units", 2), ("blocks", 1)]),
        (129, 10, []),
    ):
        assert list(matching_shapes(shapes, ("blocks", "units"), hidden=hidden, rows=rows)) == expected
    assert list(matching_shapes(shapes, ("blocks",), hidden=128, rows=8)) == [("blocks", 4), ("blocks", 1)]


def test_device_uses_the_shapes_with_its_name(tmp_path: Path) -> None:
    for name in ("h200", "h100"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": name}))
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "h200"}
    assert {name: load_tuned(tmp_path, name)["device"] for name in names} == names, "H200 where nothing was measured"


FEW = "the grid with 8 units per block up to 8 rows, the grid with 16 units per block"


@pytest.mark.parametrize(
    "family, backend, hidden, variants, description",
    [
        ("lstm", "persistent", 128, (), "clusters of 8 blocks up to 64 rows, clusters of 2 blocks"),
        ("lstm", "persistent", 512, (), "clusters of 16 blocks up to 128 rows, the grid with 16 units per block"),
        ("lstm", "adaptive", 1024, (), f"{FEW} up to 64 rows, wide tiles of 64 rows"),
        (
            *("gru", "persistent", 512, (RESET_BEFORE,)),
            "two products a step: clusters of 16 blocks up to 32 rows, clusters of 8 blocks up to 64 rows, "
            "the grid with 32 units per block",
        ),
    ],
)
def test_describe_names_the_kernel_for_each_number_of_rows(
    family: str, backend: str, hidden: int, variants: tuple[str, ...], description: str
) -> None:
    backends = {"lstm": lstm.BACKENDS, "gru": gru.BACKENDS}[family]
    describe = next(one.describe for one in backends if one.name == backend)
    assert describe is not None and describe(Problem(CUDA, HALF, hidden, variants)) == description


@pytest.mark.parametrize(
    "hidden, storage, options, requested, name",
    [
        (1024, HALF, {}, AUTO, "adaptive"),
        (1024, HALF, {}, PINNED, "persistent"),
        (768, torch.bfloat16, {"variants": (PEEPHOLES,)}, AUTO, "adaptive"),
        (1000, HALF, {}, AUTO, "persistent"),
        (512, torch.float32, {}, AUTO, "persistent"),
        (512, HALF, {}, AUTO, "persistent"),
        (512, HALF, {"levels": 2}, AUTO, "adaptive"),
        (512, HALF, {"levels": 2}, PINNED, "persistent"),
        (128, HALF, {"levels": 2}, AUTO, "persistent"),
    ],
)
def test_backend_adapts_to_rows_and_levels_unless_it_is_pinned(
    hidden: int, storage: torch.dtype, options: dict[str, Any], requested: str, name: str
) -> None:
    assert choose(lstm.BACKENDS, Problem(CUDA, storage, hidden, **options), requested).backend.name == name


def test_variant_follows_the_problem() -> None:
    projected = lstm.FUSED.variant(Problem(CUDA, HALF, 512, (PEEPHOLES, PROJECTION), 128))
    assert (projected.vector, projected.peepholes, projected.gru) == (128, True, False)
    before = gru.FUSED.variant(Problem(CUDA, HALF, 512, (RESET_BEFORE,), 512))
    assert (before.vector, before.gru) == (512, True)
    assert all(isinstance(launch.fastest_shape(variant, 8, 1), TwoProductsCluster) for variant in (projected, before))
    assert lstm.FUSED.variant(Problem(CUDA, HALF, 512, (PEEPHOLES,), 512)).vector == 0
    exact, tf32 = (lstm.FUSED.variant(Problem(CUDA, torch.float32, 1024, tf32=allowed)) for allowed in (False, True))
    assert (exact.terms, tf32.terms) == (2, 1)
    assert launch.fastest_shape(exact, 8, 1) is None, "two terms have no room"
    assert isinstance(launch.fastest_shape(tf32, 8, 1), GridShape)


# Arguments of the kernels.


def arguments_of(form: Form, hidden: int = 40, lengths: Sequence[int] = LENGTHS, **options: Any) -> tuple[Ragged, Any, Any]:
    x, weights, state = form.arguments(lengths, hidden, options.pop("inputs", 8), storage=HALF, **options)
    return Ragged(x.data.half(), x.offsets), weights, state


def run(form: Form, *arguments: Any, find_shape: Any = cluster_shape, want: Outputs = LAST) -> Encoded:
    return launch.encode(FAMILIES[form.family], find_shape, *arguments, want=want)


def calls_of(made: list[FakeKernel]) -> list[dict[str, int]]:
    """Return the members of the Call of each direction or product of all launches, with the blocks of a direction."""
    calls: list[dict[str, int]] = []
    for launched in launches_of(made):
        *sides, blocks = launched.members
        begins = range(0, len(sides), len(CALL))
        calls += [dict(zip(CALL, sides[at : at + len(CALL)], strict=True)) | {"blocks": blocks} for at in begins]
    return calls


def assert_passed(call: dict[str, int], expected: dict[str, Any]) -> None:
    """Assert that members have these values, or the addresses of these arrays."""
    values = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in expected.items()}
    assert {name: call[name] for name in expected} == values


def test_members_of_call_are_passed_in_order(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(LSTM)
    x = Ragged(x.data, x.offsets.long())
    encoded = run(LSTM, x, weights, state, want=Outputs(steps=True, mean=True))
    [call] = calls_of(made)
    passed = {"packed": weights.packed[8, 2], "offsets": x.offsets, "hidden_before": state.hidden, "cell_before": state.cell}
    passed |= {"hidden_after": encoded.state.hidden, "cell_after": encoded.state.cell}
    passed |= {"steps": encoded.steps, "mean": encoded.mean}
    numbers = {"wide": 1, "first": 0, "until": 3, "hidden": 40, "octets": 1, "width": 1, "forward": 1}
    assert_passed(call, {**passed, **numbers, "gates_apart": 160, "outputs_apart": 40})
    absent = ["scale", "own", "slots_before", "slots_after", "last", "max", "exchange"]
    assert [name for name in CALL[:16] if call[name] == 0] == absent


def test_own_has_the_bias_of_a_gru_or_peepholes(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(GRU)
    encoded = run(GRU, x, weights, state)
    passed = {"packed": weights.packed[8, 2], "own": weights.packed["own"], "hidden_before": state.hidden}
    assert_passed(calls_of(made)[-1], {**passed, "hidden_after": encoded.state.hidden, "cell_before": 0, "cell_after": 0})
    assert weights.packed["own"].dtype == torch.float32 and encoded.last is encoded.state.hidden
    form = Form("lstm", peepholes=True)
    x, weights, state = arguments_of(form)
    run(form, x, weights, state)
    assert_passed(calls_of(made)[-1], {"own": weights.packed["own"]})
    torch.testing.assert_close(weights.packed["own"], weights.peephole.float())


def test_tf32_runs_float32_layers_with_float16_weights(made: list[FakeKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "allows_tf32", lambda *_: True)
    x, weights, state = LSTM.arguments(LENGTHS, 40, 8)
    weights = replace(weights, recurrent=weights.recurrent.float() * 1e6)
    encoded = run(LSTM, x, weights, state)
    held = weights.packed[(8, 2), HALF]
    assert_passed(calls_of(made)[0], {"packed": held, "scale": 0})
    assert torch.equal(held, pack(weights.recurrent.clamp(-65504, 65504).half(), 8, 2)) and held.isfinite().all()
    assert encoded.last is not None and encoded.last.dtype == torch.float32


def test_gate_inputs_end_with_a_whole_word(made: list[FakeKernel]) -> None:
    """The grid kernel reads words, and three gate inputs of 16 bits may end within one."""
    x, weights, state = GRU.gated(GRU.arguments(LENGTHS, 5, 8))
    half, halves = Ragged(x.data.half(), x.offsets), GRUWeights(None, weights.recurrent.half(), None, weights.recurrent_bias)
    run(GRU, half, halves, state)
    [call] = calls_of(made)
    assert half.data.numel() % 2 and call["gates"] % 4 == 0 and call["gates"] != half.data.data_ptr()


def test_both_directions_share_a_launch_if_there_is_room(made: list[FakeKernel]) -> None:
    (x, forward, before), (_, backward, also_before) = (arguments_of(LSTM, seed=seed) for seed in (0, 1))
    pair, states = (forward, backward), (before, also_before)
    encoded = launch.encode_both(lstm.FUSED, cluster_shape, x, pair, states, want=Outputs(steps=True, last=True))
    first, second = calls_of(made)
    assert launches_of(made)[0].blocks == (2 * first["blocks"], 1, 1)
    assert (first["forward"], second["forward"]) == (1, 0)
    assert first["gates_apart"] == second["gates_apart"] == 320 and second["gates"] == first["gates"] + 160 * 2
    for name, output in (("steps", encoded.steps), ("last", encoded.last)):
        assert output is not None and output.shape[1] == first["outputs_apart"] == 80
        assert (first[name], second[name]) == (output.data_ptr(), output.data_ptr() + 40 * 4)
    for call, layer, state, after in zip((first, second), pair, states, encoded.state, strict=True):
        passed = {"packed": layer.packed[8, 2], "hidden_before": state.hidden, "cell_after": after.cell}
        assert_passed(call, passed)
    made.clear()
    large = [arguments_of(GRU, 1500, [2], seed=seed)[1] for seed in (0, 1)]
    x = Ragged(torch.zeros(2, 8).half(), torch.tensor([0, 2], dtype=torch.int32))
    launch.encode_both(gru.FUSED, launch.grid_shape, x, large, None, want=LAST)
    assert [
        (call["forward"], launched.blocks[0]) for call, launched in zip(calls_of(made), launches_of(made), strict=True)
    ] == [(direction, call["blocks"]) for direction, call in zip((1, 0), calls_of(made), strict=True)]


def test_products_of_both_directions_are_joined_once() -> None:
    x, first, _ = arguments_of(LSTM)
    second, third = (arguments_of(LSTM, seed=seed)[1] for seed in (1, 2))
    for other in (second, second, third):
        launch.encode_both(lstm.FUSED, cluster_shape, x, (first, other), None, want=Outputs())
        kept = first.packed["both", "input"]
        [joined] = kept.arrays
        assert kept.second is other and torch.equal(joined, torch.cat((first.input, other.input), dim=1))
        assert any(tensor is joined for tensor in weight_tensors(first)), "its bytes are counted"


def levels_of(form: Form, hidden: int, levels: int) -> tuple[Ragged, list[Any], list[Any]]:
    """Return the data, and the weights and states of each level."""
    made = [arguments_of(form, hidden, inputs=hidden if level else 8, seed=level) for level in range(levels)]
    return made[0][0], [weights for _, weights, _ in made], [state for *_, state in made]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as many levels at once as there is room for."""
    monkeypatch.setattr(launch, "_tuned", lambda _: {**load_tuned(HERE / "tuned", "NVIDIA H200"), "levels": [{"tile": 32}]})


@pytest.mark.parametrize("form", [LSTM, GRU], ids=str)
def test_levels_share_a_launch(form: Form, made: list[FakeKernel], together: None) -> None:
    x, weights, states = levels_of(form, 64, 3)
    encoded = launch.encode_levels(FAMILIES[form.family], x, weights, states, want=Outputs(steps=True, last=True))
    calls = calls_of(made)
    assert len(calls) == 3 and [one.blocks for one in launches_of(made)] == [(3 * calls[0]["blocks"], 1, 1)]
    # Every token of a level above has the bias as its gate inputs.
    assert [call["gates_apart"] for call in calls] == [weights[0].bias.numel(), 0, 0]
    assert [call["gates"] for call in calls[1:]] == [layer.packed["bias", HALF].data_ptr() for layer in weights[1:]]
    assert [bool(call["steps"]) for call in calls] == [False, False, True], "the outputs of the last level leave the kernel"
    assert len({call["exchange"] for call in calls}) == 3 and all(call["forward"] == 1 for call in calls)
    for call, before, after in zip(calls, states, encoded.state, strict=True):
        assert_passed(call, {"hidden_before": before.hidden, "hidden_after": after.hidden})
    assert encoded.last is encoded.state[-1].hidden


def test_levels_beyond_the_room_of_the_device_run_in_another_launch(made: list[FakeKernel], together: None) -> None:
    launch.encode_levels(lstm.FUSED, *levels_of(LSTM, 512, 7), want=LAST)
    calls = calls_of(made)
    assert [one.blocks for one in launches_of(made)] == [(128, 1, 1), (96, 1, 1)]
    assert [call["gates_apart"] > 0 for call in calls] == [True, False, False, False, True, False, False]
    assert calls[3]["steps"], "the next launch reads the steps of this one"


@pytest.mark.parametrize("with_sources", [False, True])
def test_state_is_read_from_sources_and_written_to_slots(with_sources: bool, made: list[FakeKernel]) -> None:
    x, weights, _ = arguments_of(LSTM)
    slots = torch.tensor([8, 1, 2], dtype=torch.int32)
    sources = torch.zeros(3, dtype=torch.int32) if with_sources else None
    caches = LSTMState(torch.zeros(9, 40), torch.zeros(9, 40), slots, sources)
    encoded = run(LSTM, x, weights, caches)
    begun = {"slots_before": slots if sources is None else sources, "hidden_before": caches.hidden}
    assert_passed(calls_of(made)[0], {**begun, "slots_after": slots, "hidden_after": caches.hidden, "last": encoded.last})
    after = encoded.state
    assert after.hidden is caches.hidden and after.slots is slots and after.sources is None
    assert (after is caches) != with_sources
    with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
        run(LSTM, x, weights, replace(caches, cell=caches.cell.half()))


def test_weights_are_packed_once(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(LSTM)
    for _ in range(2):
        run(LSTM, x, weights, state)
    first, second = calls_of(made)
    assert first["packed"] == second["packed"] and len(weights.packed) == 1


def test_batch_without_rows_launches_nothing(made: list[FakeKernel]) -> None:
    encoded = run(LSTM, *arguments_of(LSTM, lengths=[]), want=EVERYTHING)
    assert not launches_of(made) and encoded.steps is not None and encoded.steps.shape == (0, 40)


def test_both_products_of_a_step_are_passed(made: list[FakeKernel]) -> None:
    x, weights, state = arguments_of(PROJECTED, 41)
    encoded = run(PROJECTED, x, weights, state)
    shape = cluster_shape(two_products(PROJECTED, 41, 21)._replace(peepholes=True), 3, 1)
    assert isinstance(shape, TwoProductsCluster)
    for number, (call, hidden) in enumerate(zip(calls_of(made), (41, 21), strict=True)):
        passed = {"hidden_before": state.hidden, "cell_before": state.cell, "packed": weights.packed[shape.packing, number]}
        passed |= {"hidden_after": encoded.state.hidden, "cell_after": encoded.state.cell, "own": weights.packed["own"]}
        sizes = {"exchange": 0, "scale": 0, "hidden": hidden, "gates_apart": 164, "outputs_apart": 21, "forward": 1}
        assert_passed(call, {**passed, **sizes})
    assert encoded.state.hidden.shape == (3, 21) and encoded.state.cell.shape == (3, 41)
    assert encoded.last is encoded.state.hidden
    made.clear()
    run(RESET, *arguments_of(RESET, 41), find_shape=launch.grid_shape)
    first, second = calls_of(made)
    assert first["exchange"] == second["exchange"] != 0
    assert first["own"] == 0 and first["hidden"] == second["hidden"] == 41
