"""200 engines end at named points on the way of a request, under load, and a single engine is replaced soon."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests import planted
from tests.long.overload import LAGS, Lag
from tests.serving import Server, answering, eventually, serving

ENDS, ENGINES, READY = 200, 4, 3
"""How many engines end, how many there are, and how many are ready before the next one ends. A restart waits longer each time."""
STEP = [0.1, 0.2, 0.3]
MARKED = {"model": "sensors", "inputs": [[STEP] * planted.STEPS]}
OTHER = {"model": "sensors", "inputs": [[STEP] * 5]}
START_SECONDS = 600.0
NOTICE_SECONDS = 0.2
STARTS = 1.5
"""How many times as long as the first start of the whole service a new engine may take."""


def engines(server: Server) -> int:
    """Return how many engines are ready."""
    return len(server.client.get("/models").json()["models"][0]["device"].split(", "))


def ends_of_engines(server: Server) -> int:
    return sum(event["child"].startswith("engine") for event in server.events("child ended"))


def test_200_ends_of_engines_fail_no_request(models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a session are answered once and rightly, those that were in the engine and those of the load."""
    file, chance, points = tmp_path / "ends", random.Random(0), Counter[str]()
    file.touch()
    planted.plant("ends", monkeypatch)
    monkeypatch.setenv("ENDS", str(file))
    flags = ("--device", ",".join(["cpu"] * ENGINES))
    with (
        serving(models_folder, tmp_path, *flags) as server,
        httpx.Client(base_url=server.address, timeout=90, trust_env=False) as client,
    ):
        expected = client.post("/infer", json=MARKED).json()["outputs"]
        with answering(server, OTHER, OTHER):
            for number in range(ENDS):
                eventually(lambda: engines(server) >= READY, START_SECONDS)
                point = chance.choice(planted.POINTS)
                file.write_text(f"{point}\n")
                reply = client.post("/infer", json=MARKED)
                assert (reply.status_code, reply.json().get("outputs")) == (200, expected), (number, point, reply.text)
                eventually(lambda number=number: ends_of_engines(server) == number + 1)  # type: ignore[misc]
                points[point] += 1
        assert set(points) == set(planted.POINTS)
        assert server.metric("seqserve_requests_total", outcome="engine_lost") == 0
        eventually(lambda: engines(server) == ENGINES, START_SECONDS)


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
