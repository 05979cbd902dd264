"""Weights that are overwritten under a running service are never computed with: not now, and not by an engine that restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.modeling.spec import WEIGHTS
from tests import models
from tests.serving import Server, eventually, serving

BODY = [[0.1, 0.2, 0.3]] * 8


def outputs(server: Server) -> Any:
    """Return the outputs of a request, None while the model is not served. Before a frontend has heard of that, it answers 404."""
    answer = eventually(lambda: (reply := server.infer("sensors", [BODY])).status_code != 404 and reply)
    assert answer.status_code in (200, 503), answer.text
    return answer.json().get("outputs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.words(tmp_path / "models")
    models.sensors(tmp_path / "models")
    return tmp_path / "models"


def poison(folder: Path) -> None:
    """Overwrite the last weights with others, in the file that the service has read."""
    with next((folder / "sensors").rglob(WEIGHTS)).open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def outputs_after_a_restart(folder: Path, scratch: Path) -> Iterator[Any]:
    """Yield the outputs before the weights are overwritten, after it, and after a restart of the engine."""
    with serving(folder, scratch, "--device", "cpu", strict="0") as server:
        yield outputs(server)
        poison(folder)
        yield outputs(server)
        killed = server.pid("engine-0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: server.pid("engine-0") != killed)
        eventually(lambda: server.infer("words", ["how far"]).status_code == 200)
        yield outputs(server)


def test_overwritten_weights_are_not_computed_with(folder: Path, tmp_path: Path) -> None:
    before, after, restarted = outputs_after_a_restart(folder, tmp_path)
    assert before is not None and after == before
    assert restarted is None
