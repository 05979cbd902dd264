"""The backends that each kind of GPU gets, and launches within the limits of the device. No GPU is needed.

`tests/long/test_device_code.py` has more layers and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels import launching
from kernels.backend import PINNED, Problem
from kernels.conv import launch as conv_launch
from kernels.conv import tables
from kernels.persistent.packing import Variant
from kernels.persistent.resident import ResidentShape
from kernels.scan import launch as scan_launcher
from kernels.scan.shape import LONG_ROW, TILE
from tests.kernels.devices import (
    A10,
    A100,
    B200,
    DEVICES,
    H100,
    H200,
    L4,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    Device,
    FakeKernel,
    emulated,
)
from tests.kernels.families import Form
from tests.kernels.nvrtc import assert_fits_registers, required_library
from tests.kernels.usual_layers import HALVES, LAST, SCANS, STEPS, chosen, persistent_launches, scan_launch, text_cnn_launches

HALF, FLOAT32 = torch.float16, torch.float32
MOST_UNITS = {A100: 1728, A10: 1152, RTX_3090: 1280, L4: 928, RTX_4090: 1280, H100: 2112, B200: 2368, RTX_5090: 1792}
"""Hidden units of the largest LSTM and GRU in 16 bits, as in docs/kernels.md."""
SCAN, CONV, TABLES = scan_launcher.refuses, conv_launch.refused, tables.refused
Refuses = Callable[[Problem], str | None]


@pytest.fixture(params=[A100, L4, H100, B200], ids=str)
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.param
    return found


@pytest.fixture
def made(device: Device) -> Iterator[list[FakeKernel]]:
    with emulated(device) as kernels:
        yield kernels


def is_hopper(device: Device) -> bool:
    return device.capability == (9, 0)


def has_clusters(device: Device) -> bool:
    return device.capability >= (9, 0)


# LSTM and GRU.


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_largest_recurrent_layer_is_named_when_a_larger_one_is_refused(device: Device) -> None:
    most = MOST_UNITS[device]
    with emulated(device):
        assert chosen("lstm", HALF, most, requested=PINNED).backend.name == "persistent"
        refused = chosen("lstm", HALF, most + 1, requested=PINNED)
    why = f"persistent: this device has no room for {most + 1} hidden units, at most for {most}"
    assert (refused.backend.name, refused.why[1]) == ("framework", why)


@pytest.mark.parametrize("family", ["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_recurrent_layers_run_in_the_kernel_of_their_size(family: str, device: Device) -> None:
    """Layers adapt to rows and steps on Hopper. Small layers with the same bits in any batch run in clusters. float32 needs clusters."""
    for hidden, storage in zip((128, 512, 768), (*HALVES, HALF), strict=True):
        pinned = chosen(family, storage, hidden, requested=PINNED)
        assert pinned.backend.name == "persistent"
        assert ("cluster" in pinned.why[1]) == (has_clusters(device) and hidden <= 512)
        assert (chosen(family, storage, hidden).backend.name == "adaptive") == is_hopper(device)
    assert (chosen(family, FLOAT32, 128).backend.name == "adaptive") == is_hopper(device)
    exact, (major, minor) = chosen(family, FLOAT32, 128, requested=PINNED), device.capability
    assert exact.backend.name == ("persistent" if has_clusters(device) else "framework")
    needs_clusters = f"persistent: needs compute capability 9.0, this device has {major}.{minor}"
    assert (exact.why[1] == needs_clusters) != has_clusters(device)


@pytest.mark.parametrize("multiprocessors", [16, 114, 132])
def test_adaptive_backend_runs_every_batch_of_a_layer_that_it_takes(multiprocessors: int) -> None:
    """Beyond the room for weights that stay, one product a step runs any batch."""
    with emulated(replace(H100, multi_processor_count=multiprocessors)):
        for hidden, rows, steps in product((128, 768, 1832, 2120), (1, 32, 600), (1, 50)):
            assert chosen("lstm", HALF, hidden).backend.name == "adaptive"
            assert persistent_launches(Variant(0, HALF, False, hidden), rows, 1, steps=steps)


@pytest.mark.parametrize("gru", [False, True], ids=["lstm", "gru"])
@pytest.mark.usefixtures("made")
def test_persistent_launches_keep_the_limits(gru: bool, device: Device) -> None:
    for (hidden, directions), rows, steps in product(((128, 1), (300, 2), (768, 1), (768, 2)), (1, 9, 256), (1, 64)):
        launches = persistent_launches(Variant(0, HALF, False, hidden, gru), rows, directions, steps=steps)
        few = is_hopper(device) and hidden % 8 == 0 and steps == 1
        assert {launch.kernel.source.name == "step.cu" for _, _, launch in launches} == {few}
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
    for hidden, rows in ((64, 1), (300, 100), (512, 256)):
        variant = Variant(0, HALF, False, hidden, gru, vector=hidden if gru else hidden // 2)
        launches = persistent_launches(variant, rows, 2)
        assert {launch.kernel.name for _, _, launch in launches} == {"persistent/two_products.cu"}
        assert all(launch.kernel.cluster == 1 or has_clusters(device) for _, _, launch in launches)
        assert not any(launch.broken_limits() for _, _, launch in launches), (hidden, rows)


# SRU, QRNN and convolutions.


@pytest.mark.slow
@pytest.mark.parametrize("form", SCANS, ids=str)
def test_scans_run_in_one_launch(form: Form, device: Device, made: list[FakeKernel]) -> None:
    details = "with the product of its inputs" if is_hopper(device) else "after a library product"
    for (storage, hidden, rows), want in product(((HALF, 128, 9), (torch.bfloat16, 300, 256), (HALF, 1000, 1)), (STEPS, LAST)):
        assert chosen(form.family, storage, hidden).why == (f"fused: chosen ({details})",)
        launch = scan_launch(made, form, storage, hidden, [2] * rows, want)
        in_tiles = rows == 1 and want is LAST and form.options.get("version") != 2
        product_source = "tile_product.cu" if in_tiles else "product.cu"
        assert launch.kernel.source.name == (product_source if is_hopper(device) else "gate_inputs.cu")
        constants = launch.kernel.constants
        assert constants["STAGES"] >= 1 and not launch.broken_limits(), launch
        if launch.kernel.source.name == "gate_inputs.cu":
            # The groups of a team compute runs of different tiles at once, and each tile needs a separate buffer.
            assert constants["GROUPS"] * constants["RUN"] <= constants["STAGES"] * TILE


@pytest.mark.parametrize("storage", [HALF, FLOAT32])
def test_long_row_is_divided_on_hopper_and_newer_devices(storage: torch.dtype, device: Device, made: list[FakeKernel]) -> None:
    launch = scan_launch(made, SCANS[0], storage, 128, [LONG_ROW], LAST)
    divided = "tile_product.cu" if is_hopper(device) else "tile_gates.cu"
    in_tiles = storage != FLOAT32 and has_clusters(device)
    assert launch.kernel.source.name == (divided if in_tiles else "gate_inputs.cu") and not launch.broken_limits()


def test_convolutions_run_where_their_instructions_exist(device: Device, made: list[FakeKernel]) -> None:
    for storage in HALVES:
        names = [chosen("conv", storage, 96, variants).backend.name for variants in ((), (tables.TABLES,))]
        assert names == (["fused", "fused"] if is_hopper(device) else ["framework", "tables"])
    for rows, outputs, labels in ((1, 512, 2), (7, 100, 0), (256, 64, 2)):
        [launch] = text_cnn_launches(made, HALF, outputs, [9] * rows, labels)
        assert launch.kernel.source.name == "folded.cu" and not launch.broken_limits(), launch
        assert launch.kernel.cluster == 1 or (labels and has_clusters(device))


@pytest.mark.parametrize(
    "refuses, capability, why",
    [
        (SCAN, (7, 5), "needs compute capability 8.0, this device has 7.5"),
        (SCAN, (8, 9), None),
        (CONV, (8, 9), "needs compute capability 9.0, this device has 8.9"),
        (CONV, (9, 0), None),
        (CONV, (10, 0), "needs compute capability 9.0, this device has 10.0"),
        (TABLES, (7, 5), "needs compute capability 8.0, this device has 7.5"),
        (TABLES, (8, 9), None),
    ],
)
def test_device_needs_a_capability_and_cupy(
    refuses: Refuses, capability: tuple[int, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(torch.device("cuda:0"), HALF, 96, (tables.TABLES,))
    with emulated(replace(A100, capability=capability)):
        assert refuses(problem) == why
        monkeypatch.setattr(launching, "cupy_installed", lambda: False)
        assert refuses(problem) == "CuPy is not installed"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert refuses(problem) == "this machine has no cuda:0"


def test_kernel_compiles_within_the_registers_of_its_launch() -> None:
    """NVRTC compiles as on the GPU; none is needed."""
    required_library()
    with emulated(A100):
        [*_, (_, _, launch)] = persistent_launches(Variant(0, HALF, False, 512), 1, 1)
        assert launch.kernel.source.name == "grid.cu"
        assert_fits_registers(launch.kernel)


@pytest.mark.parametrize("hidden, layers, gru", [(128, 2, False), (256, 3, True)])
def test_resident_kernel_compiles_within_the_registers_of_its_launch(hidden: int, layers: int, gru: bool) -> None:
    required_library()
    with emulated(H200):
        shape = ResidentShape(Variant(0, HALF, False, hidden, gru), layers, hidden, outputs=32)
        assert shape.refusal() is None
        assert_fits_registers(shape.kernel())  # type: ignore[arg-type] # the fake of a compiled kernel
