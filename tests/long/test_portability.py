"""The service on a system without the interfaces that only Linux has. tests/planted/sitecustomize.py removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models
from tests.planted import PLANTED_PATH, plant
from tests.planted.sitecustomize import LINUX_ONLY
from tests.reloading import answered, load
from tests.serving import eventually, serving

WITHOUT = """
import ctypes, os, pathlib
assert not [name for name in {names} if hasattr(os, name)]
assert ctypes.CDLL(None).prctl(1, 9) == -1
for read in (open, os.listdir, lambda path: pathlib.Path(path).read_text()):
    try:
        read("/proc/self/stat")
    except OSError:
        continue
    raise AssertionError(read)
"""


def test_plant_removes_what_only_linux_has(monkeypatch: pytest.MonkeyPatch) -> None:
    plant("portable", monkeypatch)
    subprocess.run([sys.executable, "-c", WITHOUT.format(names=LINUX_ONLY)], check=True, timeout=60)


def test_service_runs_without_what_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, loads a new version of a model, and restarts an engine that died."""
    root = tmp_path / "models"
    models.words(root)
    plant("portable", monkeypatch)
    with serving(root, tmp_path, "--device", "cpu") as server:
        answered(server)
        models.words(root, version=2, seed=2)
        load(server, "words")
        assert answered(server)[0] == "2"
        killed = server.pid("engine-0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: server.pid("engine-0") != killed and server.ready())
        assert answered(server)[0] == "2"


def test_monotonic_clock_of_child_processes_is_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTONIC_SHIFT", "-1e6")
    monkeypatch.setenv("PYTHONPATH", PLANTED_PATH)
    code = "import time; print(time.monotonic() < 0, time.monotonic_ns() < 0)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed == "True True\n"
