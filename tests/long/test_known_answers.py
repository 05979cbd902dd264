"""The supervisor replaces an engine when a model starts to compute wrong numbers. The log has the reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from service.engine.known_answers import CHECK_SECONDS
from tests import models, planted
from tests.reloading import answered
from tests.serving import eventually, serving

START_SECONDS = 120.0
"""Longest start of an engine."""


def test_engine_that_computes_other_numbers_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.words(tmp_path / "models")
    damaged = tmp_path / "damaged"
    monkeypatch.setenv("DAMAGED", str(damaged))
    planted.plant("damaged", monkeypatch)
    with serving(tmp_path / "models", tmp_path, "--device", "cpu") as server:
        before, right = server.pid("engine-0"), answered(server)[1]
        assert server.metric("seqserve_batch_sequences_count") == 1, "known answers are not counted"
        time.sleep(1.5 * CHECK_SECONDS)  # until the engine has noted its first answer
        damaged.touch()
        assert answered(server)[1] != right
        eventually(lambda: server.events("device lost"), 3 * CHECK_SECONDS)
        damaged.unlink()
        eventually(lambda: server.pid("engine-0") != before and server.ready(), START_SECONDS)
        assert answered(server)[1] == right
        [lost] = server.events("device lost")
        assert "words version 1 gives another answer" in lost["error"]
        assert server.metric("seqserve_process_restarts_total", reason="device_lost") == 1
