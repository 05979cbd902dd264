"""Autoscalers, and replicas that start late. A step is one second.

`HorizontalPodAutoscaler` decides as Kubernetes does with Pods metrics, and as KEDA does, which creates one of these: the largest answer
of all metrics counts, replicas that are not ready count as idle, scaling up is immediate, and scaling down takes the highest answer of a
window and removes few replicas at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadtest.fleet.machines import Machine
from loadtest.fleet.queueing import mean_wait

TOLERANCE = 0.1
"""Kubernetes changes nothing while a metric is within a tenth of its target."""
UP_PODS, UP_SHARE, UP_SECONDS = 4, 1.0, 15
"""Kubernetes' default: at most four more replicas, or twice as many, in 15 s."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of an autoscaler. backlog_target: seconds of work; busy_target: share of time, or None without this metric.

    window: seconds over which a metric is the highest value or the mean; down_window: stabilisation of scaling down; down_pods: largest
    decrease in down_seconds; start_seconds: from the decision until a replica is ready.
    """

    name: str
    backlog_target: float | None = 0.2
    busy_target: float | None = None
    least: int = 1
    most: int = 100_000
    period: int = 15
    window: int = 60
    down_window: int = 300
    down_pods: int = 1
    down_seconds: int = 120
    start_seconds: int = 60


@dataclass(slots=True)
class HorizontalPodAutoscaler:
    """Decides every `policy.period` seconds how many replicas there should be."""

    policy: Policy
    _answers: deque[tuple[int, int]] = field(default_factory=deque)
    _removed: deque[tuple[int, int]] = field(default_factory=deque)

    def desired(self, now: int, replicas: int, ready: int, ratios: Sequence[float]) -> int:
        """Return the number of replicas. ratios: of each metric, the mean over ready replicas divided by its target."""
        policy = self.policy
        answer = max(self._answer(replicas, ready, ratio) for ratio in ratios)
        answer = min(max(answer, policy.least), policy.most)
        self._answers.append((now, answer))
        while self._answers[0][0] <= now - policy.down_window:
            self._answers.popleft()
        if answer > replicas:
            return min(answer, replicas + max(UP_PODS, math.ceil(UP_SHARE * replicas)))
        return self._fewer(now, replicas)

    def _answer(self, replicas: int, ready: int, ratio: float) -> int:
        if abs(ratio - 1) <= TOLERANCE:
            return replicas
        wanted = math.ceil(ready * ratio - 1e-9)
        return wanted if (wanted > replicas) == (ratio > 1) or wanted == replicas else replicas

    def _fewer(self, now: int, replicas: int) -> int:
        """Return the highest answer of the window, but not fewer than the policy allows to remove now."""
        policy = self.policy
        while self._removed and self._removed[0][0] <= now - policy.down_seconds:
            self._removed.popleft()
        allowed = max(0, policy.down_pods - sum(count for _, count in self._removed))
        target = max(max(answer for _, answer in self._answers), replicas - allowed)
        if target >= replicas:
            return replicas
        self._removed.append((now, replicas - target))
        return target


@dataclass(frozen=True, slots=True)
class Trace:
    """The figures of each second: offered and refused sequences, replicas that were ready, and the latency of the 99th percentile."""

    offered: NDArray[np.float64]
    refused: NDArray[np.float64]
    ready: NDArray[np.int64]
    p99: NDArray[np.float64]

    @property
    def changes(self) -> int:
        """The sum of all increases and decreases."""
        return int(np.abs(np.diff(self.ready)).sum())


def run(
    machine: Machine, policy: Policy, offered: NDArray[np.float64], started: int, lost: dict[int, float], waiting: int
) -> Trace:
    """Simulate equal replicas as a fluid queue.

    offered: sequences a second in each second; started: replicas at the beginning; lost: shares of the ready replicas that fail, by
    second; waiting: most sequences that a replica queues (SEQSERVE_MAX_WAITING); further sequences are refused.
    """
    autoscaler, signals = HorizontalPodAutoscaler(policy), _Signals(policy)
    server, limit = machine.server, waiting / machine.rate
    replicas, ready, backlog = started, started, 0.0
    starting: deque[tuple[int, int]] = deque()
    trace = Trace(offered, np.zeros_like(offered), np.zeros(len(offered), np.int64), np.zeros_like(offered))
    for now, rate in enumerate(offered):
        while starting and starting[0][0] <= now:
            ready += starting.popleft()[1]
        failed = min(ready - 1, round(lost.get(now, 0.0) * ready))
        if failed:
            ready -= failed
            starting.append((now + policy.start_seconds, failed))
        load = rate / (ready * machine.rate)
        work = max(0.0, backlog + load - 1)
        backlog = min(work, limit)
        trace.refused[now] = (work - backlog) * ready * machine.rate
        trace.ready[now] = ready
        trace.p99[now] = backlog + min(server.latency(rate / ready, 0.99), limit + 2 * machine.alone)
        signals.add(min(limit, backlog + mean_wait(load, 1 / machine.rate)), min(1.0, load))
        if now % policy.period == policy.period - 1:
            wanted = autoscaler.desired(now, replicas, ready, signals.ratios())
            if wanted > replicas:
                starting.append((now + policy.start_seconds, wanted - replicas))
            else:
                ready = max(1, ready - (replicas - wanted))
            replicas = wanted
    return trace


class _Signals:
    """The metrics of a replica over the last `policy.window` seconds."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._backlogs: deque[float] = deque(maxlen=policy.window)
        self._busy: deque[float] = deque(maxlen=policy.window)

    def add(self, backlog: float, busy: float) -> None:
        self._backlogs.append(backlog)
        self._busy.append(busy)

    def ratios(self) -> list[float]:
        """Return the highest backlog and the mean share of busy time, each divided by its target."""
        policy, ratios = self._policy, []
        if policy.backlog_target is not None:
            ratios.append(max(self._backlogs) / policy.backlog_target)
        if policy.busy_target is not None:
            ratios.append(sum(self._busy) / len(self._busy) / policy.busy_target)
        return ratios
