"""Checks of the health port, each on a new connection, while other clients keep the service busy."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict

import httpx

from tests.long.overload import Lag

LIMITS_SECONDS = {"/healthz": 0.1, "/readyz": 0.1, "/metrics": 0.3}
PAUSE_SECONDS = 0.05
LAGS = 10
"""How many times the worst lag of this process is added to each limit: each process that handles a check may wait for a core as long."""


class Checks:
    """The seconds that health checks took, by path, and the worst lag of this process meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.lag = 0.0
        self._ended = threading.Event()

    def run(self, address: str) -> None:
        """Send each check on a new connection, as probes do, until `end`."""
        with (
            Lag() as lag,
            httpx.Client(base_url=address, timeout=30, trust_env=False, headers={"Connection": "close"}) as client,
        ):
            while not self._ended.is_set():
                for path in LIMITS_SECONDS:
                    before = time.monotonic()
                    answer = client.get(path)
                    self.seconds[path].append(time.monotonic() - before)
                    assert answer.status_code == 200, answer.text
                time.sleep(PAUSE_SECONDS)
                self.lag = lag.worst

    def end(self) -> None:
        self._ended.set()

    def late(self) -> dict[str, float]:
        """Return the longest check of each path that took too long."""
        allowance = LAGS * self.lag
        return {
            path: max(self.seconds[path])
            for path, limit in LIMITS_SECONDS.items()
            if max(self.seconds[path]) > limit + allowance
        }

    def __str__(self) -> str:
        paths = (
            f"{path} {1000 * statistics.median(seconds):.1f} ms, at most {1000 * max(seconds):.1f} ms of {len(seconds)}"
            for path, seconds in self.seconds.items()
        )
        return "; ".join([*paths, f"the client's worst lag was {1000 * self.lag:.1f} ms"])
