"""Faults for servers under test. sitecustomize.py lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.planted.sitecustomize import (
    BUSY_SECONDS,
    DEADLY_MODEL,
    DEVICE_SECONDS,
    FRONTEND_POINTS,
    LEAKED_BYTES,
    POINTS,
    STALL,
    STALLED,
    STEP_SECONDS,
    STEPS,
)

__all__ = [
    "BUSY_SECONDS",
    "DEADLY_MODEL",
    "DEVICE_SECONDS",
    "FRONTEND_POINTS",
    "LEAKED_BYTES",
    "PLANTED_PATH",
    "POINTS",
    "STALL",
    "STALLED",
    "STEPS",
    "STEP_SECONDS",
    "plant",
]

PLANTED_PATH = str(Path(__file__).parent)
"""What PYTHONPATH names, so that a process runs sitecustomize.py at its start."""


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault into the processes that the test starts from now on."""
    monkeypatch.setenv("PLANTED", fault)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PLANTED_PATH, os.environ.get("PYTHONPATH")])))
