"""Which devices the fused kernels refuse, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import launching
from kernels.backend import Problem
from kernels.conv import launch as conv_launch
from kernels.conv import tables
from kernels.scan import launch as scan_launch

SCAN, CONV, TABLES = scan_launch.refuses, conv_launch.refused, tables.refused


@pytest.mark.parametrize("refuses", [SCAN, CONV, TABLES], ids=["scan", "conv", "tables"])
@pytest.mark.parametrize(
    "devices, installed, why",
    [(1, True, None), (0, True, "this machine has no cuda:0"), (1, False, "CuPy is not installed")],
)
def test_device_is_accepted_or_refused_with_a_reason(
    refuses: Callable[[Problem], str | None], devices: int, installed: bool, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launching, "cupy_installed", lambda: installed)
    assert refuses(Problem(torch.device("cuda:0"), torch.float16, 96, (tables.TABLES,))) == why


@pytest.mark.parametrize(
    "refuses, capability, why",
    [
        (SCAN, (7, 5), "needs compute capability 8.0, this device has 7.5"),
        (SCAN, (8, 9), None),
        (SCAN, (10, 0), None),
        (CONV, (8, 9), "needs compute capability 9.0, this device has 8.9"),
        (CONV, (10, 0), "needs compute capability 9.0, this device has 10.0"),
        (TABLES, (7, 5), "needs compute capability 8.0, this device has 7.5"),
        (TABLES, (8, 9), None),
        (TABLES, (10, 0), None),
    ],
)
def test_device_has_a_suitable_capability(
    refuses: Callable[[Problem], str | None], capability: tuple[int, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(launching, "cupy_installed", lambda: True)
    assert refuses(Problem(torch.device("cuda:0"), torch.float16, 96, (tables.TABLES,))) == why


def test_backend_for_tables_refuses_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(launching, "cupy_installed", lambda: True)
    assert TABLES(Problem(torch.device("cuda:0"), torch.float16, 96)) == "runs only folded tables"
