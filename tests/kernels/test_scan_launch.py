"""The launchers of the SRU and the QRNN on an emulated H200: packed weights, launch shapes, grids and arguments."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.qrnn import fused as fused_qrnn
from kernels.ragged import ContractError, Outputs, Ragged
from kernels.scan import launch
from kernels.scan import product as product_launcher
from kernels.scan.layer import GateSource, ScanForm, ScanVariant, product_gates
from kernels.scan.product import DEPTH, PATCHING_WARPS, pack
from kernels.scan.shape import FEW_ROWS, HERE, LONG_ROW, PART, TILE, TILED_TOKENS, ScanShape, TileShape, shape_for
from kernels.sru import fused as fused_sru
from kernels.sru.types import SRUState
from kernels.tensormap import MAP_BYTES
from tests.kernels.devices import H200, FakeKernel, FakeLaunch, emulated, launches_of
from tests.kernels.families import VOCABULARY, Form
from tests.kernels.inputs import EVERYTHING, Arguments, arrays, map_arrays
from tests.kernels.sources import members, text, undefined_names

SHARED_BYTES, PROCESSORS = H200.shared_memory_per_block_optin, H200.multi_processor_count
SRU_1, SRU_2, QRNN = ScanForm(4, sru=True, skip=1), ScanForm(4, sru=True, own_cell=True, skip=1), ScanForm(3)
FORMS = [SRU_1, SRU_2, QRNN, ScanForm(3, sru=True, skip=2), ScanForm(2), ScanForm(4)]
PRODUCT, GATE_INPUTS = GateSource(product=True, window=1), GateSource(product=False, window=1)
LENGTHS, HALF = [3, 0, 4], torch.float16
LAST, STEPS = Outputs(last=True), Outputs(steps=True)
SKIPLESS = Form("sru", version=1, skip="none")
CALL = [
    member.name + way
    for member in members(HERE / "gate_inputs.cu", "Call")
    for way in ((" forward", " backward") if member.sizes == ("2",) else ("",))
]
"""The names of the members of Call in order, with two names for each pair."""


@pytest.fixture(autouse=True)
def made() -> Iterator[list[FakeKernel]]:
    with emulated(H200) as kernels:
        yield kernels


def specialised(variant: ScanVariant, shape: ScanShape | TileShape) -> tuple[FakeKernel, int]:
    """Return the kernel of a variant in this shape, and its bytes of shared memory."""
    result: Any = launch._kernel(variant, shape)  # a fake kernel
    return result[0], result[1]


def layer(form: ScanForm, gates: GateSource, hidden: int = 256, **changes: Any) -> ScanVariant:
    variant = ScanVariant(0, HALF, form, gates, 1, hidden, 300 if gates.product else 0, False, True)
    return variant._replace(**changes)


def shapes(form: ScanForm, gates: GateSource) -> list[ScanShape]:
    """Return all shapes with streams in which a layer may be launched."""
    shapes = [ScanShape(units) for units in (32, 64) if units * form.blocks <= 192]
    if form.own_cell:
        return shapes
    return shapes + ([replace(shape, split=True) for shape in shapes] if gates.product else [ScanShape(32, busy=True)])


def tile_shapes(gates: GateSource) -> list[TileShape]:
    """Return all shapes in tiles in which a layer with linear cells may be launched."""
    if not gates.product:
        return [TileShape(32, 2, split=True)] if gates.window == 1 and gates.piece_bytes == 16 and not gates.float32 else []
    short = [TileShape(units, tiles) for units in (8, 16, 32) for tiles in (1, 2)]
    return [*short, *(TileShape(units, 2, split=True) for units in (16, 32))]


def unpacked(packed: Tensor) -> Tensor:
    """Return packed weights without the swizzle: (slices, steps of the window by 64 inputs, columns, 64 inputs)."""
    slices, deep, columns = packed.shape[:3]
    values = torch.zeros_like(packed)
    for column, place in product(range(columns), range(8)):
        values[:, :, column, place ^ column % 8] = packed[:, :, column, place]
    return values.reshape(slices, deep, columns, DEPTH)


@pytest.mark.parametrize("window, inputs, blocks, hidden, units", [(1, 5, 4, 40, 32), (2, 130, 3, 100, 32), (3, 64, 2, 64, 64)])
def test_packed_weights_are_tensor_core_operands(window: int, inputs: int, blocks: int, hidden: int, units: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(window, inputs, blocks * hidden, generator=generator)
    steps = torch.randn(7, window, inputs, generator=generator)
    values = unpacked(pack(weights, blocks, units))
    deep = -(-inputs // DEPTH)
    assert values.shape[:3] == (-(-hidden // units), window * deep, blocks * units)
    padded = torch.nn.functional.pad(steps, (0, deep * DEPTH - inputs)).reshape(7, window * deep, DEPTH)
    by_unit = torch.einsum("tkd,skcd->tcs", padded, values).reshape(7, blocks, units, -1).transpose(2, 3).reshape(7, blocks, -1)
    expected = torch.einsum("twi,wig->tg", steps, weights)
    torch.testing.assert_close(by_unit[:, :, :hidden].reshape(7, -1), expected, rtol=1e-4, atol=1e-4)
    assert not by_unit[:, :, hidden:].any(), "padding units have no weights"


# Launch shapes.


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_shape_fits_a_multiprocessor(form: ScanForm) -> None:
    """Two blocks of tiles share a multiprocessor."""
    windows = (1,) if form.sru else (1, 4)
    sources = [GateSource(False, window, window > 1, False, piece) for window, piece in product(windows, (2, 16))]
    sources += [GateSource(False, windows[-1], True, True, 16), *map(product_gates, windows)]
    for gates, inputs, all_steps in product(sources, (1, 300, 5000), (False, True)):
        variant = layer(form, gates, inputs=inputs if gates.product else 0, all_steps=all_steps)
        for shape in shapes(form, gates):
            kernel, shared = specialised(variant, shape)
            assert shared == kernel.constants["SHARED"] <= SHARED_BYTES
            assert kernel.constants["STAGES"] >= (PATCHING_WARPS if gates.product else 1)
            assert kernel.threads <= 1024 and kernel.threads % 32 == 0
            assert not gates.product or f"MULTIPLY({form.blocks * shape.units}," in text(HERE / "product.cu")
        for tiles in tile_shapes(gates) if not (form.own_cell or all_steps) else []:
            kernel, shared = specialised(variant, tiles)
            assert shared == kernel.constants["SHARED"] <= (SHARED_BYTES + 1024) // 2 - 1024
            assert kernel.threads == 128 * tiles.tiles + (32 if gates.product else 0)
            cell_blocks = 4 if form.blocks == 4 and not form.sru else 2
            for blocks in (form.blocks, cell_blocks) if gates.product else ():
                assert f"MULTIPLY({blocks * tiles.units}," in text(HERE / "tile_product.cu")


def test_weights_stay_in_shared_memory_if_they_fit() -> None:
    for inputs, resident in ((300, 1), (5000, 0)):
        kernel, _ = specialised(layer(QRNN, PRODUCT, inputs=inputs), ScanShape(32))
        assert (kernel.constants["RESIDENT"], kernel.constants["PIECES"]) == (resident, -(-inputs // 64))
    with pytest.raises(ContractError, match="this device has no room for a window of 999 steps"):
        launch._kernel(layer(QRNN, GateSource(False, 999, gather=True)), ScanShape(32))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("hidden", [1, 33, 300, 5000])
def test_rows_and_tiles_are_spread_over_the_multiprocessors(hidden: int, directions: int) -> None:
    """A single row that is divided is spread by its parts."""
    for rows, gates in product((1, 3, 64, 700, 4096), (PRODUCT, GATE_INPUTS)):
        for shape in shapes(QRNN, gates):
            variant = layer(QRNN, gates, hidden, directions=directions)
            plan = launch._launch(variant, shape, rows, PART * rows if shape.split else 0)
            along, slices, ways = plan.blocks
            assert (slices, ways) == (plan.slices, directions)
            assert (slices - 1) * shape.units < hidden <= slices * shape.units
            assert 1 <= plan.streams <= rows and 2 * (along - 1) < plan.streams <= 2 * along
            assert along * slices * ways <= PROCESSORS or along == 1, "all blocks are resident"
            assert plan.streams == rows or PROCESSORS // (slices * ways) <= along, "no multiprocessor is idle"
    for tokens, tiles in product((0, 1, 64, 65, 4096), tile_shapes(PRODUCT)):
        along, slices, _ = launch._launch(layer(QRNN, PRODUCT, hidden, all_steps=False), tiles, 1, tokens).blocks
        assert max(tokens, 1) <= along * tiles.tiles * TILE < tokens + tiles.tiles * TILE + 1
        assert (slices - 1) * tiles.units < hidden <= slices * tiles.units


@pytest.mark.parametrize(
    "form, gates, hidden, changes, rows, tokens, expected",
    [
        # A short row has few units in a block.
        (QRNN, PRODUCT, 256, {}, 1, 32, TileShape(8, 1)),
        (QRNN, PRODUCT, 512, {}, 1, 65, TileShape(8, 2)),
        (QRNN, PRODUCT, 1024, {}, 1, 32, TileShape(16, 1)),
        (QRNN, PRODUCT, 1024, {"directions": 2}, 1, 32, TileShape(32, 1)),
        # A long row is divided between blocks or streams, if only its last step leaves the kernel and its cell is linear.
        (QRNN, PRODUCT, 512, {}, 1, 1024, TileShape(16, 2, split=True)),
        (QRNN, PRODUCT, 1024, {}, 1, 1024, ScanShape(32, split=True)),
        (QRNN, PRODUCT, 256, {}, 1, 4096, ScanShape(32, split=True)),
        (QRNN, PRODUCT, 512, {}, 1, 4096, ScanShape(64, split=True)),
        (SRU_1, GATE_INPUTS, 72, {}, 1, LONG_ROW - 1, ScanShape(32)),
        (SRU_1, GATE_INPUTS, 72, {}, 1, LONG_ROW, TileShape(32, 2, split=True)),
        (SRU_1, GATE_INPUTS, 72, {}, FEW_ROWS, FEW_ROWS * LONG_ROW, TileShape(32, 2, split=True)),
        (SRU_1, GATE_INPUTS, 72, {"all_steps": True}, 1, 4096, ScanShape(32)),
        (SRU_2, GATE_INPUTS, 72, {}, 1, 4096, ScanShape(32)),
        (QRNN, GATE_INPUTS._replace(window=2), 72, {}, 1, 4096, ScanShape(32)),
        (QRNN, GATE_INPUTS._replace(float32=True), 72, {}, 1, 4096, ScanShape(32)),
        (QRNN, GATE_INPUTS._replace(piece_bytes=8), 72, {}, 1, 4096, ScanShape(32)),
        # Gate inputs of many rows get more threads.
        (SRU_1, GATE_INPUTS, 256, {"all_steps": True}, 9, 900, ScanShape(32, busy=True)),
        (SRU_1, GATE_INPUTS, 256, {"all_steps": True}, 8, 800, ScanShape(32)),
        (SRU_2, GATE_INPUTS, 256, {"all_steps": True}, 9, 900, ScanShape(32)),
        (SRU_1, PRODUCT, 256, {"all_steps": True}, 9, 900, ScanShape(32)),
        # Outputs of every step use small blocks.
        (QRNN, PRODUCT, 512, {}, 256, 10_000, ScanShape(64)),
        (QRNN, PRODUCT, 512, {"all_steps": True}, 256, 10_000, ScanShape(32)),
    ],
)
def test_shape_follows_the_layer_and_its_rows(
    form: ScanForm, gates: GateSource, hidden: int, changes: dict[str, Any], rows: int, tokens: int, expected: Any
) -> None:
    assert shape_for(layer(form, gates, hidden, **{"all_steps": False, **changes}), rows, tokens) == expected


# Constants and arguments of the kernels.


@pytest.mark.parametrize(
    "gates, shape, source",
    [
        (PRODUCT, ScanShape(32), "product.cu"),
        (GATE_INPUTS, ScanShape(32), "gate_inputs.cu"),
        (PRODUCT, TileShape(8, 1), "tile_product.cu"),
        (GATE_INPUTS, TileShape(32, 2, split=True), "tile_gates.cu"),
        (PRODUCT, None, "fold.cu"),
    ],
)
def test_kernel_defines_all_constants_of_its_source(gates: GateSource, shape: Any, source: str) -> None:
    variant = layer(SRU_1, gates)
    kernel: Any = specialised(variant, shape)[0] if shape else launch._fold_kernel(variant)
    assert kernel.source == HERE / source
    assert kernel.constants.keys() | {"THREADS"} == undefined_names(HERE / source)
    assert {type(value) for value in kernel.constants.values()} == {int}


def half_arguments(form: Form, lengths: list[int] = LENGTHS, inputs: int = 8, **options: Any) -> Arguments:
    """Return arguments for 40 units with float16 weights and data, unless the data are ids."""
    x, weights, state = form.arguments(lengths, options.pop("hidden", 40), inputs, storage=HALF, **options)
    return Arguments(Ragged(x.data.half() if x.data.is_floating_point() else x.data, x.offsets), weights, state)


def run(form: Form, *arguments: Any, want: Outputs = LAST) -> Any:
    return (fused_sru.sru if form.family == "sru" else fused_qrnn.qrnn)(*arguments, want=want)


def only(made: list[FakeKernel]) -> tuple[FakeLaunch, dict[str, int]]:
    """Return the only launch, and the members of its Call by name."""
    [launched] = launches_of(made)
    return launched, call_of(launched)


def call_of(launched: FakeLaunch) -> dict[str, int]:
    return dict(zip(CALL, launched.members, strict=True))


def assert_passed(call: dict[str, int], expected: dict[str, Any]) -> None:
    """Assert that members have these values, or the addresses of these arrays."""
    values = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in expected.items()}
    assert {name: call[name] for name in expected} == values


def test_members_of_call_are_passed_in_order(made: list[FakeKernel]) -> None:
    x, weights, state = half_arguments(Form("sru", version=2, skip="columns"))
    x = Ragged(x.data, x.offsets.long())
    encoded = fused_sru.sru(x, weights, state, want=Outputs(steps=True, mean=True))
    launched, call = only(made)
    passed = {"data forward": x.data, "source forward": weights.packed["input", 32], "before forward": state.cell}
    passed |= {"after forward": encoded.state.cell, "offsets": x.offsets, "skip": x.data}
    passed |= {"steps": encoded.steps, "mean": encoded.mean}
    sizes = {"skip_from forward": 4, "wide": 1, "wide_ids": 0, "rows": 3, "hidden": 40, "width": 40, "inputs": 48, "height": 0}
    sizes |= {"skip_stride": 48, "streams": 3, "slices": 2}
    sizes["scale forward"] = int(torch.tensor([weights.scale], dtype=torch.float64).view(torch.int64))
    assert_passed(call, {**passed, **sizes})
    absent = ["left", "left_after", "slots_before", "slots_after", "maps", "rests"]
    assert {name for name in CALL if call[name] == 0} == {
        *(f"{name} {way}" for name in absent for way in ("forward", "backward")),
        *("ids", "last", "max", "wide_ids", "height", "parts"),
    }
    assert all(call[name.replace("forward", "backward")] == call[name] for name in CALL), "one direction fills both"
    assert launched.blocks == (2, 2, 1) and launched.shared <= SHARED_BYTES


def test_both_directions_are_one_launch_with_a_tensor_map_each(made: list[FakeKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor_map(address: int, *sizes: int) -> bytes:
        return struct.pack("5q", address, *sizes).ljust(MAP_BYTES)

    monkeypatch.setattr(product_launcher, "tensor_map", tensor_map)
    form = Form("qrnn", pooling="fo", window=2)
    pair = [half_arguments(form, inputs=24, seed=seed) for seed in (0, 1)]
    x, weights, states = pair[0].x, [one.weights for one in pair], [one.state for one in pair]
    encoded = fused_qrnn.bidirectional(x, (weights[0], weights[1]), (states[0], states[1]), want=LAST)
    launched, call = only(made)
    assert encoded.last is not None and encoded.last.shape == (3, 80) and call["width"] == 80 and launched.blocks[2] == 2
    for way, layer, before, after in zip(("forward", "backward"), weights, states, encoded.state, strict=True):
        passed = {"data": x.data, "source": layer.packed["input", 32], "before": before.cell, "after": after.cell}
        assert_passed(call, {f"{name} {way}": array for name, array in (passed | {"left_after": after.left}).items()})
    maps = [struct.unpack_from("5q", launched.arguments[0], way * MAP_BYTES) for way in (0, 1)]
    assert maps == [(x.data.data_ptr(), 7, 24, TILE, DEPTH)] * 2
    fused_sru.sru(*half_arguments(SKIPLESS, [0, 0]), want=EVERYTHING)
    assert launches_of(made)[-1].arguments == (bytes(2 * MAP_BYTES),), "a batch without tokens needs no map"


def test_weights_are_packed_once_and_later_launches_are_early(made: list[FakeKernel]) -> None:
    form = Form("sru", version=2, skip="block")
    arguments = half_arguments(form)
    for _ in range(2):
        fused_sru.sru(*arguments, want=EVERYTHING)
    first, second = launches_of(made)
    assert [first.early, second.early] == [False, True] and len(arguments.weights.packed) == 3
    assert all(
        call_of(first)[f"{name} forward"] == call_of(second)[f"{name} forward"] for name in ("source", "bias", "own_cell")
    )


def test_ids_and_tables_are_not_copied(made: list[FakeKernel]) -> None:
    x, weights, state = half_arguments(Form("qrnn", pooling="ifo", window=2, ids=True))
    x = Ragged(x.data.long(), x.offsets)
    encoded = fused_qrnn.qrnn(x, weights, state, want=LAST)
    launched, call = only(made)
    passed = {"source forward": weights.tables, "ids": x.data, "left forward": state.left}
    passed |= {"left_after forward": encoded.state.left}
    assert_passed(call, {**passed, "wide_ids": 1, "height": 1 + VOCABULARY, "data forward": 0})
    expected = {"TAPS": 2, "GATHER": 1, "FIRST_LINE": 1, "PIECE_BYTES": 16}
    assert expected.items() <= launched.kernel.constants.items()


def test_piece_bytes_follow_the_alignment_of_gate_inputs(made: list[FakeKernel]) -> None:
    form = Form("sru", version=1, skip="block")
    x, weights, state = form.gated(form.arguments(LENGTHS, 40, 8))
    weights, memory = map_arrays(weights, Tensor.half), torch.zeros(16 + x.data.numel(), dtype=HALF)
    for places, piece_bytes in ((0, 16), (1, 2), (2, 4), (4, 8), (8, 16)):
        begun = memory[places : places + x.data.numel()].view_as(x.data)
        fused_sru.sru(Ragged(begun, x.offsets), weights, state, want=EVERYTHING)
        launched = next(one for one in launches_of(made) if call_of(one)["source forward"] == begun.data_ptr())
        assert launched.kernel.constants["PIECE_BYTES"] == piece_bytes


@pytest.mark.parametrize(
    "form, want, lengths, source",
    [
        (Form("sru", version=2), LAST, [LONG_ROW], "gate_inputs.cu"),
        (Form("sru", version=2), LAST, [LONG_ROW - 1], "product.cu"),
        (Form("sru", version=1), STEPS, [LONG_ROW], "gate_inputs.cu"),
        (Form("sru", version=1), LAST, [LONG_ROW] * (FEW_ROWS + 1), "product.cu"),
        (Form("sru", version=1), LAST, [LONG_ROW] * 2, "tile_product.cu"),
        (Form("qrnn", pooling="fo", window=1), LAST, [TILED_TOKENS, 1], "tile_gates.cu"),
    ],
    ids=str,
)
def test_few_long_rows_may_use_a_library_product(
    form: Form, want: Outputs, lengths: list[int], source: str, made: list[FakeKernel]
) -> None:
    x, weights, _ = half_arguments(form, lengths, hidden=264)
    run(form, x, weights, None, want=want)
    launched = launches_of(made)[0]
    assert launched.kernel.source.name == source
    assert bool(call_of(launched)["data forward"]) == source.endswith("product.cu")


def test_divided_rows_are_folded(made: list[FakeKernel]) -> None:
    """A second launch reads what the first has written, and writes the outputs."""
    lengths = [600, 0, 700]
    x, weights, state = half_arguments(Form("sru", version=1, skip="block"), lengths, hidden=1000)
    fused_sru.bidirectional(x, (weights, weights), (state, state), want=LAST)
    first, fold = launches_of(made)
    assert fold.kernel.source.name == "fold.cu" and fold.early and fold.members == first.members
    assert fold.blocks == (32, len(lengths), 2)
    call = call_of(fold)
    assert call["parts"] == sum(lengths) // PART + len(lengths)
    memory = {call[f"{name} {way}"] for name in ("maps", "rests") for way in ("forward", "backward")}
    assert len(memory) == 4 and 0 not in memory
    assert call["maps backward"] - call["maps forward"] == 8 * 1000 * call["parts"]


def test_too_many_tokens_are_refused() -> None:
    weights = half_arguments(Form("sru", version=1, skip="none", ids=True), [1]).weights
    x = Ragged(torch.zeros(1, dtype=torch.int32).expand(2**31), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has 2147483648 tokens, but one call takes at most {launch.MAX_TOKENS}"):
        fused_sru.sru(x, weights, None, want=LAST)


def test_state_is_read_from_sources_and_written_to_slots(made: list[FakeKernel]) -> None:
    x, weights, _ = half_arguments(SKIPLESS)
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for begun in (None, sources):
        caches = SRUState(torch.zeros(9, 40), slots, begun)
        after = fused_sru.sru(x, weights, caches, want=LAST).state
        passed = {"after forward": caches.cell, "before forward": caches.cell}
        passed |= {"slots_after forward": slots, "slots_before forward": slots if begun is None else sources}
        assert_passed(call_of(launches_of(made)[-1]), passed)
        assert after.cell is caches.cell and after.slots is slots and after.sources is None
        assert (after is caches) == (begun is None)
    for cell in (caches.cell.half(), torch.zeros(40, 9).T):
        with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
            fused_sru.sru(x, weights, replace(caches, cell=cell), want=Outputs())


@pytest.mark.parametrize("storage, lengths", [(torch.float32, LENGTHS), (HALF, [LONG_ROW])], ids=str)
def test_library_product_over_a_window_yields_whole_gates(
    storage: torch.dtype, lengths: list[int], made: list[FakeKernel]
) -> None:
    x, weights, state = Form("qrnn", pooling="fo", window=2).arguments(lengths, 264, 8, storage=storage)
    data = x.data.to(storage)
    encoded = fused_qrnn.qrnn(Ragged(data, x.offsets), weights, state, want=EVERYTHING)
    launched, call = only(made)
    constants, exact = launched.kernel.constants, storage == torch.float32
    assert call["source forward"] and not call["data forward"] and (constants["TAPS"], constants["GATHER"]) == (1, 0)
    assert constants["EXACT"] == constants["GATES_FLOAT32"] == exact
    ends = zip(x.offsets.tolist()[1:], lengths, state.left[:, 0].to(storage), strict=True)
    assert torch.equal(encoded.state.left[:, 0], torch.stack([data[end - 1] if length else left for end, length, left in ends]))


@pytest.mark.parametrize("form", [Form("sru"), Form("qrnn", ids=True), Form("qrnn", window=3)], ids=str)
def test_batch_without_rows_launches_nothing(form: Form, made: list[FakeKernel]) -> None:
    encoded = run(form, *half_arguments(form, []), want=EVERYTHING)
    assert not launches_of(made) and encoded.steps.shape == (0, 40)
    assert {len(array) for array in arrays(encoded.state).values()} == {0}


def test_odd_inputs_are_padded_to_whole_pieces(made: list[FakeKernel]) -> None:
    encoded = fused_qrnn.qrnn(*half_arguments(Form("qrnn", pooling="fo", window=3), inputs=5), want=EVERYTHING)
    assert only(made)[1]["inputs"] == 8 and encoded.state.left.shape == (3, 2, 5)
