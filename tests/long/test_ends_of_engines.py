"""The only engine of a service ends under load, and is replaced soon."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.long.overload import LAGS, Lag
from tests.serving import answering, eventually, serving

STEP = [0.1, 0.2, 0.3]
OTHER = {"model": "sensors", "inputs": [[STEP] * 5]}
NOTICE_SECONDS = 0.2
STARTS = 1.5
"""How many times as long as the first start of the whole service a new engine may take."""


def test_only_engine_is_replaced_soon(models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/readyz tells it soon. The new engine takes no longer than the first start of the service, and all requests are answered."""
    with serving(models_folder, tmp_path, "--health-port", "0") as server, Lag() as lag:
        with answering(server, OTHER), httpx.Client(base_url=server.health, trust_env=False) as health:
            began = time.monotonic()
            os.kill(server.pid("engine-0"), signal.SIGKILL)
            eventually(lambda: health.get("/readyz").status_code == 503)
            noticed = time.monotonic() - began
            eventually(lambda: health.get("/readyz").status_code == 200)
            ready = time.monotonic() - began
        with capsys.disabled():
            figures = {"not ready after": noticed, "ready after": ready, "first start": server.start_seconds, "lag": lag.worst}
            print("\n" + json.dumps({name: round(seconds, 3) for name, seconds in figures.items()}), end="")
        assert noticed < NOTICE_SECONDS + LAGS * lag.worst
        assert ready < STARTS * server.start_seconds + LAGS * lag.worst
