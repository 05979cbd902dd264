"""The service on a system without the interfaces that only Linux has. tests/planted/sitecustomize.py removes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import models
from tests.planted import plant
from tests.reloading import answered, load
from tests.serving import eventually, serving


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
