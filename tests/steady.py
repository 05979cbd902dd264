"""Measure whether the memory of a server's processes grows with the load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from tests.serving import Server

WARM_UP = 20_000
"""After this many requests every size has occurred and the large memory pools have their final size."""
LIMIT = 2.0
"""MiB in 100,000 requests, which is 20 bytes per request. The memory pools of a frontend grow in small steps, by 1.8 MiB in all, until
some 160,000 requests, and by nothing from there to 500,000."""
SETTLED_SECONDS = 0.5

Sample = tuple[int, int]
"""Number of requests so far, and resident bytes after them."""


def steady(samples: Sequence[Sample]) -> float:
    """Return the growth in MiB per 100,000 requests after the warm-up: the median slope between two samples.

    Only pairs of samples at most half of the load apart count. A single step of an allocator lies between fewer than half of these
    pairs, so it does not change the median. Repeated steps and a leak do.
    """
    warm = [sample for sample in samples if sample[0] >= WARM_UP]
    assert len(warm) > 2, f"{len(samples)} samples, and {len(warm)} after {WARM_UP} requests: send more"
    apart = (warm[-1][0] - warm[0][0]) / 2
    pairs = [(one, other) for one, other in combinations(warm, 2) if other[0] - one[0] <= apart]
    slope = median((held - held_before) / (sent - sent_before) for (sent_before, held_before), (sent, held) in pairs)
    return slope * 100_000 / 2**20


def growing(slopes: dict[str, float]) -> dict[str, float]:
    """Return the processes whose slope reaches the limit."""
    return {name: slope for name, slope in slopes.items() if slope >= LIMIT}


class Memory:
    """Samples of the memory of each process of a server. No process may end during the measurement."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._processes = processes(server)
        self._samples: dict[str, list[Sample]] = {name: [] for name in self._processes}

    def sample(self, sent: int) -> None:
        """Take a sample after `sent` requests."""
        for name, pid in self._processes.items():
            self._samples[name].append((sent, resident_bytes(pid)))

    def slopes(self) -> dict[str, float]:
        """Return the growth of each process."""
        assert processes(self._server) == self._processes, "a process was replaced"
        return {name: steady(samples) for name, samples in self._samples.items()}


def processes(server: Server) -> dict[str, int]:
    """Return process ids by process name."""
    return {"supervisor": server.process.pid} | {event["child"]: event["pid"] for event in server.events("started")}


def resident_bytes(pid: int | str) -> int:
    """Return the resident bytes of a process, or of "self". They are counted page by page: statm may be wrong by some MiB, and by more on
    more cores."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def settled_open_files(server: Server) -> dict[str, int]:
    """Return `open_files` once it has not changed for a while: connections that were closed are then gone."""
    before = open_files(server)
    while True:
        time.sleep(SETTLED_SECONDS)
        now = open_files(server)
        if now == before:
            return now
        before = now


def open_files(server: Server) -> dict[str, int]:
    """Return the number of open descriptors of each process, sockets included."""
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes(server).items()}
