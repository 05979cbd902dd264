"""The backends that each kind of GPU gets, and launches within the limits of the device. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels import compile as compiler
from kernels.backend import PINNED
from kernels.conv.tables import TABLES
from kernels.persistent import grid
from kernels.persistent import launch as persistent
from kernels.persistent.grid import GridShape
from kernels.persistent.packing import Variant
from kernels.scan.shape import LONG_ROW, TILE
from tests.kernels.devices import (
    A10,
    A100,
    B200,
    DEVICES,
    H100,
    L4,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    Device,
    FakeKernel,
    emulated,
)
from tests.kernels.families import Form
from tests.kernels.usual_layers import (
    HALVES,
    LAST,
    SCANS,
    STEPS,
    chosen,
    persistent_launches,
    scan_launch,
    text_cnn_launches,
)

UNITS = (128, 256, 300, 384, 512, 640, 768, 1024)
ROWS = (1, 2, 8, 9, 32, 64, 100, 256)
MOST_UNITS = {A100: 1728, A10: 1152, RTX_3090: 1280, L4: 928, RTX_4090: 1280, H100: 2112, B200: 2368, RTX_5090: 1792}
"""Hidden units of the largest LSTM and GRU in 16 bits, as in docs/kernels.md."""


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.param
    return found


@pytest.fixture
def made(device: Device) -> Iterator[list[FakeKernel]]:
    with emulated(device) as kernels:
        yield kernels


def is_hopper(device: Device) -> bool:
    return device.capability == (9, 0)


# LSTM and GRU.


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_recurrent_layers_run_in_a_persistent_kernel(family: str, device: Device) -> None:
    for hidden, storage in product(UNITS, HALVES):
        choice = chosen(family, storage, hidden, requested=PINNED)
        if hidden > MOST_UNITS[device]:
            why = f"persistent: this device has no room for {hidden} hidden units, at most for {MOST_UNITS[device]}"
            assert (choice.backend.name, choice.why[1]) == ("framework", why)
        else:
            assert choice.backend.name == "persistent", choice.why
            assert ("cluster" in choice.why[1]) == (device.capability >= (9, 0) and hidden <= 512)


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_large_layers_adapt_to_the_rows_on_hopper_only(family: str, device: Device) -> None:
    for hidden, storage in product(UNITS, HALVES):
        adapts = is_hopper(device) and hidden > 512
        assert (chosen(family, storage, hidden).backend.name == "adaptive") == adapts


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_largest_layer_is_named_when_a_larger_one_is_refused(family: str, device: Device) -> None:
    most = MOST_UNITS[device]
    assert chosen(family, torch.float16, most, requested=PINNED).backend.name == "persistent"
    refused = chosen(family, torch.float16, most + 1).why[1]
    assert refused.endswith(f"no room for {most + 1} hidden units, at most for {most}")


@pytest.mark.usefixtures("made")
def test_float32_needs_clusters(device: Device) -> None:
    major, minor = device.capability
    for hidden in (128, 384):
        choice = chosen("lstm", torch.float32, hidden)
        assert choice.backend.name == ("persistent" if major >= 9 else "framework")
        needs_clusters = f"persistent: needs compute capability 9.0, this device has {major}.{minor}"
        assert (choice.why[1] == needs_clusters) == (major < 9)


@pytest.mark.parametrize("gru", [False, True], ids=["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_persistent_launches_keep_the_limits(gru: bool, device: Device) -> None:
    for hidden, storage, rows, directions in product(UNITS, HALVES, ROWS, (1, 2)):
        if hidden > MOST_UNITS[device]:
            continue
        launches = persistent_launches(Variant(0, storage, False, hidden, gru), rows, directions)
        done = [0] + [until for _, until, _ in launches]
        assert [first for first, _, _ in launches if first] == [until for until in done[1:] if until < rows]
        for _, _, launch in launches:
            assert not launch.broken_limits(), (hidden, rows, launch)
            constants = launch.kernel.constants
            if launch.kernel.name == "persistent/grid.cu" and not constants["REGISTERS"]:
                pieces = 4 * constants["CHUNKS"] * (1 if constants["ALONE"] else 2)
                assert 4 * constants["HELD"] + pieces <= launch.kernel.max_registers, (hidden, launch)


@pytest.mark.parametrize("gru", [False, True], ids=["projection", "reset before"])
@pytest.mark.usefixtures("made")
def test_launches_with_two_products_a_step_keep_the_limits(gru: bool, device: Device) -> None:
    for hidden, rows, directions in product((64, 300, 512), ROWS, (1, 2)):
        variant = Variant(0, torch.float16, False, hidden, gru, vector=hidden if gru else hidden // 2)
        launches = persistent_launches(variant, rows, directions)
        assert {launch.kernel.name for _, _, launch in launches} == {"persistent/two_products.cu"}
        assert all(launch.kernel.cluster == 1 or device.capability >= (9, 0) for _, _, launch in launches)
        assert not any(launch.broken_limits() for _, _, launch in launches), (hidden, rows, directions)


@pytest.mark.usefixtures("made")
def test_registers_that_warps_lend_exist(device: Device) -> None:
    for hidden, units in product(UNITS, (8, 16, 24, 32)):
        shape = GridShape(Variant(0, torch.float16, False, hidden), units)
        blocks = shape.blocks_per_multiprocessor
        each = compiler.registers(shape.threads * blocks)
        multiply = 32 * shape.parts
        others = grid.OWNERS_REGISTERS if shape.lends else each
        assert shape.lends == (device.capability >= (9, 0) and units > 8)
        assert blocks * (multiply * shape.registers + (shape.threads - multiply) * others) <= 65_536


def test_grid_needs_all_blocks_of_a_team_at_once() -> None:
    """The driver counts the blocks that a multiprocessor runs at once, whatever the launcher expects."""
    with emulated(A100), pytest.MonkeyPatch.context() as patch:
        shape = GridShape(Variant(0, torch.float16, False, 256), 16)
        assert shape.blocks_per_multiprocessor == shape.resident() == 2 and shape.runs()
        patch.setattr(grid, "resident_blocks", lambda *_: 1)
        assert shape.has_room() and not shape.runs()


def test_tuned_shapes_of_another_device_may_give_way_to_fewer_launches() -> None:
    with emulated(L4):
        rows, variant = 256, Variant(0, torch.float16, False, 768)
        measured_first = GridShape(variant, 24)
        shape = persistent.fastest_shape(variant, rows, 1)
        assert shape is not None and shape.max_rows() > measured_first.max_rows()
    with emulated(replace(H100, name="NVIDIA H200")):
        assert persistent.fastest_shape(variant, 4096, 1) == measured_first


# SRU and QRNN.


@pytest.mark.parametrize("form", SCANS, ids=str)
@pytest.mark.parametrize("hidden", [128, 300, 1000])
def test_scans_run_in_one_launch(form: Form, hidden: int, device: Device, made: list[FakeKernel]) -> None:
    for storage, rows in zip(HALVES * 2, (1, 8, 9, 256), strict=True):
        choice = chosen(form.family, storage, hidden)
        assert choice.backend.name == "fused"
        assert choice.why == (
            "fused: chosen (with the product of its inputs)"
            if is_hopper(device)
            else "fused: chosen (after a library product)",
        )
        for want in (STEPS, LAST):
            launch = scan_launch(made, form, storage, hidden, [2] * rows, want)
            in_tiles = rows == 1 and want is LAST and form.options.get("version") != 2
            product_source = "tile_product.cu" if in_tiles else "product.cu"
            assert launch.kernel.source.name == (product_source if is_hopper(device) else "gate_inputs.cu")
            constants = launch.kernel.constants
            assert constants["STAGES"] >= 1
            if launch.kernel.source.name == "gate_inputs.cu":
                # The groups of a team compute runs of different tiles at once, and each tile needs a separate buffer.
                assert constants["GROUPS"] * constants["RUN"] <= constants["STAGES"] * TILE
            assert not launch.broken_limits(), launch


@pytest.mark.parametrize("storage", [torch.float16, torch.float32])
def test_long_row_is_divided_on_hopper_and_newer_devices(storage: torch.dtype, device: Device, made: list[FakeKernel]) -> None:
    launch = scan_launch(made, SCANS[0], storage, 128, [LONG_ROW], LAST)
    if storage == torch.float32 or device.capability < (9, 0):
        assert launch.kernel.source.name == "gate_inputs.cu"
    else:
        assert launch.kernel.source.name == ("tile_product.cu" if is_hopper(device) else "tile_gates.cu")
    assert not launch.broken_limits()


# Convolutions.


@pytest.mark.usefixtures("made")
def test_convolutions_run_where_their_instructions_exist(device: Device) -> None:
    for storage in HALVES:
        product_backend, table_backend = chosen("conv", storage, 96).backend, chosen("conv", storage, 96, (TABLES,)).backend
        assert product_backend.name == ("fused" if is_hopper(device) else "framework")
        assert table_backend.name == ("fused" if is_hopper(device) else "tables")


@pytest.mark.parametrize("labels", [0, 2])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_text_cnn_over_tables_is_one_launch(rows: int, labels: int, device: Device, made: list[FakeKernel]) -> None:
    for storage, outputs in product(HALVES, (64, 100, 512)):
        [launch] = text_cnn_launches(made, storage, outputs, [9] * rows, labels)
        assert launch.kernel.source.name == "folded.cu"
        assert launch.kernel.cluster == 1 or (labels and device.capability >= (9, 0))
        assert not launch.broken_limits(), launch
