"""How well a service answers its usual clients while other clients misbehave.

Quiet and disturbed phases take turns within one run, and each figure of latency is a ratio of the two. The device is planted: a batch takes
a fixed time and no processor time, so that the clients, which share the cores with the server, take little from its capacity.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import pytest
from msgspec import structs

from loadtest.generator.job import Job, Result, nearest_rank
from loadtest.generator.process import run_in_process
from loadtest.target import JSON, Target
from tests import models, planted
from tests.long.overload import Lag
from tests.planted import DEVICE_SECONDS
from tests.serving import Server, serving
from tests.steady import processes

ROWS_AT_ONCE = 4
CAPACITY = ROWS_AT_ONCE / DEVICE_SECONDS
"""Requests per second of the device with a fixed time for each batch."""
SHARE, CALLERS = 0.7, 64
"""Share of the capacity that the usual clients take, and their number of connections."""
CAPACITY_SECONDS, WARM_UP_SECONDS, GRACE_SECONDS = 4.0, 1.0, 60.0
LAGS = 10
"""How many times the worst lag of this process a request may take longer."""
BODY = json.dumps({"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * 4]}).encode()
"""The requests of the usual clients."""


@contextmanager
def on_planted_device(fault: str, root: Path, *flags: str, **settings: str) -> Iterator[Server]:
    """Run a server with a planted device. fault: names it, and may name other faults too."""
    models.sensors(root / "models", hidden=8)
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(fault, patch)
        with serving(root / "models", root, *flags, **settings) as server:
            yield server


@dataclass
class Comparison:
    """The phases of a run, and the worst lags of this process in its disturbed phases."""

    quiet: list[Result] = field(default_factory=list)
    disturbed: list[Result] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, int]:
        failures: Counter[str] = Counter()
        for phase in (*self.quiet, *self.disturbed):
            failures.update(phase.failures)
        return dict(failures)

    def ratios(self, share: float = 0.5) -> list[float]:
        """Return how many times as long the usual clients waited in the disturbed phase of each round.

        share: of the requests of a phase, which are answered in the time that is compared.
        """
        return [_time(loud, share) / _time(quiet, share) for quiet, loud in zip(self.quiet, self.disturbed, strict=True)]

    def holds(self, most_ratio: float) -> bool:
        """Return whether the median latency of a disturbed phase is at most `most_ratio` times that of the quiet phase, in any round.

        A disturbance delays every round, and other processes of the machine only some of them. Each process that handles a request may
        wait for a core as long as this process does.
        """
        rounds = zip(self.quiet, self.disturbed, self.lags, strict=True)
        return any(_time(loud, 0.5) <= most_ratio * _time(quiet, 0.5) + LAGS * lag for quiet, loud, lag in rounds)

    def __str__(self) -> str:
        def figures(phases: list[Result]) -> str:
            answers, cores = (
                sum(phase.answers for phase in phases),
                [sum(phase.server_cpu_seconds) / phase.seconds for phase in phases],
            )
            p50, p99 = (1000 * median(_time(phase, share) for phase in phases) for share in (0.5, 0.99))
            return f"{answers} answers, p50 {p50:.2f} ms, p99 {p99:.2f} ms, {median(cores):.2f} cores"

        def times(share: float) -> str:
            return " ".join(f"{ratio:.2f}" for ratio in self.ratios(share))

        return (
            f"quiet: {figures(self.quiet)}\ndisturbed: {figures(self.disturbed)}\n"
            f"ratios of p50 {times(0.5)}, of p99 {times(0.99)}, lags "
            f"{' '.join(f'{1000 * lag:.0f}' for lag in self.lags)} ms, failures {self.failures}"
        )


def _time(phase: Result, share: float) -> float:
    return nearest_rank(phase.ordered_latencies(), share)


class UsualClients:
    """Clients that send valid requests at a constant rate."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @classmethod
    def of(cls, server: Server, seconds: float, *headers: str, callers: int = CALLERS) -> UsualClients:
        """Return clients of HTTP whose rate is SHARE of the capacity, which is measured first.

        seconds: length of a phase. callers: connections.
        """
        address = urlsplit(server.address)
        request = Target.of(server.address, "/infer").request(BODY, JSON, *headers)
        job = Job("http", str(address.hostname), int(address.port or 0), "", [request], "answer", [[]], callers=callers)
        job.warm_up, job.grace, job.pids = WARM_UP_SECONDS, GRACE_SECONDS, list(processes(server).values())
        capacity = run_in_process(structs.replace(job, seconds=CAPACITY_SECONDS))
        return cls(structs.replace(job, seconds=seconds, rate=SHARE * capacity.answers / capacity.seconds))

    def phase(self) -> Result:
        return run_in_process(self._job)

    def compare(self, disturbance: Callable[[], AbstractContextManager[object]], rounds: int) -> Comparison:
        """Run quiet and disturbed phases in turns. disturbance: returns the context of a disturbed phase."""
        comparison = Comparison()
        for _ in range(rounds):
            comparison.quiet.append(self.phase())
            with disturbance(), Lag() as lag:
                comparison.disturbed.append(self.phase())
            comparison.lags.append(lag.worst)
        return comparison
