"""The kernels of many layers keep the limits of every kind of GPU, and compile for it within its registers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.persistent.packing import Variant
from kernels.ragged import ContractError
from kernels.scan.shape import LONG_ROW
from tests.kernels.devices import DEVICES, Device, FakeLaunch, emulated
from tests.kernels.nvrtc import assert_fits_registers, required_library
from tests.kernels.usual_layers import HALVES, LAST, SCANS, STEPS, persistent_launches, scan_launch, text_cnn_launches

UNITS, ROWS = (128, 256, 512, 768, 1024), (1, 8, 64, 256)
LENGTHS = ([2], [2] * 9, [LONG_ROW])


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    required_library()


def check_all(launches: list[FakeLaunch]) -> None:
    """Compile each kernel once, however often it was launched. Kernels that no launch uses are left out."""
    assert not [launch for launch in launches if launch.broken_limits()]
    kernels = [launch.kernel for launch in launches]
    different = {(kernel.source, kernel.threads, *sorted(kernel.constants.items())): kernel for kernel in kernels}
    assert different
    for kernel in different.values():
        assert_fits_registers(kernel)


@pytest.mark.parametrize("gru", [False, True], ids=["lstm", "gru"])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_kernels_of_lstm_and_gru(device: Device, gru: bool) -> None:
    found: list[FakeLaunch] = []
    with emulated(device):
        for hidden, rows, directions, steps in product(UNITS, ROWS, (1, 2), (1, 64)):
            try:
                launches = persistent_launches(Variant(0, torch.float16, False, hidden, gru), rows, directions, steps=steps)
            except ContractError:
                assert device.multi_processor_count * 16 < hidden, "one team has no room"
                continue
            found += [launch for _, _, launch in launches]
    check_all(found)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_kernels_of_sru_and_qrnn(device: Device) -> None:
    with emulated(device) as made:
        cases = product(SCANS, (torch.bfloat16, torch.float32), LENGTHS, (STEPS, LAST))
        check_all([scan_launch(made, form, storage, 128, lengths, want) for form, storage, lengths, want in cases])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_kernels_of_text_cnns_over_tables(device: Device) -> None:
    with emulated(device) as made:
        cases = product(HALVES, (64, 512), (1, 64), (0, 6))
        launches = [text_cnn_launches(made, storage, outputs, [9] * rows, labels) for storage, outputs, rows, labels in cases]
        check_all([launch for [launch] in launches])
