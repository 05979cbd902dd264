"""Tests of the settings of a process for its device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from service.engine.execution.device import allow_tf32


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_of_a_gpu_is_what_the_setting_says(allowed: bool) -> None:
    allow_tf32(torch.device("cuda:0"), not allowed)
    allow_tf32(torch.device("cuda:0"), allowed)
    assert (torch.get_float32_matmul_precision() == "high") == allowed
    assert torch.backends.cudnn.allow_tf32 == allowed


def test_cpu_computes_in_true_float32() -> None:
    torch.set_float32_matmul_precision("highest")
    allow_tf32(torch.device("cpu"), True)
    assert torch.get_float32_matmul_precision() == "highest"
