"""Faults for servers under test: see sitecustomize.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.planted.sitecustomize import LEAKED_BYTES, STEPS

__all__ = ["LEAKED_BYTES", "STEPS", "plant"]


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started from now on suffer it."""
    monkeypatch.setenv("PLANTED", fault)
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
