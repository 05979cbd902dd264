"""Faults for servers under test. sitecustomize.py lists them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.planted.sitecustomize import AT_ONCE, DEADLY_MODEL, FRONTEND_POINTS, HARMED_MODEL, PLANTS, POINTS, STEPS
from tests.serving import rewrite

__all__ = ["DEADLY_MODEL", "FRONTEND_POINTS", "HARMED_MODEL", "PLANTED_PATH", "POINTS", "STEPS", "Gate", "constants", "plant"]

PLANTED_PATH = str(Path(__file__).parent)
"""The folder for PYTHONPATH with which a process runs sitecustomize.py at its start."""


def plant(faults: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant faults into the processes that the test starts from now on. faults: their names, with commas between them."""
    for fault in filter(None, faults.split(",")):
        assert fault in PLANTS or fault in AT_ONCE, f"there is no fault {fault!r}"
    monkeypatch.setenv("PLANTED", faults)
    monkeypatch.setenv("PYTHONPATH", PLANTED_PATH, prepend=os.pathsep)


@contextmanager
def constants(values: Mapping[str, float]) -> Iterator[None]:
    """Give other values to constants of modules, in the processes of the servers that start within this context.

    values: by module and name, such as service.frontend.connection_guard.SEND_SECONDS.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_CONSTANTS", json.dumps(values))
        patch.setenv("PYTHONPATH", PLANTED_PATH, prepend=os.pathsep)
        yield


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
