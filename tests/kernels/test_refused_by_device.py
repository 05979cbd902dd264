"""Which devices the fused kernels refuse, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import launching
from kernels.backend import Problem
from kernels.conv import launch as conv_launch
from kernels.scan import launch as scan_launch


@pytest.mark.parametrize("refuses", [scan_launch.refuses, conv_launch.refused], ids=["scan", "conv"])
@pytest.mark.parametrize(
    "devices, installed, capability, why",
    [
        (1, True, (9, 0), None),
        (0, True, (9, 0), "this machine has no cuda:0"),
        (1, False, (9, 0), "CuPy is not installed"),
        (1, True, (8, 9), "needs compute capability 9.0, this device has 8.9"),
        (1, True, (10, 0), "needs compute capability 9.0, this device has 10.0"),
    ],
)
def test_device_is_accepted_or_refused_with_a_reason(
    refuses: Callable[[Problem], str | None],
    devices: int,
    installed: bool,
    capability: tuple[int, int],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(launching, "cupy_installed", lambda: installed)
    assert refuses(Problem(torch.device("cuda:0"), torch.float16, 96)) == why
