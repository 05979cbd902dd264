"""A stopped frontend is noticed after its long patience. `make test-all` runs this folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx

from tests.reloading import answered
from tests.serving import alive, eventually, serving

PATIENT_SECONDS = 60
"""Deadline of steps that take a moment: the machine may be busy."""


def test_stopped_frontend_is_noticed_and_replaced(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--frontends", "2") as server:
        stopped = server.pid("frontend-1")
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: not alive(stopped), PATIENT_SECONDS)
        eventually(lambda: server.pid("frontend-1") != stopped, PATIENT_SECONDS)
        eventually(
            lambda: httpx.get(f"{server.address}/metrics", trust_env=False, timeout=PATIENT_SECONDS).status_code == 200,
            PATIENT_SECONDS,
        )
        eventually(lambda: server.metric("seqserve_process_restarts_total", process="frontend", reason="hung") == 1, 60)
        assert answered(server)[0] == "2"
