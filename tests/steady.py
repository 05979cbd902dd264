"""Whether a server's memory grows with the load: what each of its processes holds, and how fast that rises."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from tests.serving import Server

WARM_UP = 20_000
"""Requests by which every size was met and every pool of memory is as large as it will be."""
LIMIT = 1.0
"""MiB in 100,000 requests, so 10 bytes a request."""

Sample = tuple[int, int]
"""Requests so far, and bytes held after them."""


def steady(samples: Sequence[Sample]) -> float:
    """MiB by which memory rises in 100,000 requests, once it is warm: the median slope between two samples.

    Only pairs at most half of the load apart count. One step, as an allocator takes it now and then, is between fewer than half of these
    wherever it comes, and so leaves the median alone; steps that repeat do not, nor does what each request leaves behind.
    """
    warm = [sample for sample in samples if sample[0] >= WARM_UP]
    assert len(warm) > 2, f"{len(samples)} samples, and {len(warm)} after {WARM_UP} requests: send more"
    apart = (warm[-1][0] - warm[0][0]) / 2
    pairs = [(one, other) for one, other in combinations(warm, 2) if other[0] - one[0] <= apart]
    slope = median((held - held_before) / (sent - sent_before) for (sent_before, held_before), (sent, held) in pairs)
    return slope * 100_000 / 2**20


def growing(slopes: dict[str, float]) -> dict[str, float]:
    """Those that reach the limit."""
    return {name: slope for name, slope in slopes.items() if slope >= LIMIT}


class Memory:
    """What every process of a server holds. None of them may end meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._processes = processes(server)
        self._samples: dict[str, list[Sample]] = {name: [] for name in self._processes}

    def sample(self, sent: int) -> None:
        """Now, after so many requests."""
        for name, pid in self._processes.items():
            self._samples[name].append((sent, resident_bytes(pid)))

    def slopes(self) -> dict[str, float]:
        """As `steady` has them, by process."""
        assert processes(self._server) == self._processes, "a process was replaced"
        return {name: steady(samples) for name, samples in self._samples.items()}


def processes(server: Server) -> dict[str, int]:
    """Process ids by place in the house."""
    return {"supervisor": server.process.pid} | {event["child"]: event["pid"] for event in server.events("started")}


def resident_bytes(pid: int) -> int:
    """Counted page by page: the sum in statm may be off by some MiB, and by more where there are more cores."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def open_files(server: Server) -> dict[str, int]:
    """How many descriptors each process has, those of sockets included."""
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes(server).items()}
