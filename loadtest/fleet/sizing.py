"""How many replicas a load needs: the formulae of docs/sizing.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadtest.fleet.machines import Machine


@dataclass(frozen=True, slots=True)
class Load:
    """The load and the limits of a service.

    streams: open sessions; rate: sequences or chunks a second; p99_ms: limit of the latency; utilisation: highest share of a replica's
    rate; zones: one of them may fail; max_sessions: SEQSERVE_MAX_SESSIONS; points: of each replica on the proxy's ring.
    """

    streams: int
    rate: float
    p99_ms: float = 50.0
    utilisation: float = 0.7
    zones: int = 3
    max_sessions: int = 4096
    points: int = 160


def imbalance(replicas: int, points: int) -> float:
    """Return an estimate of the sessions of the fullest replica as a multiple of the mean.

    The share of a replica is the sum of `points` gaps on the ring, nearly normal with a standard deviation of 1 / sqrt(points) of its
    mean; sqrt(2 ln n) deviations is about the largest of n such values. Never exact, but within a tenth from 100 points on.
    """
    return 1 + math.sqrt(2 * math.log(replicas) / points) if replicas > 1 else 1.0


def replicas_for(load: Load, machine: Machine) -> dict[str, int]:
    """Return the replicas that the rate, the latency and the sessions need each, and the total with one zone to spare.

    The hash spreads sessions unevenly, and their chunks with them: the fullest replica has to sustain its share. Raises ValueError if the
    machine was not measured with such a low p99.
    """
    needed = {
        "rate": _fullest(load.rate / (load.utilisation * machine.rate), load),
        "p99": _fullest(load.rate / machine.rate_within(load.p99_ms / 1000), load),
        "sessions": _fullest(load.streams / load.max_sessions, load),
    }
    busiest = max(needed.values())
    return {**needed, "total": max(load.zones, math.ceil(busiest * load.zones / (load.zones - 1)))}


def _fullest(replicas: float, load: Load) -> int:
    """Return how many replicas keep the fullest one at the load of `replicas` even replicas. Without streams, all are even."""
    if not load.streams:
        return math.ceil(replicas)
    even = math.ceil(replicas)
    return math.ceil(replicas * imbalance(even, load.points))
