"""The kernels that each kind of GPU runs compile for it, within its registers. NVRTC compiles them as on the GPU; none is needed.

`tests/long/test_device_code.py` compiles the kernels of more layers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.compile import CompileError
from kernels.persistent.packing import Variant
from kernels.scan.shape import LONG_ROW
from tests.kernels.devices import A10, A100, B200, H100, L4, RTX_3090, RTX_4090, Device, emulated
from tests.kernels.nvrtc import assemble, assert_fits_registers, required_library
from tests.kernels.usual_layers import LAST, SCANS, STEPS, persistent_launches, scan_launch, text_cnn_launches

HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
SRU_1, SRU_2, SRU_COLUMNS, _, QRNN_2 = SCANS


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    required_library()


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, storage, hidden, gru, rows, source",
    [
        (A100, HALF, 512, False, 1, "grid.cu"),
        (A100, BFLOAT16, 768, True, 256, "grid.cu"),
        (RTX_3090, HALF, 1024, False, 256, "grid.cu"),
        (L4, BFLOAT16, 512, False, 256, "grid.cu"),
        (H100, HALF, 1024, False, 256, "wide.cu"),
        (H100, BFLOAT16, 2048, True, 256, "wide.cu"),
        (B200, HALF, 512, True, 1, "cluster.cu"),
        (B200, HALF, 1024, False, 256, "grid.cu"),
    ],
    ids=str,
)
def test_kernels_of_lstm_and_gru(device: Device, storage: torch.dtype, hidden: int, gru: bool, rows: int, source: str) -> None:
    with emulated(device):
        [*_, (_, _, launch)] = persistent_launches(Variant(0, storage, False, hidden, gru), rows, 1)
        assert launch.kernel.source.name == source
        assert_fits_registers(launch.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("device", [A100, L4, B200], ids=str)
def test_kernels_of_sru_and_qrnn(device: Device) -> None:
    with emulated(device) as made:
        assert_fits_registers(scan_launch(made, SRU_COLUMNS, HALF, 128, [2] * 9, STEPS).kernel)
        assert_fits_registers(scan_launch(made, SRU_2, BFLOAT16, 128, [LONG_ROW], LAST).kernel)
        assert_fits_registers(scan_launch(made, QRNN_2, FLOAT32, 128, [2] * 9, LAST).kernel)
        assert_fits_registers(scan_launch(made, SRU_1, HALF, 128, [LONG_ROW], LAST).kernel)


@pytest.mark.slow
@pytest.mark.parametrize("device", [A10, RTX_4090, B200], ids=str)
def test_kernels_of_text_cnns_over_tables(device: Device) -> None:
    with emulated(device) as made:
        [launch] = text_cnn_launches(made, HALF, 64, [9], labels=2)
        assert launch.kernel.cluster > 1 or device.capability < (9, 0)
        assert_fits_registers(launch.kernel)


@pytest.mark.slow
def test_kernels_compile_for_devices_that_nvrtc_does_not_know() -> None:
    """Their code is for a virtual architecture, without features of one architecture, such as warps that lend registers."""
    future = replace(B200, name="NVIDIA Z900", capability=(13, 0))
    with emulated(future) as made:
        launches = [persistent_launches(Variant(0, HALF, False, hidden), 256, 1)[0].launch for hidden in (256, 1024)]
        launches.append(scan_launch(made, SRU_1, HALF, 128, [LONG_ROW], LAST))
        for launch in launches:
            assert not launch.broken_limits() and not launch.kernel.constants.get("REGISTERS")
            assert assemble(launch.kernel, "sm_120").registers <= launch.kernel.max_registers


def test_report_counts_registers_that_are_missing() -> None:
    with emulated(L4) as made:
        kernel = scan_launch(made, SRU_COLUMNS, HALF, 128, [2] * 9, STEPS).kernel
    crowded = replace(kernel, threads=1024)
    assert crowded.max_registers == assemble(crowded).registers == 64
    with pytest.raises(AssertionError, match="spilled_bytes"):
        assert_fits_registers(crowded)


def test_instructions_that_a_device_lacks_do_not_compile() -> None:
    with emulated(B200):
        lends = persistent_launches(Variant(0, HALF, False, 1024), 256, 1)[0].launch.kernel
        assert lends.constants["REGISTERS"]
    for architecture in ("sm_89", "sm_120"):
        with pytest.raises(CompileError, match="setmaxnreg"):
            assemble(lends, architecture)


def test_product_does_not_compile_without_wgmma() -> None:
    hopper = replace(B200, name="NVIDIA H200", capability=(9, 0))
    with emulated(hopper) as made:
        kernel = scan_launch(made, SRU_1, HALF, 128, [2] * 9, LAST).kernel
    assert kernel.source.name == "product.cu"
    with pytest.raises(CompileError, match="wgmma"):
        assemble(kernel, "sm_100a")
