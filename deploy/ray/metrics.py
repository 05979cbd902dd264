"""Reads the two figures that scale the service, and its peers, from the text of its /metrics. Knows no Ray."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from deploy.ray.scaling import BACKLOG, BUSY

BACKLOG_LINE = re.compile(r"^seqserve_backlog_seconds\{[^}]*\} (\S+)$", re.MULTILINE)
BUSY_LINE = re.compile(r"^seqserve_device_busy_seconds_total\{[^}]*\} (\S+)$", re.MULTILINE)
PEERS_LINE = re.compile(r'^seqserve_peers\{state="reachable"\} (\S+)$', re.MULTILINE)


def reachable_peers(metrics: str) -> int:
    """Return how many other replicas the server is connected to."""
    return sum(int(float(value)) for value in PEERS_LINE.findall(metrics))


@dataclass(slots=True)
class Figures:
    """The figures of one replica. The busy share is that since the previous reading."""

    _busy_seconds: float = 0.0
    _read_at: float = field(default_factory=time.monotonic)

    def read(self, metrics: str, now: float) -> dict[str, float]:
        """Return the backlog of the engine with the longest, and the mean share of time in which the devices were busy."""
        backlogs = [float(value) for value in BACKLOG_LINE.findall(metrics)]
        busy = [float(value) for value in BUSY_LINE.findall(metrics)]
        seconds = (now - self._read_at) * max(1, len(busy))
        share = (sum(busy) - self._busy_seconds) / seconds if seconds > 0 else 0.0
        self._busy_seconds, self._read_at = sum(busy), now
        # A restarted engine counts from 0.
        return {BACKLOG: max(backlogs, default=0.0), BUSY: min(1.0, max(0.0, share))}
