"""The only engine of a service ends under load, and is replaced soon."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.long.overload import LAGS, Lag
from tests.serving import answering, eventually, serving, worked_seconds

STEP = [0.1, 0.2, 0.3]
OTHER = {"model": "sensors", "inputs": [[STEP] * 5]}
NOTICE_SECONDS = 0.2
STARTS = 1.5
"""How many times as long as the first start of the whole service a new engine may take."""
IMPORTS = 2.5
"""How many times the processor time of an import of torch an engine with small models may take until it is ready. It takes 1.7 times."""


def test_only_engine_is_replaced_soon(models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/readyz shows the end soon. The new engine takes no longer than the first start of the service, and all requests are answered.

    Its processor time is little more than an import of torch takes. On a quiet machine this is its time until it is ready again.
    """
    imported = import_seconds()
    with serving(models_folder, tmp_path, "--health-port", "0") as server, Lag() as lag:
        with answering(server, OTHER), httpx.Client(base_url=server.health, trust_env=False) as health:
            began = time.monotonic()
            os.kill(server.pid("engine-0"), signal.SIGKILL)
            eventually(lambda: health.get("/readyz").status_code == 503)
            noticed = time.monotonic() - began
            eventually(lambda: health.get("/readyz").status_code == 200)
            ready = time.monotonic() - began
            worked = worked_seconds(server.pid("engine-0"))
        with capsys.disabled():
            figures = {"not ready after": noticed, "ready after": ready, "first start": server.start_seconds, "lag": lag.worst}
            figures |= {"processor time": worked, "of an import of torch": imported}
            print("\n" + json.dumps({name: round(seconds, 3) for name, seconds in figures.items()}), end="")
        assert noticed < NOTICE_SECONDS + LAGS * lag.worst
        assert ready < STARTS * server.start_seconds + LAGS * lag.worst
        assert worked < IMPORTS * imported


def import_seconds() -> float:
    """Return the processor time of a process that imports torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
