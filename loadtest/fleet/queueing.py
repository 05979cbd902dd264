"""Waiting times from measured service figures, in closed form and by recursion.

A replica is a batch server: while a batch runs, arrivals wait, and the next batch takes all of them. A batch takes a fixed time and a
time for each sequence. `BatchServer` has the mean batch in closed form. An arrival meets a batch at a random moment, waits for its
end, and then runs in the next batch: between one and two batches in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchServer:
    """fixed: seconds of a batch without sequences; each: seconds for each sequence; most: sequences in a batch."""

    fixed: float
    each: float
    most: int = 1 << 30

    @classmethod
    def of(cls, alone_seconds: float, rate: float) -> BatchServer:
        """Return the server that takes `alone_seconds` for a sequence alone and sustains at most `rate` a second."""
        return cls(alone_seconds - 1 / rate, 1 / rate)

    @property
    def capacity(self) -> float:
        """Sequences a second that it sustains."""
        return 1 / (self.each + self.fixed / self.most)

    def batch_seconds(self, rate: float) -> float:
        """Return the mean duration of a batch at this arrival rate, infinite from the capacity on."""
        return self.fixed / (1 - rate * self.each) if rate < self.capacity else math.inf

    def latency(self, rate: float, share: float) -> float:
        """Return the latency that this share of the sequences does not exceed."""
        return (1 + share) * max(self.batch_seconds(rate), self.fixed + self.each)


def mean_wait(load: float, seconds: float) -> float:
    """Return the mean waiting time with one server and constant service times (M/D/1), infinite from a load of 1 on.

    With Poisson arrivals it is also the mean work that a replica has at a random moment, its backlog.
    """
    return load * seconds / (2 * (1 - load)) if load < 1 else math.inf


def probability_of_waiting(load: float, servers: int) -> float:
    """Return Erlang's C: the share of arrivals that find all servers busy (M/M/c). load: busy servers on average."""
    blocked = 1.0
    for busy in range(1, servers + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked)) if load < servers else 1.0


def waits(between: Seconds, service: Seconds) -> Seconds:
    """Return the waiting times of arrivals at one server, in order (Lindley's recursion).

    between: (arrivals,) seconds since the previous arrival; service: (arrivals,) seconds of each.
    """
    steps = np.concatenate([[0.0], np.cumsum(service[:-1] - between[1:])])
    waiting: Seconds = steps - np.minimum.accumulate(steps)
    return waiting
