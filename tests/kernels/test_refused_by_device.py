"""Which GPUs the fused kernels run on."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels import launching
from kernels.backend import Problem
from kernels.conv import launch as conv_launch
from kernels.scan import launch as scan_launch


@pytest.mark.parametrize("launch", [scan_launch, conv_launch], ids=["scan", "conv"])
@pytest.mark.parametrize(
    "devices, installed, capability, why",
    [
        (1, True, (9, 0), None),
        (0, True, (9, 0), "there is no cuda:0 here"),
        (1, False, (9, 0), "CuPy is not installed"),
        (1, True, (8, 9), "needs compute capability 9.0, this device has 8.9"),
        (1, True, (10, 0), "needs compute capability 9.0, this device has 10.0"),
    ],
)
def test_a_gpu_is_taken_or_it_is_said_why_not(
    launch: ModuleType,
    devices: int,
    installed: bool,
    capability: tuple[int, int],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(launching, "installed", lambda: installed)
    assert launch.refused(Problem(torch.device("cuda:0"), torch.float16, 96)) == why
