"""The launchers of the SRU and the QRNN on an emulated H200: packed weights, launch shapes, grids and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.ragged import ContractError, Outputs, Ragged
from kernels.scan import launch
from kernels.scan.forms import ScanForm
from kernels.scan.layer import GateSource, ScanVariant
from kernels.scan.shape import FEW_ROWS, HERE, LONG_ROW, PART, ScanShape, TileShape, shape_for
from kernels.sru import fused as fused_sru
from kernels.sru.types import SRUState
from tests.kernels.devices import H200, FakeKernel, FakeLaunch, assert_passed, emulated, launches_of
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, Arguments
from tests.kernels.sources import members, undefined_names

SHARED_BYTES = H200.shared_memory_per_block_optin
SRU_1, SRU_2, QRNN = ScanForm(4, sru=True, skip=1), ScanForm(4, sru=True, own_cell=True, skip=1), ScanForm(3)


PRODUCT, GATE_INPUTS = GateSource(product=True, window=1), GateSource(product=False, window=1)
LENGTHS, HALF = [3, 0, 4], torch.float16
LAST = Outputs(last=True)
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


@pytest.mark.parametrize(
    "form, gates, hidden, changes, rows, tokens, expected",
    [
        # A short row has few units in a block.
        (QRNN, PRODUCT, 256, {}, 1, 32, TileShape(8, 1)),
        (QRNN, PRODUCT, 1024, {}, 1, 32, TileShape(16, 1)),
        (QRNN, PRODUCT, 1024, {"directions": 2}, 1, 32, TileShape(32, 1)),
        # A long row is divided between blocks or streams, if only its last step leaves the kernel and its cell is linear.
        (QRNN, PRODUCT, 512, {}, 1, 1024, TileShape(16, 2, split=True)),
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
        # Outputs of every step use small blocks.
        (QRNN, PRODUCT, 512, {}, 256, 10_000, ScanShape(64)),
        (QRNN, PRODUCT, 512, {"all_steps": True}, 256, 10_000, ScanShape(32)),
    ],
)
def test_shape_follows_the_layer_and_its_rows(
    form: ScanForm, gates: GateSource, hidden: int, changes: dict[str, Any], rows: int, tokens: int, expected: Any
) -> None:
    assert shape_for(layer(form, gates, hidden, **{"all_steps": False, **changes}), rows, tokens) == expected


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


def only(made: list[FakeKernel]) -> tuple[FakeLaunch, dict[str, int]]:
    """Return the only launch, and the members of its Call by name."""
    [launched] = launches_of(made)
    return launched, call_of(launched)


def call_of(launched: FakeLaunch) -> dict[str, int]:
    return dict(zip(CALL, launched.members, strict=True))


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


def test_state_is_read_from_sources_and_written_to_slots(made: list[FakeKernel]) -> None:
    x, weights, _ = half_arguments(SKIPLESS)
    slots, sources = torch.tensor([8, 1, 2], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    caches = SRUState(torch.zeros(9, 40), slots, sources)
    after = fused_sru.sru(x, weights, caches, want=LAST).state
    passed = {"after forward": caches.cell, "before forward": caches.cell}
    assert_passed(only(made)[1], passed | {"slots_after forward": slots, "slots_before forward": sources})
    assert after.cell is caches.cell and after.slots is slots and after.sources is None
    for cell in (caches.cell.half(), torch.zeros(40, 9).T):
        with pytest.raises(ContractError, match=r"state.cell with slots must be contiguous float32"):
            fused_sru.sru(x, weights, replace(caches, cell=cell), want=Outputs())
