"""Tests of the SRU's and the QRNN's launchers without a GPU: packed weights, launch shapes, grids and arguments."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launching
from kernels.backend import explain
from kernels.qrnn import fused as fused_qrnn
from kernels.qrnn.types import QRNNState
from kernels.ragged import ContractError, Outputs, Ragged
from kernels.scan import gate_inputs, launch, tile_product
from kernels.scan import product as product_launcher
from kernels.scan.layer import GateSource, ScanForm, ScanVariant, product_gates
from kernels.scan.product import DEPTH, PATCHING_WARPS, pack
from kernels.scan.shape import (
    FEW_ROWS,
    HERE,
    LONG_ROW,
    PART,
    TILE,
    TILED_TOKENS,
    ScanShape,
    TileShape,
    multiplies_inputs,
    shape_for,
)
from kernels.sru import fused as fused_sru
from kernels.sru.types import SRUState
from kernels.tensormap import MAP_BYTES
from kernels.tuning import load_tuned, matching_shapes
from tests.kernels import families
from tests.kernels.inputs import EVERYTHING, Arguments, arrays, map_arrays
from tests.kernels.sources import members, text, undefined_names

H200_SHARED_BYTES = 232_448
PROCESSORS = 132
WITHOUT_POOLS = Outputs(steps=True, last=True)

FORMS = [
    *(
        ScanForm(blocks, sru=True, own_cell=own, skip=skip)
        for blocks, skip in ((3, 0), (4, 1), (3, 2))
        for own in (False, True)
    ),
    *(ScanForm(blocks) for blocks in (2, 3, 4)),
]
SRU_1, SRU_2, QRNN = ScanForm(4, sru=True, skip=1), ScanForm(4, sru=True, own_cell=True, skip=1), ScanForm(3)
PRODUCT = GateSource(product=True, window=1)
GATE_INPUTS = GateSource(product=False, window=1)


@dataclass
class FakeKernel:
    """A fake kernel that records its constants and its launches."""

    source: Path
    threads: int
    constants: dict[str, int]
    calls: list[dict[str, int]] = field(default_factory=list)
    blocks: tuple[int, int, int] = (0, 0, 0)
    shared: int = 0
    early: list[bool] = field(default_factory=list)
    arguments: tuple[bytes, ...] = ()

    def launch(self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *arguments: bytes, early: bool) -> None:
        self.early.append(early)
        self.arguments = arguments
        self.calls.append(dict(zip(CALL, members, strict=True)))
        self.blocks, self.shared = blocks, shared


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeKernel]]:
    """Simulate an H200. The list receives every kernel that is compiled; the caches are cleared afterwards."""
    made: list[FakeKernel] = []

    def compiled(source: Path, device: int, *, threads: int, **constants: int) -> FakeKernel:
        made.append(FakeKernel(source, threads, constants))
        return made[-1]

    def map_arrays(address: int, *sizes: int) -> bytes:
        return struct.pack("5q", address, *sizes).ljust(MAP_BYTES)

    monkeypatch.setattr(launch, "load_kernel", compiled)
    monkeypatch.setattr(product_launcher, "tensor_map", map_arrays)
    for module in (product_launcher, gate_inputs, tile_product):
        monkeypatch.setattr(module, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS))
    caches = launch._launch, launch._kernel, launch._fold_kernel, multiplies_inputs, launching.multiprocessors
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def specialised(variant: ScanVariant, shape: ScanShape | TileShape) -> tuple[FakeKernel, int]:
    """Return the kernel of a variant in this shape, and its bytes of shared memory."""
    result: Any = launch._kernel(variant, shape)  # a fake kernel
    kernel, shared = result
    return kernel, shared


def layer(form: ScanForm, gates: GateSource, hidden: int = 256, **changes: Any) -> ScanVariant:
    variant = ScanVariant(0, torch.float16, form, gates, 1, hidden, 300 if gates.product else 0, False, True)
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


# Packed weights.


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
    gates = torch.einsum("tkd,skcd->tcs", padded, values).reshape(7, blocks, units, -1)
    by_unit = gates.transpose(2, 3).reshape(7, blocks, -1)
    expected = torch.einsum("twi,wig->tg", steps, weights)
    torch.testing.assert_close(by_unit[:, :, :hidden].reshape(7, -1), expected, rtol=1e-4, atol=1e-4)
    assert not by_unit[:, :, hidden:].any(), "padding units have no weights"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_weights_consist_of_whole_pieces(dtype: torch.dtype) -> None:
    packed = pack(torch.ones(1, 70, 3 * 33, dtype=dtype), 3, 32)
    assert packed.is_contiguous()
    assert packed.shape == (2, 2, 3 * 32, 8, 8)
    assert packed.dtype == dtype


# Launch shapes.


def all_gates(form: ScanForm) -> list[GateSource]:
    """Return all sources of gates that such a layer may have."""
    taken = product((1,) if form.sru else (1, 2, 4), (False, True), (2, 16))
    from_arrays = [GateSource(False, window, window > 1 or gather, False, piece) for window, gather, piece in taken]
    return [
        *from_arrays,
        GateSource(False, from_arrays[-1].window, True, True, 16),
        *(product_gates(window) for window in {gates.window for gates in from_arrays}),
    ]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("all_steps", [False, True])
def test_every_shape_fits_a_multiprocessor(form: ScanForm, all_steps: bool) -> None:
    taken = ((gates, shape) for gates in all_gates(form) for shape in shapes(form, gates))
    for (gates, shape), inputs in product(taken, (1, 300, 1024, 5000)):
        kernel, shared = specialised(layer(form, gates, inputs=inputs if gates.product else 0, all_steps=all_steps), shape)
        stages = kernel.constants["STAGES"]
        assert shared == kernel.constants["SHARED"] <= H200_SHARED_BYTES
        assert stages >= (PATCHING_WARPS if gates.product else 1)
        assert kernel.threads <= 1024
        assert kernel.threads % 32 == 0
        assert not gates.product or form.blocks * shape.units % 16 == 0, "the tensor cores multiply 16 columns at once"
        assert not gates.product or f"MULTIPLY({form.blocks * shape.units}," in text(HERE / "product.cu")


@pytest.mark.parametrize("form", [form for form in FORMS if not form.own_cell], ids=str)
def test_every_tile_shape_fits_a_multiprocessor(form: ScanForm) -> None:
    """Two blocks of tiles share a multiprocessor."""
    for gates in all_gates(form):
        for tiles, inputs in product(tile_shapes(gates), (1, 300, 1024, 5000)):
            kernel, shared = specialised(layer(form, gates, inputs=inputs if gates.product else 0, all_steps=False), tiles)
            assert shared == kernel.constants["SHARED"] <= (H200_SHARED_BYTES + 1024) // 2 - 1024
            assert kernel.threads == 128 * tiles.tiles + (32 if gates.product else 0)
            assert not gates.product or kernel.constants["STAGES"] >= 1
            cell_blocks = 4 if form.blocks == 4 and not form.sru else 2
            for blocks in (form.blocks, cell_blocks) if gates.product else ():
                assert f"MULTIPLY({blocks * tiles.units}," in text(HERE / "tile_product.cu")


def test_weights_stay_in_shared_memory_if_they_fit() -> None:
    for inputs, resident in ((300, 1), (5000, 0)):
        kernel, _ = specialised(layer(QRNN, PRODUCT, inputs=inputs), ScanShape(32))
        assert kernel.constants["RESIDENT"] == resident
        assert kernel.constants["PIECES"] == -(-inputs // 64)


def test_too_wide_window_is_refused() -> None:
    with pytest.raises(ContractError, match="this device has no room for a window of 999 steps"):
        launch._kernel(layer(QRNN, GateSource(False, 999, gather=True)), ScanShape(32))


@pytest.mark.parametrize("hidden", [1, 32, 33, 128, 300, 1024, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 700, 4096])
@pytest.mark.parametrize("directions", [1, 2])
def test_rows_are_spread_over_the_multiprocessors(hidden: int, rows: int, directions: int) -> None:
    """A single row that is divided is spread by its parts."""
    taken = ((gates, shape) for gates in (PRODUCT, GATE_INPUTS) for shape in shapes(QRNN, gates))
    for gates, shape in taken:
        plan = launch._launch(layer(QRNN, gates, hidden, directions=directions), shape, rows, PART * rows if shape.split else 0)
        along, slices, ways = plan.blocks
        assert (slices, ways) == (plan.slices, directions)
        assert (slices - 1) * shape.units < hidden <= slices * shape.units
        assert 1 <= plan.streams <= rows
        assert 2 * (along - 1) < plan.streams <= 2 * along
        assert along * slices * ways <= PROCESSORS or along == 1, "all blocks are resident"
        idle = PROCESSORS // (slices * ways) - along
        assert plan.streams == rows or idle <= 0, "no multiprocessor is idle while a stream has several rows"


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 128, 129, 4096])
def test_tiles_cover_all_tokens(tokens: int) -> None:
    for tiles in tile_shapes(PRODUCT):
        along, slices, ways = launch._launch(layer(QRNN, PRODUCT, 72, all_steps=False), tiles, 1, tokens).blocks
        assert max(tokens, 1) <= along * tiles.tiles * TILE < tokens + tiles.tiles * TILE + 1
        assert (slices - 1) * tiles.units < 72 <= slices * tiles.units
        assert ways == 1


LENGTHS = [
    (1, 1),
    (1, 384),
    (1, 4096),
    (2, 4096),
    (3, 900),
    (8, 100),
    (8, 60_000),
    (64, 4096),
    (64, 20_000),
    (256, 256),
    (4096, 9000),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("hidden", [1, 33, 128, 256, 512, 1024, 3000])
def test_chosen_shape_is_valid_for_its_layer(form: ScanForm, directions: int, hidden: int) -> None:
    for (rows, tokens), gates, all_steps in product(LENGTHS, (PRODUCT, GATE_INPUTS), (False, True)):
        chosen = shape_for(layer(form, gates, hidden, directions=directions, all_steps=all_steps), rows, tokens)
        if isinstance(chosen, TileShape):
            assert chosen in tile_shapes(gates) and not form.own_cell and not all_steps
            assert chosen.split or (rows == 1 and tokens <= PART), "whole rows are for a single short row"
        else:
            assert chosen in shapes(form, gates)
            assert not chosen.split or (rows == 1 and tokens >= LONG_ROW and not all_steps)


def test_only_last_outputs_of_few_long_rows_are_divided() -> None:
    long = layer(SRU_1, GATE_INPUTS, 72, all_steps=False)
    assert shape_for(long, 1, LONG_ROW).split
    assert shape_for(long, FEW_ROWS, FEW_ROWS * LONG_ROW).split
    assert not shape_for(long, 1, LONG_ROW - 1).split
    assert not shape_for(long, FEW_ROWS + 1, 4096 * FEW_ROWS).split
    assert not shape_for(long._replace(all_steps=True), 1, 4096).split, "a divided row has no outputs of every step"
    assert not shape_for(layer(SRU_2, GATE_INPUTS, 72, all_steps=False), 1, 4096).split, "a step of its cell is no map"


@pytest.mark.parametrize("changes", [{"window": 2}, {"float32": True}, {"piece_bytes": 8}], ids=str)
def test_other_gate_inputs_are_not_divided(changes: dict[str, Any]) -> None:
    gates = GATE_INPUTS._replace(**changes)
    assert shape_for(layer(QRNN, gates, 72, all_steps=False), 1, 4096) == ScanShape(32)


def test_short_row_has_few_units_in_a_block() -> None:
    for hidden, directions, units in ((256, 1, 8), (512, 1, 8), (1024, 1, 16), (1024, 2, 32), (3000, 1, 32)):
        variant = layer(QRNN, PRODUCT, hidden, directions=directions, all_steps=False)
        assert shape_for(variant, 1, 32) == TileShape(units, 1)
        assert shape_for(variant, 1, 65) == TileShape(units, 2)


def test_long_row_is_divided_between_blocks_or_streams() -> None:
    for hidden, tokens, expected in (
        (256, 1024, TileShape(16, 2, split=True)),
        (512, 1024, TileShape(16, 2, split=True)),
        (1024, 1024, ScanShape(32, split=True)),
        (256, 4096, ScanShape(32, split=True)),
        (512, 4096, ScanShape(64, split=True)),
        (1024, 4096, ScanShape(64, split=True)),
    ):
        assert shape_for(layer(QRNN, PRODUCT, hidden, all_steps=False), 1, tokens) == expected


def test_gate_inputs_of_many_rows_get_more_threads() -> None:
    linear, with_own_cell = layer(SRU_1, GATE_INPUTS), layer(SRU_2, GATE_INPUTS)
    assert shape_for(linear, 9, 900) == ScanShape(32, busy=True)
    assert shape_for(linear, 8, 800) == ScanShape(32)
    assert shape_for(with_own_cell, 9, 900) == ScanShape(32)
    assert shape_for(layer(SRU_1, PRODUCT), 9, 900) == ScanShape(32)


def test_per_step_outputs_use_small_blocks() -> None:
    for all_steps, units in ((False, 64), (True, 32)):
        assert shape_for(layer(QRNN, PRODUCT, 512, all_steps=all_steps), 256, 10_000) == ScanShape(units)


def test_tuned_shapes_cover_all_sizes() -> None:
    for file in (HERE / "tuned").glob("*.json"):
        tuned = json.loads(file.read_text())["shapes"]
        for width, rows, tokens in product((1, 256, 10_000), (1, 64, 100_000), (0, 1024, 10_000_000)):
            (_, units), *_ = matching_shapes(tuned, ("units",), width=width, depth=width, rows=rows, tokens=tokens)
            assert units in (32, 64)
    assert "H200" in load_tuned(HERE / "tuned", "NVIDIA H200")["device"]


# Constants and arguments of the kernels.


@pytest.mark.parametrize(
    "gates, shape, source",
    [
        (PRODUCT, ScanShape(32), "product.cu"),
        (GATE_INPUTS, ScanShape(32), "gate_inputs.cu"),
        (PRODUCT, TileShape(8, 1), "tile_product.cu"),
        (GATE_INPUTS, TileShape(32, 2, split=True), "tile_gates.cu"),
    ],
)
def test_kernel_defines_all_constants_of_its_source(gates: GateSource, shape: ScanShape | TileShape, source: str) -> None:
    kernel, _ = specialised(layer(SRU_1, gates), shape)
    assert kernel.source == HERE / source
    assert kernel.constants.keys() | {"THREADS"} == undefined_names(HERE / source)
    assert {type(value) for value in kernel.constants.values()} == {int}


def test_fold_defines_all_constants_of_its_source() -> None:
    fold: Any = launch._fold_kernel(layer(SRU_1, PRODUCT))  # a fake kernel
    assert fold.constants.keys() | {"THREADS"} == undefined_names(HERE / "fold.cu")


def call() -> list[str]:
    """Return the names of the members of Call in order, with two names for each pair."""
    ways = {(): ("",), ("2",): (" forward", " backward")}
    return [member.name + way for member in members(HERE / "gate_inputs.cu", "Call") for way in ways[member.sizes]]


CALL = call()


def call_of(kernels: list[FakeKernel]) -> dict[str, int]:
    (kernel,) = kernels
    (call,) = kernel.calls
    return call


def half(arguments: Arguments) -> Arguments:
    """Return the arguments with float16 data, unless the data are ids."""
    return arguments._replace(
        x=Ragged(arguments.x.data.half() if arguments.x.data.is_floating_point() else arguments.x.data, arguments.x.offsets)
    )


def addresses(call: dict[str, int], *names: str) -> list[int]:
    return [call[name] for name in names]


def test_launcher_passes_the_members_of_call_in_order(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=2, skip="columns")
    x, weights, state = half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16))
    x = Ragged(x.data, x.offsets.long())
    encoded = fused_sru.sru(x, weights, state, want=Outputs(steps=True, mean=True))
    call = call_of(kernels)
    assert encoded.steps is not None and encoded.mean is not None
    expected = {
        "data forward": x.data,
        "source forward": weights.packed["input", 32],
        "before forward": state.cell,
        "after forward": encoded.state.cell,
        "offsets": x.offsets,
        "skip": x.data,
        "steps": encoded.steps,
        "mean": encoded.mean,
    }
    assert {name: call[name] for name in expected} == {name: array.data_ptr() for name, array in expected.items()}
    sizes = {"skip_from forward": 4, "wide": 1, "wide_ids": 0, "rows": 3, "hidden": 40, "width": 40, "inputs": 48, "height": 0}
    sizes |= {"skip_stride": 48, "streams": 3, "slices": 2}
    assert {name: call[name] for name in sizes} == sizes
    assert call["scale forward"] == torch.tensor([weights.scale], dtype=torch.float64).view(torch.int64).item()
    absent = ["left", "left_after", "slots_before", "slots_after", "maps", "rests"]
    assert {name for name in CALL if call[name] == 0} == {
        *(f"{name} {way}" for name in absent for way in ("forward", "backward")),
        *("ids", "last", "max", "wide_ids", "height", "parts"),
    }
    assert kernels[0].blocks == (2, 2, 1)
    assert kernels[0].shared <= H200_SHARED_BYTES


def test_single_direction_fills_both_members_of_a_pair(kernels: list[FakeKernel]) -> None:
    form = families.Form("qrnn", pooling="ifo", window=2)
    fused_qrnn.qrnn(*half(form.arguments([3, 0, 4], 40, 8, storage=torch.bfloat16)), want=EVERYTHING)
    call = call_of(kernels)
    forward, backward = ([call[name] for name in CALL if name.endswith(way)] for way in (" forward", " backward"))
    assert forward == backward
    assert kernels[0].blocks[2] == 1


def test_bidirectional_layer_is_one_launch(kernels: list[FakeKernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    forward, backward = (half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16, seed=seed)) for seed in (0, 1))
    encoded = fused_qrnn.bidirectional(
        forward.x, (forward.weights, backward.weights), (forward.state, backward.state), want=Outputs(last=True)
    )
    call = call_of(kernels)
    assert encoded.last is not None and encoded.last.shape == (3, 80)
    for way, arguments, after in zip(("forward", "backward"), (forward, backward), encoded.state, strict=True):
        assert call[f"data {way}"] == forward.x.data.data_ptr()
        assert call[f"source {way}"] == arguments.weights.packed["input", 32].data_ptr()
        assert call[f"before {way}"] == arguments.state.cell.data_ptr()
        assert call[f"after {way}"] == after.cell.data_ptr()
        assert call[f"left_after {way}"] == after.left.data_ptr()
    assert call["width"] == 80
    assert kernels[0].blocks[2] == 2


def test_launch_is_early_once_its_weights_are_packed(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="block")
    arguments = half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16))
    for _ in range(2):
        fused_sru.sru(*arguments, want=EVERYTHING)
    assert kernels[0].early == [False, True]
    fused_sru.sru(*half(form.gated(arguments)), want=EVERYTHING)
    assert kernels[1].early == [True]


def test_product_kernel_receives_tensor_maps(kernels: list[FakeKernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    arguments = half(form.arguments([3, 0, 4], 40, 24, storage=torch.float16))
    fused_qrnn.bidirectional(arguments.x, (arguments.weights,) * 2, None, want=Outputs(last=True))
    (maps,) = kernels[0].arguments
    assert len(maps) == 2 * MAP_BYTES
    for way in (0, 1):
        address, *sizes = struct.unpack_from("5q", maps, way * MAP_BYTES)
        assert address == arguments.x.data.data_ptr()
        assert sizes == [7, 24, TILE, DEPTH]


def test_batch_without_tokens_needs_no_tensor_map(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    fused_sru.sru(*half(form.arguments([0, 0], 40, 8, storage=torch.float16)), want=EVERYTHING)
    assert kernels[0].arguments == (bytes(2 * MAP_BYTES),)


def test_directions_share_their_product_input(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    x, forward, _ = form.arguments([3, 0, 4], 40, 8, storage=torch.float16)
    backward = form.arguments([3, 0, 4], 40, 8, storage=torch.float16, seed=1).weights
    norm, second_norm = torch.randn(2, *x.data.shape[1:]), torch.randn(2, *x.data.shape[1:])
    for norms, once in (((None, None), True), ((norm, norm), True), ((norm, second_norm), False)):
        pair = replace(forward, norm=norms[0]), replace(backward, norm=norms[1])
        fused_sru.bidirectional(x, pair, None, want=Outputs(last=True))
        call = kernels[-1].calls[-1]
        assert (call["data forward"] == call["data backward"]) == once


def test_ids_and_tables_are_not_copied(kernels: list[FakeKernel]) -> None:
    form = families.Form("qrnn", pooling="ifo", window=2, ids=True)
    x, weights, state = form.arguments([3, 0, 4], 40, 8, storage=torch.float16)
    x = Ragged(x.data.long(), x.offsets)
    encoded = fused_qrnn.qrnn(x, weights, state, want=Outputs(last=True))
    call = call_of(kernels)
    expected = [weights.tables.data_ptr(), x.data.data_ptr(), state.left.data_ptr(), encoded.state.left.data_ptr()]
    assert addresses(call, "source forward", "ids", "left forward", "left_after forward") == expected
    assert (call["wide_ids"], call["height"], call["data forward"]) == (1, 1 + families.VOCABULARY, 0)
    constants = kernels[0].constants
    assert (constants["TAPS"], constants["GATHER"], constants["FIRST_LINE"], constants["PIECE_BYTES"]) == (2, 1, 1, 16)


def test_piece_bytes_follow_the_alignment_of_gate_inputs(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="block")
    x, weights, state = form.gated(form.arguments([3, 0, 4], 40, 8))
    weights, memory = map_arrays(weights, torch.Tensor.half), torch.zeros(16 + x.data.numel(), dtype=torch.float16)
    for places, piece_bytes in ((0, 16), (1, 2), (2, 4), (4, 8), (8, 16)):
        begun = memory[places : places + x.data.numel()].view_as(x.data)
        fused_sru.sru(Ragged(begun, x.offsets), weights, state, want=EVERYTHING)
        launched = next(kernel for kernel in kernels if kernel.calls[-1]["source forward"] == begun.data_ptr())
        assert launched.constants["PIECE_BYTES"] == piece_bytes


@pytest.mark.parametrize("family", ["sru", "qrnn"])
@pytest.mark.parametrize(
    "version, want, lengths, source",
    [
        (2, "last", [LONG_ROW], "gate_inputs.cu"),
        (2, "last", [LONG_ROW - 1], "product.cu"),
        (1, "steps", [LONG_ROW], "gate_inputs.cu"),
        (1, "last", [LONG_ROW] * (FEW_ROWS + 1), "product.cu"),
        (1, "last", [LONG_ROW] * 2, "tile_product.cu"),
        (1, "last", [TILED_TOKENS, 1], "tile_gates.cu"),
    ],
)
def test_few_long_rows_may_use_a_library_product(
    family: str, version: int, want: str, lengths: list[int], source: str, kernels: list[FakeKernel]
) -> None:
    if family == "qrnn" and version == 2:
        return
    form = families.Form("sru", version=version) if family == "sru" else families.Form("qrnn", pooling="fo", window=1)
    x, weights, _ = half(form.arguments(lengths, 264, 8, storage=torch.float16))
    (fused_sru.sru if family == "sru" else fused_qrnn.qrnn)(x, weights, None, want=Outputs(**{want: True}))
    assert kernels[0].source.name == source
    assert bool(kernels[0].calls[0]["data forward"]) == source.endswith("product.cu")


@pytest.mark.parametrize("lengths", [[1024], [4096], [600, 0, 700]], ids=str)
def test_divided_rows_are_folded(lengths: list[int], kernels: list[FakeKernel]) -> None:
    """A second launch reads what the first has written, and writes the outputs."""
    form = families.Form("sru", version=1, skip="block")
    x, weights, state = half(form.arguments(lengths, 1000, 8, storage=torch.float16))
    fused_sru.bidirectional(x, (weights, weights), (state, state), want=Outputs(last=True))
    first, fold = kernels
    assert fold.source.name == "fold.cu"
    assert fold.early == [True]
    assert fold.calls == first.calls
    assert fold.blocks == (32, len(lengths), 2)
    (call,) = fold.calls
    assert call["parts"] == sum(lengths) // PART + len(lengths)
    memory = [call[f"{name} {way}"] for name in ("maps", "rests") for way in ("forward", "backward")]
    assert len({*memory}) == 4 and 0 not in memory
    assert call["maps backward"] - call["maps forward"] == 8 * 1000 * call["parts"]


def test_too_many_tokens_are_refused() -> None:
    form = families.Form("sru", version=1, skip="none", ids=True)
    _, weights, _ = form.arguments([1], 40, 8, storage=torch.float16)
    x = Ragged(torch.zeros(1, dtype=torch.int32).expand(2**31), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has 2147483648 tokens, but one call takes at most {launch.MAX_TOKENS}"):
        fused_sru.sru(x, weights, None, want=Outputs(last=True))


def test_odd_inputs_are_padded_to_whole_pieces(kernels: list[FakeKernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=3)
    x, weights, state = half(form.arguments([3, 0, 4], 40, 5, storage=torch.float16))
    encoded = fused_qrnn.qrnn(x, weights, state, want=EVERYTHING)
    assert call_of(kernels)["inputs"] == 8
    assert encoded.state.left.shape == (3, 2, 5)


def test_state_in_slots_is_updated_in_place(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    x, weights, _ = half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16))
    caches = SRUState(torch.zeros(9, 40), torch.tensor([8, 1, 2], dtype=torch.int32))
    assert fused_sru.sru(x, weights, caches, want=Outputs(last=True)).state is caches
    call = call_of(kernels)
    assert caches.slots is not None
    assert addresses(call, "after forward", "slots_after forward") == [caches.cell.data_ptr(), caches.slots.data_ptr()]
    assert addresses(call, "before forward", "slots_before forward") == [caches.cell.data_ptr(), caches.slots.data_ptr()]
    for cell in (caches.cell.half(), torch.zeros(40, 9).T):
        with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
            fused_sru.sru(x, weights, replace(caches, cell=cell), want=Outputs())


def test_state_is_read_from_sources_and_written_to_slots(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    x, weights, _ = half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16))
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    caches = SRUState(torch.zeros(9, 40), slots, sources)
    after = fused_sru.sru(x, weights, caches, want=Outputs(last=True)).state
    call = call_of(kernels)
    assert addresses(call, "after forward", "slots_after forward") == [caches.cell.data_ptr(), slots.data_ptr()]
    assert addresses(call, "before forward", "slots_before forward") == [caches.cell.data_ptr(), sources.data_ptr()]
    assert after.cell is caches.cell and after.slots is slots and after.sources is None


def test_left_context_is_read_from_source_and_written_to_slot() -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    x, weights, _ = form.arguments([3, 0, 4], 40, 8)
    left = torch.arange(9.0)[:, None, None].repeat(1, 1, 8)
    caches = QRNNState(torch.zeros(9, 40), left.clone(), torch.tensor([8, 1, 2]), torch.tensor([5, 4, 5]))
    after = fused_qrnn.qrnn(x, weights, caches, want=Outputs(last=True)).state
    assert after.left is caches.left and after.sources is None
    left[8, 0], left[1], left[2, 0] = x.data[2], left[4], x.data[6]
    assert torch.equal(caches.left, left)


def test_left_context_is_scattered_to_its_slots() -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    x, weights, _ = half(form.arguments([3, 0, 4], 40, 8, storage=torch.float16))
    caches = QRNNState(torch.zeros(9, 40), torch.zeros(9, 1, 8), torch.tensor([8, 1, 2]))
    assert fused_qrnn.qrnn(x, weights, caches, want=Outputs(last=True)).state is caches
    assert caches.left.isnan().flatten(1).all(1).nonzero()[:, 0].tolist() == [1, 2, 8], (
        "memory that the fake kernel did not write"
    )


def test_float32_layers_are_a_library_product_and_one_launch(kernels: list[FakeKernel]) -> None:
    for form, run in ((families.Form("sru"), fused_sru.sru), (families.Form("qrnn", window=1), fused_qrnn.qrnn)):
        kernels.clear()
        run(*form.arguments([3, 0, 4], 40, 8), want=EVERYTHING)
        call = call_of(kernels)
        assert call["source forward"] and not call["data forward"]
        assert kernels[0].constants["EXACT"] == kernels[0].constants["GATES_FLOAT32"] == 1


@pytest.mark.parametrize("storage, lengths", [(torch.float32, [3, 0, 4]), (torch.float16, [LONG_ROW])], ids=str)
def test_library_product_over_a_window_yields_whole_gates(
    storage: torch.dtype, lengths: list[int], kernels: list[FakeKernel]
) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    arguments = form.arguments(lengths, 264, 8, storage=storage)
    data = arguments.x.data.to(storage)
    encoded = fused_qrnn.qrnn(Ragged(data, arguments.x.offsets), arguments.weights, arguments.state, want=EVERYTHING)
    assert not call_of(kernels)["data forward"]
    assert (kernels[0].constants["TAPS"], kernels[0].constants["GATHER"]) == (1, 0)
    ends = zip(arguments.x.offsets.tolist()[1:], lengths, arguments.state.left[:, 0].to(storage), strict=True)
    assert torch.equal(encoded.state.left[:, 0], torch.stack([data[end - 1] if length else left for end, length, left in ends]))


def test_weights_are_packed_once(kernels: list[FakeKernel]) -> None:
    form = families.Form("sru", version=2, skip="block")
    x, weights, state = half(form.arguments([3, 0, 4], 40, 8, storage=torch.bfloat16))
    x = Ragged(x.data.bfloat16(), x.offsets)
    for _ in range(2):
        fused_sru.sru(x, weights, state, want=Outputs())
    (kernel,) = kernels
    first, second = kernel.calls
    assert all(first[f"{name} forward"] == second[f"{name} forward"] for name in ("source", "bias", "own_cell"))
    assert len(weights.packed) == 3


@pytest.mark.parametrize("form", [form for form in families.FORMS if form.family in ("sru", "qrnn")], ids=str)
def test_batch_without_rows_launches_nothing(form: families.Form, kernels: list[FakeKernel]) -> None:
    run = fused_sru.sru if form.family == "sru" else fused_qrnn.qrnn
    encoded = run(*half(form.arguments([], 40, 8, storage=torch.float16)), want=EVERYTHING)
    assert not kernels
    assert encoded.steps is not None
    assert encoded.steps.shape == (0, 40)
    assert {len(array) for array in arrays(encoded.state).values()} == {0}


# Refusals.


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_fused_backend_refuses_a_cpu(family: str) -> None:
    assert explain(family, device="cpu", dtype="float16", hidden=96).splitlines()[0] == "fused: needs an NVIDIA GPU"
