"""The setting of a process for TF32."""

from __future__ import annotations

import pytest
import torch

from service.engine.execution.device import allow_tf32


@pytest.mark.parametrize(
    ("device", "allowed", "precision"), [("cuda:0", False, "highest"), ("cuda:0", True, "high"), ("cpu", True, None)]
)
def test_tf32_of_a_gpu_is_what_the_setting_says(
    device: str, allowed: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes in true float32."""
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not allowed)
    allow_tf32(torch.device(device), allowed)
    assert precisions == ([] if precision is None else [precision])
    assert torch.backends.cudnn.allow_tf32 == (allowed == (device != "cpu"))
