"""The name of a device, as its manufacturer gives it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    with suppress(OSError):  # only Linux has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
