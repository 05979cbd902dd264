"""What the launcher of the SRU's and the QRNN's CUDA kernels works out without a GPU: the layout of the weights, shapes and grids."""

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
from kernels.contract import ContractError, Outputs, QRNNState, Ragged, SRUState
from kernels.qrnn import launch as qrnn_launch
from kernels.scan import launch
from kernels.scan.launch import DEPTH, Form, Gates, Layer, Shape, pack
from kernels.sru import launch as sru_launch
from kernels.tensormap import MAP_BYTES
from kernels.tuning import covering, tuned
from tests.kernels import families
from tests.kernels.inputs import EVERYTHING, Given, arrays, mapped
from tests.kernels.sources import members, text, told

H200_SHARED_BYTES = 232_448
PROCESSORS = 132
WITHOUT_POOLS = Outputs(steps=True, last=True)

FORMS = [
    *(Form(blocks, sru=True, own_cell=own, skip=skip) for blocks, skip in ((3, 0), (4, 1), (3, 2)) for own in (False, True)),
    *(Form(blocks) for blocks in (2, 3, 4)),
]
SRU_1, SRU_2, QRNN = Form(4, sru=True, skip=1), Form(4, sru=True, own_cell=True, skip=1), Form(3)
PRODUCT = Gates(product=True, window=1)
GIVEN = Gates(product=False, window=1)


@dataclass
class Kernel:
    """Stands for a compiled kernel: how it was specialised, and what it was launched with."""

    source: Path
    threads: int
    cluster: int
    constants: dict[str, int]
    calls: list[dict[str, int]] = field(default_factory=list)
    blocks: tuple[int, int, int] = (0, 0, 0)
    shared: int = 0
    early: list[bool] = field(default_factory=list)
    others: tuple[bytes, ...] = ()

    def launch(self, blocks: tuple[int, int, int], shared: int, members: Sequence[int], *others: bytes, early: bool) -> None:
        self.early.append(early)
        self.others = others
        self.calls.append(dict(zip(CALL, members, strict=True)))
        self.blocks, self.shared = blocks, shared


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """As on an H200 whose compiler is this list; what is found meanwhile is not used after."""
    made: list[Kernel] = []

    def compiled(source: Path, device: int, *, threads: int, cluster: int, **constants: int) -> Kernel:
        made.append(Kernel(source, threads, cluster, constants))
        return made[-1]

    def mapped(address: int, *sizes: int) -> bytes:
        return struct.pack("5q", address, *sizes).ljust(MAP_BYTES)

    monkeypatch.setattr(launch, "compiled", compiled)
    monkeypatch.setattr(launch, "mapped", mapped)
    monkeypatch.setattr(launch, "shared_limit", lambda _: H200_SHARED_BYTES)
    monkeypatch.setattr(launch, "current", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS))
    caches = launch._launch, launch._kernel, launching.processors
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def specialised(one: Layer, shape: Shape) -> tuple[Kernel, int]:
    """The kernel of a layer in this shape, and the bytes of shared memory that it is launched with."""
    made: Any = launch._kernel(one, shape)  # it takes the one made above for a compiled one
    kernel, shared = made
    return kernel, shared


def layer(form: Form, gates: Gates, hidden: int = 256, **others: Any) -> Layer:
    some = Layer(0, torch.float16, form, gates, 1, hidden, 300 if gates.product else 0, False, True)
    return some._replace(**others)


def shapes(form: Form, gates: Gates, *, pooled: bool = False) -> list[Shape]:
    """All in which a layer may be launched."""
    found = [Shape(units) for units in (32, 64) if units * form.blocks <= 192]
    if not form.own_cell and not gates.product:
        found.append(Shape(32, busy=True))
    return found if form.own_cell or pooled else [*found, *(Shape(32, ring) for ring in (1, 2, 4, 8))]


# The layout of the weights.


def unpacked(packed: Tensor) -> Tensor:
    """(slices, steps of the window by 64 inputs, columns, 64 inputs) with every 16-byte piece back in its place."""
    slices, deep, columns = packed.shape[:3]
    values = torch.zeros_like(packed)
    for column, place in product(range(columns), range(8)):
        values[:, :, column, place ^ column % 8] = packed[:, :, column, place]
    return values.reshape(slices, deep, columns, DEPTH)


@pytest.mark.parametrize("window, inputs, blocks, hidden, units", [(1, 5, 4, 40, 32), (2, 130, 3, 100, 32), (3, 64, 2, 64, 64)])
def test_packed_weights_are_the_operands_of_the_tensor_cores(
    window: int, inputs: int, blocks: int, hidden: int, units: int
) -> None:
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
    assert not by_unit[:, :, hidden:].any(), "units that are padding have no weights"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_packed_slice_is_copied_in_whole_pieces(dtype: torch.dtype) -> None:
    packed = pack(torch.ones(1, 70, 3 * 33, dtype=dtype), 3, 32)
    assert packed.is_contiguous()
    assert packed.shape == (2, 2, 3 * 32, 8, 8)
    assert packed.dtype == dtype


# Shapes.


def all_gates(form: Form) -> list[Gates]:
    """From everywhere that such a layer's may come from."""
    taken = product((1,) if form.sru else (1, 2, 4), (False, True), (2, 16))
    given = [Gates(False, window, window > 1 or gather, False, piece) for window, gather, piece in taken]
    return [
        *given,
        Gates(False, given[-1].window, True, True, 16),
        *(launch.product(window) for window in {gates.window for gates in given}),
    ]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("watched", [False, True])
def test_every_shape_has_room_on_a_multiprocessor(form: Form, watched: bool) -> None:
    taken = ((gates, shape) for gates in all_gates(form) for shape in shapes(form, gates))
    for (gates, shape), inputs in product(taken, (1, 300, 1024, 5000)):
        kernel, shared = specialised(layer(form, gates, inputs=inputs if gates.product else 0, watched=watched), shape)
        stages = kernel.constants["STAGES"]
        assert shared == kernel.constants["SHARED"] <= H200_SHARED_BYTES
        assert stages >= (launch.PATCHING_WARPS if gates.product else 1)
        assert kernel.threads <= 1024
        assert kernel.threads % 32 == 0
        assert not gates.product or form.blocks * shape.units % 16 == 0, "columns that the tensor cores multiply at once"
        assert not gates.product or f"PRODUCT_COLUMNS == {form.blocks * shape.units}\n" in text(launch.HERE / "product.cu")


def test_weights_stay_in_shared_memory_where_there_is_room() -> None:
    for inputs, resident in ((300, 1), (5000, 0)):
        kernel, _ = specialised(layer(QRNN, PRODUCT, inputs=inputs), Shape(32))
        assert kernel.constants["RESIDENT"] == resident
        assert kernel.constants["PIECES"] == -(-inputs // 64)


def test_a_window_that_has_no_room_is_refused() -> None:
    with pytest.raises(ContractError, match="this device has no room for a window of 999 steps"):
        launch._kernel(layer(QRNN, Gates(False, 999, gather=True)), Shape(32))


@pytest.mark.parametrize("hidden", [1, 32, 33, 128, 300, 1024, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 700, 4096])
@pytest.mark.parametrize("directions", [1, 2])
def test_rows_are_spread_over_the_multiprocessors(hidden: int, rows: int, directions: int) -> None:
    taken = ((gates, shape) for gates in (PRODUCT, GIVEN) for shape in shapes(QRNN, gates))
    for gates, shape in taken:
        found = launch._launch(layer(QRNN, gates, hidden, directions=directions), shape, rows)
        along, slices, ways = found.blocks
        assert (slices, ways) == (found.slices, directions)
        assert (slices - 1) * shape.units < hidden <= slices * shape.units
        assert along % shape.cluster == 0
        places = along // shape.cluster
        assert 1 <= found.streams <= rows
        assert found.streams == places if shape.ring else 2 * (places - 1) < found.streams <= 2 * places
        assert along * slices * ways <= PROCESSORS or places == 1, "no block waits for another to end"
        idle = PROCESSORS // (shape.cluster * slices * ways) - places
        assert found.streams == rows or idle <= 0, "none is idle while a stream has several rows"


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
def test_a_shape_is_one_that_its_layer_has(form: Form, directions: int, hidden: int) -> None:
    for (rows, tokens), gates, pooled in product(LENGTHS, (PRODUCT, GIVEN), (False, True)):
        one = layer(form, gates, hidden, directions=directions)
        shape = launch.shape_for(one, rows, tokens, pooled)
        assert shape in shapes(form, gates, pooled=pooled)
        if shape.ring:
            clusters = launch._launch(one, shape, rows)
            assert clusters.blocks[0] * clusters.blocks[1] * directions <= launch.IN_CLUSTERS, "all clusters run at once"
            assert clusters.streams == rows, "a ring for each row"


def test_only_long_rows_have_a_ring() -> None:
    one = layer(SRU_1, GIVEN, 72)
    assert launch.shape_for(one, 1, launch.LONG_ROW, pooled=False) == Shape(32, max(launch.RINGS))
    assert not launch.shape_for(one, 1, launch.LONG_ROW - 1, pooled=False).ring
    assert not launch.shape_for(one, 61, 1020, pooled=False).ring
    assert not launch.shape_for(one, 1, 4096, pooled=True).ring, "pools are added up in the order of the steps"
    assert not launch.shape_for(layer(SRU_2, GIVEN, 72), 1, 4096, pooled=False).ring, "no cell can be guessed"


def test_gates_that_are_given_to_many_rows_have_more_threads() -> None:
    linear, with_own_cell = layer(SRU_1, GIVEN), layer(SRU_2, GIVEN)
    assert launch.shape_for(linear, 9, 900, pooled=False).busy
    assert not launch.shape_for(linear, 8, 800, pooled=False).busy
    assert not launch.shape_for(with_own_cell, 9, 900, pooled=False).busy
    assert not launch.shape_for(layer(SRU_1, PRODUCT), 9, 900, pooled=False).busy


def test_what_leaves_with_every_step_is_computed_by_blocks_of_few_units() -> None:
    for watched, units in ((False, 64), (True, 32)):
        assert launch.shape_for(layer(QRNN, PRODUCT, 512, watched=watched), 256, 10_000, pooled=False) == Shape(units)


def test_a_ring_has_fewer_blocks_where_there_are_more_rows() -> None:
    one = layer(QRNN, PRODUCT, 128)
    rings = [launch.shape_for(one, rows, 4096 * rows, pooled=False).ring for rows in range(1, 65)]
    assert rings == sorted(rings, reverse=True)
    assert {*rings} == {*launch.RINGS, 0}


def test_what_was_measured_covers_everything() -> None:
    for file in (launch.HERE / "tuned").glob("*.json"):
        found = json.loads(file.read_text())["shapes"]
        for width, rows, tokens in product((1, 256, 10_000), (1, 64, 100_000), (0, 1024, 10_000_000)):
            (_, units), *_ = covering(found, ("units",), width=width, depth=width, rows=rows, tokens=tokens)
            assert units in (32, 64)
    assert "H200" in tuned(launch.HERE / "tuned", "NVIDIA H200")["device"]


# What the sources are told.


@pytest.mark.parametrize("gates, source", [(PRODUCT, "product.cu"), (GIVEN, "given.cu")])
def test_a_kernel_is_told_what_its_source_asks_for(gates: Gates, source: str) -> None:
    kernel, _ = specialised(layer(SRU_1, gates), Shape(32))
    assert kernel.source == launch.HERE / source
    assert kernel.constants.keys() | {"THREADS"} == told(launch.HERE / source)
    assert {type(value) for value in kernel.constants.values()} == {int}


def call() -> list[str]:
    """The members of a Call, in their order; of a pair, each."""
    ways = {(): ("",), ("2",): (" forward", " backward")}
    return [one.name + way for one in members(launch.HERE / "given.cu", "Call") for way in ways[one.sizes]]


CALL = call()


def call_of(kernels: list[Kernel]) -> dict[str, int]:
    (kernel,) = kernels
    (call,) = kernel.calls
    return call


def half(given: Given) -> Given:
    """The data as the weights are, unless they are ids."""
    return given._replace(x=Ragged(given.x.data.half() if given.x.data.is_floating_point() else given.x.data, given.x.offsets))


def addresses(call: dict[str, int], *names: str) -> list[int]:
    return [call[name] for name in names]


def test_the_launcher_lists_the_members_of_a_call_in_their_order(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=2, skip="columns")
    x, weights, state = half(form.given([3, 0, 4], 40, 8, storage=torch.float16))
    x = Ragged(x.data, x.offsets.long())
    encoded = sru_launch.sru(x, weights, state, want=Outputs(steps=True, mean=True))
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
    absent = ["left", "left_after", "slots_before", "slots_after"]
    assert {name for name in CALL if call[name] == 0} == {
        *(f"{name} {way}" for name in absent for way in ("forward", "backward")),
        *("ids", "last", "max", "wide_ids", "height"),
    }
    assert kernels[0].blocks == (2, 2, 1)
    assert kernels[0].shared <= H200_SHARED_BYTES


def test_of_one_direction_the_other_is_the_same(kernels: list[Kernel]) -> None:
    form = families.Form("qrnn", pooling="ifo", window=2)
    qrnn_launch.qrnn(*half(form.given([3, 0, 4], 40, 8, storage=torch.bfloat16)), want=EVERYTHING)
    call = call_of(kernels)
    forward, backward = ([call[name] for name in CALL if name.endswith(way)] for way in (" forward", " backward"))
    assert forward == backward
    assert kernels[0].blocks[2] == 1


def test_both_directions_are_one_launch(kernels: list[Kernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    forward, backward = (half(form.given([3, 0, 4], 40, 8, storage=torch.float16, seed=seed)) for seed in (0, 1))
    encoded = qrnn_launch.both(
        forward.x, (forward.weights, backward.weights), (forward.state, backward.state), want=Outputs(last=True)
    )
    call = call_of(kernels)
    assert encoded.last is not None and encoded.last.shape == (3, 80)
    for way, given, after in zip(("forward", "backward"), (forward, backward), encoded.state, strict=True):
        assert call[f"data {way}"] == forward.x.data.data_ptr()
        assert call[f"source {way}"] == given.weights.packed["input", 32].data_ptr()
        assert call[f"before {way}"] == given.state.cell.data_ptr()
        assert call[f"after {way}"] == after.cell.data_ptr()
        assert call[f"left_after {way}"] == after.left.data_ptr()
    assert call["width"] == 80
    assert kernels[0].blocks[2] == 2


def test_a_launch_may_begin_early_once_its_weights_are_packed(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=1, skip="block")
    given = half(form.given([3, 0, 4], 40, 8, storage=torch.float16))
    for _ in range(2):
        sru_launch.sru(*given, want=EVERYTHING)
    assert kernels[0].early == [False, True]
    sru_launch.sru(*half(form.gated(given)), want=EVERYTHING)
    assert kernels[1].early == [True]


def test_a_product_fetches_its_inputs_through_maps(kernels: list[Kernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    given = half(form.given([3, 0, 4], 40, 24, storage=torch.float16))
    qrnn_launch.both(given.x, (given.weights,) * 2, None, want=Outputs(last=True))
    (maps,) = kernels[0].others
    assert len(maps) == 2 * MAP_BYTES
    for way in (0, 1):
        address, *sizes = struct.unpack_from("5q", maps, way * MAP_BYTES)
        assert address == given.x.data.data_ptr()
        assert sizes == [7, 24, launch.TILE, DEPTH]


def test_without_tokens_nothing_is_mapped(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    sru_launch.sru(*half(form.given([0, 0], 40, 8, storage=torch.float16)), want=EVERYTHING)
    assert kernels[0].others == (bytes(2 * MAP_BYTES),)


def test_what_both_directions_multiply_is_made_once(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=1, skip="none")
    x, forward, _ = form.given([3, 0, 4], 40, 8, storage=torch.float16)
    backward = form.given([3, 0, 4], 40, 8, storage=torch.float16, seed=1).weights
    norm, other = torch.randn(2, *x.data.shape[1:]), torch.randn(2, *x.data.shape[1:])
    for norms, once in (((None, None), True), ((norm, norm), True), ((norm, other), False)):
        pair = replace(forward, norm=norms[0]), replace(backward, norm=norms[1])
        sru_launch.both(x, pair, None, want=Outputs(last=True))
        call = kernels[-1].calls[-1]
        assert (call["data forward"] == call["data backward"]) == once


def test_ids_and_tables_are_read_where_they_are(kernels: list[Kernel]) -> None:
    form = families.Form("qrnn", pooling="ifo", window=2, ids=True)
    x, weights, state = form.given([3, 0, 4], 40, 8, storage=torch.float16)
    x = Ragged(x.data.long(), x.offsets)
    encoded = qrnn_launch.qrnn(x, weights, state, want=Outputs(last=True))
    call = call_of(kernels)
    expected = [weights.tables.data_ptr(), x.data.data_ptr(), state.left.data_ptr(), encoded.state.left.data_ptr()]
    assert addresses(call, "source forward", "ids", "left forward", "left_after forward") == expected
    assert (call["wide_ids"], call["height"], call["data forward"]) == (1, 1 + families.VOCABULARY, 0)
    constants = kernels[0].constants
    assert (constants["TAPS"], constants["GATHER"], constants["FIRST_LINE"], constants["PIECE_BYTES"]) == (2, 1, 1, 16)


def test_gates_are_read_where_they_begin(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=1, skip="block")
    x, weights, state = form.gated(form.given([3, 0, 4], 40, 8))
    weights, memory = mapped(weights, torch.Tensor.half), torch.zeros(16 + x.data.numel(), dtype=torch.float16)
    for places, together in ((0, 16), (1, 2), (2, 4), (4, 8), (8, 16)):
        begun = memory[places : places + x.data.numel()].view_as(x.data)
        sru_launch.sru(Ragged(begun, x.offsets), weights, state, want=EVERYTHING)
        launched = next(kernel for kernel in kernels if kernel.calls[-1]["source forward"] == begun.data_ptr())
        assert launched.constants["PIECE_BYTES"] == together


@pytest.mark.parametrize("form", [families.Form("sru", version=2), families.Form("qrnn", pooling="fo", window=2)], ids=str)
def test_where_few_rows_are_long_the_product_of_a_wide_layer_is_the_librarys(
    form: families.Form, kernels: list[Kernel]
) -> None:
    run = sru_launch.sru if form.family == "sru" else qrnn_launch.qrnn
    for lengths, its_own in (([launch.LONG_ROW], False), ([launch.LONG_ROW - 1], True), ([launch.LONG_ROW] * 9, True)):
        x, weights, _ = half(form.given(lengths, launch.NARROW + 1, 8, storage=torch.float16))
        if not its_own and form.family == "qrnn":
            weights = replace(weights, input=weights.input[:1])  # no kernel says here what stands before the next chunk
        kernels.clear()
        launch._launch.cache_clear()
        launch._kernel.cache_clear()
        run(x, weights, None, want=Outputs(last=True))
        assert (kernels[-1].source.name == "product.cu") == its_own
        assert bool(kernels[-1].calls[-1]["data forward"]) == its_own


def test_more_tokens_than_can_be_counted_are_refused() -> None:
    form = families.Form("sru", version=1, skip="none", ids=True)
    _, weights, _ = form.given([1], 40, 8, storage=torch.float16)
    x = Ragged(torch.zeros(1, dtype=torch.int32).expand(2**31), torch.tensor([0, 2**31]))
    with pytest.raises(ContractError, match=f"x has 2147483648 tokens, at most {launch.MOST_TOKENS} are taken at once"):
        sru_launch.sru(x, weights, None, want=Outputs(last=True))


def test_odd_inputs_are_padded_to_whole_pieces(kernels: list[Kernel]) -> None:
    form = families.Form("qrnn", pooling="fo", window=3)
    x, weights, state = half(form.given([3, 0, 4], 40, 5, storage=torch.float16))
    encoded = qrnn_launch.qrnn(x, weights, state, want=EVERYTHING)
    assert call_of(kernels)["inputs"] == 8
    assert encoded.state.left.shape == (3, 2, 5)


@pytest.mark.parametrize("ring", [0, 2])
def test_a_state_in_slots_stays_where_it_is(ring: int, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shape_for", lambda *_: Shape(32, ring))
    form = families.Form("sru", version=1, skip="none")
    x, weights, _ = half(form.given([3, 0, 4], 40, 8, storage=torch.float16))
    slabs = SRUState(torch.zeros(9, 40), torch.tensor([8, 1, 2], dtype=torch.int32))
    assert sru_launch.sru(x, weights, slabs, want=Outputs(last=True)).state is slabs
    call = call_of(kernels)
    assert slabs.slots is not None
    assert addresses(call, "after forward", "slots_after forward") == [slabs.cell.data_ptr(), slabs.slots.data_ptr()]
    if ring:  # another block may look for the old cell when the new one is there
        assert call["slots_before forward"] == 0
        assert call["before forward"] not in (0, slabs.cell.data_ptr())
    else:
        assert addresses(call, "before forward", "slots_before forward") == [slabs.cell.data_ptr(), slabs.slots.data_ptr()]
    for cell in (slabs.cell.half(), torch.zeros(40, 9).T):
        with pytest.raises(ContractError, match=r"state.cell with slots is a contiguous float32 array"):
            sru_launch.sru(x, weights, replace(slabs, cell=cell), want=Outputs())


@pytest.mark.parametrize("ring", [0, 2])
def test_a_state_goes_on_from_other_places_than_those_where_it_is_written(
    ring: int, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "shape_for", lambda *_: Shape(32, ring))
    form = families.Form("sru", version=1, skip="none")
    x, weights, _ = half(form.given([3, 0, 4], 40, 8, storage=torch.float16))
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    slabs = SRUState(torch.zeros(9, 40), slots, sources)
    after = sru_launch.sru(x, weights, slabs, want=Outputs(last=True)).state
    call = call_of(kernels)
    assert addresses(call, "after forward", "slots_after forward") == [slabs.cell.data_ptr(), slots.data_ptr()]
    assert call["slots_before forward"] == (0 if ring else sources.data_ptr())
    assert (call["before forward"] == slabs.cell.data_ptr()) == (not ring)
    assert after.cell is slabs.cell and after.slots is slots and after.sources is None


def test_what_stands_before_a_row_is_taken_from_its_source_and_goes_to_its_slot() -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    x, weights, _ = form.given([3, 0, 4], 40, 8)
    left = torch.arange(9.0)[:, None, None].repeat(1, 1, 8)
    slabs = QRNNState(torch.zeros(9, 40), left.clone(), torch.tensor([8, 1, 2]), torch.tensor([5, 4, 5]))
    after = qrnn_launch.qrnn(x, weights, slabs, want=Outputs(last=True)).state
    assert after.left is slabs.left and after.sources is None
    left[8, 0], left[1], left[2, 0] = x.data[2], left[4], x.data[6]
    assert torch.equal(slabs.left, left)


def test_what_the_kernel_left_goes_back_to_its_slots() -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    x, weights, _ = half(form.given([3, 0, 4], 40, 8, storage=torch.float16))
    slabs = QRNNState(torch.zeros(9, 40), torch.zeros(9, 1, 8), torch.tensor([8, 1, 2]))
    assert qrnn_launch.qrnn(x, weights, slabs, want=Outputs(last=True)).state is slabs
    assert slabs.left.isnan().flatten(1).all(1).nonzero()[:, 0].tolist() == [1, 2, 8], "memory that nobody wrote"


def test_float32_layers_are_a_library_product_and_one_launch(kernels: list[Kernel]) -> None:
    for form, run in ((families.Form("sru"), sru_launch.sru), (families.Form("qrnn", window=1), qrnn_launch.qrnn)):
        kernels.clear()
        run(*form.given([3, 0, 4], 40, 8), want=EVERYTHING)
        call = call_of(kernels)
        assert call["source forward"] and not call["data forward"]
        assert kernels[0].constants["EXACT"] == kernels[0].constants["GATES_FLOAT32"] == 1


@pytest.mark.parametrize("storage, lengths", [(torch.float32, [3, 0, 4]), (torch.float16, [launch.LONG_ROW])], ids=str)
def test_of_a_library_product_over_a_window_the_kernel_sees_whole_gates(
    storage: torch.dtype, lengths: list[int], kernels: list[Kernel]
) -> None:
    form = families.Form("qrnn", pooling="fo", window=2)
    given = form.given(lengths, launch.NARROW + 1, 8, storage=storage)
    data = given.x.data.to(storage)
    encoded = qrnn_launch.qrnn(Ragged(data, given.x.offsets), given.weights, given.state, want=EVERYTHING)
    assert not call_of(kernels)["data forward"]
    assert (kernels[0].constants["TAPS"], kernels[0].constants["GATHER"]) == (1, 0)
    ends = zip(given.x.offsets.tolist()[1:], lengths, given.state.left[:, 0].to(storage), strict=True)
    assert torch.equal(encoded.state.left[:, 0], torch.stack([data[end - 1] if length else left for end, length, left in ends]))


def test_weights_are_packed_once(kernels: list[Kernel]) -> None:
    form = families.Form("sru", version=2, skip="block")
    x, weights, state = half(form.given([3, 0, 4], 40, 8, storage=torch.bfloat16))
    x = Ragged(x.data.bfloat16(), x.offsets)
    for _ in range(2):
        sru_launch.sru(x, weights, state, want=Outputs())
    (kernel,) = kernels
    first, second = kernel.calls
    assert all(first[f"{name} forward"] == second[f"{name} forward"] for name in ("source", "bias", "own_cell"))
    assert len(weights.packed) == 3


@pytest.mark.parametrize("form", [one for one in families.FORMS if one.family in ("sru", "qrnn")], ids=str)
def test_without_rows_nothing_is_launched(form: families.Form, kernels: list[Kernel]) -> None:
    run = sru_launch.sru if form.family == "sru" else qrnn_launch.qrnn
    encoded = run(*half(form.given([], 40, 8, storage=torch.float16)), want=EVERYTHING)
    assert not kernels
    assert encoded.steps is not None
    assert encoded.steps.shape == (0, 40)
    assert {len(array) for array in arrays(encoded.state).values()} == {0}


# What is refused.


@pytest.mark.parametrize("family", ["sru", "qrnn"])
def test_on_a_cpu_the_framework_runs(family: str) -> None:
    assert explain(family, device="cpu", dtype="float16", hidden=96) == "fused: runs on an NVIDIA GPU\nframework: chosen"
