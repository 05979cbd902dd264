"""Faults for servers under test. sitecustomize.py lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.planted.sitecustomize import (
    AT_ONCE,
    BUSY_SECONDS,
    DEADLY_MODEL,
    DEVICE_SECONDS,
    FRONTEND_POINTS,
    HARMED_MODEL,
    LEAKED_BYTES,
    PLANTS,
    POINTS,
    STALL,
    STALLED,
    STEP_SECONDS,
    STEPS,
)
from tests.serving import rewrite

__all__ = [
    "BUSY_SECONDS",
    "DEADLY_MODEL",
    "DEVICE_SECONDS",
    "FRONTEND_POINTS",
    "HARMED_MODEL",
    "LEAKED_BYTES",
    "PLANTED_PATH",
    "POINTS",
    "STALL",
    "STALLED",
    "STEPS",
    "STEP_SECONDS",
    "Gate",
    "plant",
]

PLANTED_PATH = str(Path(__file__).parent)
"""The folder for PYTHONPATH with which a process runs sitecustomize.py at its start."""


def plant(faults: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant faults into the processes that the test starts from now on. faults: their names, with commas between them."""
    for fault in filter(None, faults.split(",")):
        assert fault in PLANTS or fault in AT_ONCE, f"there is no fault {fault!r}"
    monkeypatch.setenv("PLANTED", faults)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PLANTED_PATH, os.environ.get("PYTHONPATH")])))


class Gate:
    """The file GATE of a gated device. At first it lets every batch end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changes = 0
        self.open()

    def open(self) -> None:
        rewrite(self._file, "open")

    def let(self, batches: int) -> None:
        """Let this many more batches end."""
        self._changes += 1
        rewrite(self._file, f"{self._changes} {batches}")
