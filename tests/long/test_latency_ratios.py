"""How much requests delay each other on a running server: long and short requests, tenants, and priorities.

All figures are ratios within one run. The device is planted: a batch takes a fixed time, or a time for each step, and no processor time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from loadtest.generator.job import Job, nearest_rank
from loadtest.generator.process import run_in_process
from loadtest.target import JSON, Target
from service.access.keys import create
from service.access.scopes import Scope
from service.engine.batching.model_queue import LEAST_STEPS
from tests.long.others import CAPACITY, ROWS_AT_ONCE, on_planted_device
from tests.long.overload import Lag
from tests.planted import DEVICE_SECONDS, STEP_SECONDS, constants
from tests.serving import Server

SECONDS, ATTEMPTS, LAGS = 8.0, 3, 2
"""Length of a measurement, how often it is repeated because other processes took the cores, and how many times the worst lag of this
process an answer may be late."""
SHORT, LONG = 25, 2000
MOST_RATIO_OF_SHORT = 1.5
BATCHES_OF_OTHERS = 1.5
"""How many batches of another tenant a request may wait for, beyond its time without that tenant."""
URGENT, OTHERS, HIGHEST = 0.6, 1.4, 10
"""Load of urgent requests and of others, in multiples of the capacity: 30 % and 70 % of twice the capacity. The priority of the first."""
MEDIUM, OTHERS_MS = 100, 5_000
MOST_RATIO_OF_URGENT, LEAST_OF_OTHERS = 1.3, 0.05
"""How many times as long as alone an urgent request may take, and the least share of the other requests that is answered."""
PATIENT_MS, IMPATIENT_MS = 60_000, 1_000
"""Deadlines of the measured requests, and of the other requests, which are refused above the capacity."""


class Load(NamedTuple):
    """Requests of one kind. rate: a second, 0 for callers that wait for each answer."""

    body: dict[str, Any]
    rate: float = 0.0
    callers: int = 64
    token: str = ""


class Times(NamedTuple):
    """p99 in seconds and refusals of the measured requests, the answered share of the other requests, and the lag of this process."""

    p99: float
    refused: int
    advanced: float
    lag: float


def measure(server: Server, measured: Load, *others: Load) -> Times:
    """Send all loads at the same time."""
    with Lag() as lag, ThreadPoolExecutor(1 + len(others)) as pool:
        first, *rest = pool.map(lambda load: run_in_process(_job(server, load)), (measured, *others))
    answered, ended = (
        sum(result.answers for result in rest),
        sum(result.answers + sum(result.failures.values()) for result in rest),
    )
    p99 = nearest_rank(first.ordered_latencies(), 0.99)
    return Times(p99, sum(first.failures.values()), answered / ended if ended else 1.0, lag.worst)


def _job(server: Server, load: Load) -> Job:
    address = urlsplit(server.address)
    headers = (JSON, f"Authorization: Bearer {load.token}") if load.token else ()
    request = Target.of(server.address, "/infer").request(json.dumps(load.body).encode(), *headers)
    return Job(
        "http",
        str(address.hostname),
        int(address.port or 0),
        "",
        [request],
        "answer",
        [[]],
        callers=load.callers,
        seconds=SECONDS,
        warm_up=1.0,
        grace=5.0,
        rate=load.rate,
    )


def met(alone: Load, beside: Sequence[Load], server: Server, goal: Callable[[Times, Times], bool]) -> bool:
    """Return whether the goal is met in an attempt. goal: takes the times without and with the other loads."""
    for _ in range(ATTEMPTS):
        one, both = measure(server, alone), measure(server, alone, *beside)
        print(f"alone {one}\nbeside {both}")
        if goal(one, both):
            return True
    return False


def request(steps: int, **options: Any) -> dict[str, Any]:
    return {"model": "sensors", "inputs": [[[0.1, 0.2, 0.3]] * steps], "deadline_ms": PATIENT_MS, **options}


# Long and short requests.


@pytest.mark.parametrize("least_steps, holds", [(LEAST_STEPS, True), (LONG, False)])
def test_long_sequences_delay_short_ones_by_little(least_steps: int, holds: bool, tmp_path: Path) -> None:
    """A client sends long requests all the time. A service that does not cut them misses the goal."""
    settings = {"max_batch_tokens": "512" if holds else str(2 * LONG), "batch_budget_ms": "50"}
    cutting = constants({"service.engine.batching.batch_builder.LEAST_STEPS": least_steps})
    with cutting, on_planted_device("stepped-device", tmp_path, **settings) as server:
        short, long = Load(request(SHORT), callers=8), Load(request(LONG), callers=1)

        def goal(alone: Times, beside: Times) -> bool:
            return not beside.refused and beside.p99 <= MOST_RATIO_OF_SHORT * alone.p99 + LAGS * beside.lag

        assert met(short, [long], server, goal) == holds


# Tenants.


@pytest.mark.parametrize("noisy, holds", [("noisy", True), ("quiet", False)])
def test_noisy_tenant_delays_a_quiet_one_by_one_batch(noisy: str, holds: bool, tmp_path: Path) -> None:
    """A tenant sends twenty times as much as the quiet tenant, and twice the capacity. Requests of one tenant wait in their order."""
    file = tmp_path / "keys.toml"
    own, other = create(file, "own", [Scope.INFER], "quiet"), create(file, "other", [Scope.INFER], noisy)
    with on_planted_device("slow-device", tmp_path, "--keys", str(file), max_batch_sequences=str(ROWS_AT_ONCE)) as server:
        quiet = Load(request(4), rate=0.1 * CAPACITY, token=own)
        noise = Load(request(4, deadline_ms=IMPATIENT_MS), rate=2.0 * CAPACITY, token=other)

        def goal(alone: Times, beside: Times) -> bool:
            bound = alone.p99 + BATCHES_OF_OTHERS * DEVICE_SECONDS + LAGS * beside.lag
            return not beside.refused and beside.p99 <= bound

        assert met(quiet, [noise], server, goal) == holds


# Priorities.


def test_urgent_requests_take_no_longer_at_twice_the_capacity(tmp_path: Path) -> None:
    """30 % of the requests are urgent. None of them is refused, and the others advance.

    The requests are long and few, and run whole: the processors are idle while the device is overloaded.
    """
    capacity = ROWS_AT_ONCE / (MEDIUM * STEP_SECONDS)
    with on_planted_device("stepped-device", tmp_path, max_batch_sequences=str(ROWS_AT_ONCE), batch_budget_ms="1000") as server:
        urgent = Load(request(MEDIUM, priority=HIGHEST), rate=URGENT * capacity)
        others = Load(request(MEDIUM, deadline_ms=OTHERS_MS), rate=OTHERS * capacity)

        def goal(alone: Times, beside: Times) -> bool:
            in_time = beside.p99 <= MOST_RATIO_OF_URGENT * alone.p99 + LAGS * beside.lag
            return in_time and not beside.refused and beside.advanced >= LEAST_OF_OTHERS

        assert met(urgent, [others], server, goal)
