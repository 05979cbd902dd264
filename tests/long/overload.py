"""Load a server with multiples of its capacity, and judge how it answers.

A step offers a rate of requests with one deadline, whatever the server answers (an open loop). A step has the figures of the goals of
overload: answers in time, accepted requests that came too late, refusals and their cost, and memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import numpy as np

from loadtest import oip_requests
from loadtest.generator.job import Job, Result
from loadtest.generator.process import run_in_process
from loadtest.target import Target
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from tests import models
from tests.accumulator import at_rest
from tests.serving import LIMIT_SECONDS, Server, serving
from tests.steady import processes, resident_bytes

DEADLINE_SECONDS = 1.0
CALLERS = 64
MOST_CALLERS = 512
"""Connections of a closed loop, and of an open loop."""
LAG_SECONDS, LAGS = 0.01, 10
"""How long this process sleeps between two measurements of its lag, and how many times its worst lag an answer may be late."""
LATE_SECONDS = 0.1
STEPS = (0.5, 1, 2, 5, 10, 20)
LEAST_GOODPUT = {1: 0.9, 2: 0.92, 5: 0.92, 10: 0.92, 20: 0.85}
"""Share of the capacity that is answered in time, by how many times the capacity is offered."""
LEAST_KEPT = 0.999
"""Share of the accepted requests that are answered by their deadline, on a machine that never lets a process wait for a core."""
MOST_GROWTH_BYTES = 64 << 20
SECONDS = 8.0
STARTED_SECONDS = 3.0
"""After this time a generator has started and warmed up."""
ATTEMPTS = 3
"""A step in which other processes took the cores is run again."""
STATUSES = {"http": ("503", "504"), "grpc": ("14", "4")}
"""The statuses of refused requests, and of requests whose deadline passed, by transport."""
VOCABULARY, SHORT, LEAST_STEPS, MOST_STEPS = 12, 200, 50, 1000
"""Of a computed model. SHORT: steps of the sequences that tell how long other sequences take."""
LEAST_BUSY = 0.8
"""Share of the time in which the device runs batches while it is the limit."""
Input = Sequence[Sequence[float]] | Sequence[int]
"""Rows of features, or token ids, which only HTTP requests carry."""


def http_request(server: Server, model: str, input: Input, padding: int = 0) -> bytes:
    body = {"model": model, "inputs": [input], "deadline_ms": 1000 * DEADLINE_SECONDS}
    return Target.of(server.address, "/infer").request(json.dumps(body).encode() + b" " * padding)


def large_http_request(server: Server, model: str, input: Input) -> bytes:
    """Return a request whose body goes to the decoder."""
    return http_request(server, model, input, MAX_LOOP_BODY_BYTES)


def grpc_request(server: Server, model: str, input: Input) -> bytes:
    message = oip_requests.METHOD.request_type.FromString(oip_requests.message(model, np.asarray(input, np.float32)))
    message.parameters["timeout"].int64_param = round(1e6 * DEADLINE_SECONDS)
    serialised: bytes = message.SerializeToString()
    return serialised


REQUESTS: dict[str, Callable[[Server, str, Input], bytes]] = {
    "http": http_request,
    "grpc": grpc_request,
    "large http": large_http_request,
}
"""By kind of request, whose last word is its transport."""


class Step(NamedTuple):
    """The requests of one step. answered: in time or late. expired: accepted, and ended by their deadline. other: neither of these.

    cpu_seconds: of all processes of the server. grown_bytes: growth of their memory during the step. lag: of this process.
    """

    seconds: float
    due: int
    answered: int
    late: int
    expired: int
    refused: int
    other: dict[str, int]
    cpu_seconds: float
    grown_bytes: int
    lag: float

    @property
    def goodput(self) -> float:
        """Requests per second that are due and answered in time."""
        return (self.answered - self.late) / self.seconds

    @property
    def kept(self) -> float:
        """Share of the accepted requests that were answered in time."""
        accepted = self.answered + self.expired
        return (self.answered - self.late) / accepted if accepted else 1.0

    def __str__(self) -> str:
        return (
            f"{self.due / self.seconds:.0f} requests/s due, {self.goodput:.0f} answered in time, {self.late} late, {self.expired} "
            f"expired, {self.refused} refused, {self.other or 'nothing'} else, {self.cpu_seconds / self.seconds:.2f} cores, "
            f"{self.grown_bytes / 2**20:+.1f} MiB, lag {1000 * self.lag:.0f} ms"
        )


@dataclass
class Overload:
    """A server under a load of one kind of request over one transport."""

    server: Server
    transport: str
    request: bytes

    @classmethod
    def of(cls, server: Server, kind: str, model: str, input: Input) -> Overload:
        return cls(server, kind.split()[-1], REQUESTS[kind](server, model, input))

    def capacity(self, seconds: float, callers: int = CALLERS) -> float:
        """Return the answers per second to callers that wait for each answer, and retry a refused request at once."""
        result = run_in_process(self._job(callers, seconds))
        return result.answers / result.seconds

    def step(self, rate: float, seconds: float, callers: int = MOST_CALLERS) -> Step:
        """Offer a rate of requests."""
        memory, lag = self._memory(), Lag()
        with lag:
            result = run_in_process(self._job(callers, seconds, rate))
        return self._judged(result, self._memory() - memory, lag.worst)

    def busy_share(self) -> float:
        """Return the share of the time in which the device runs batches while callers wait for its answers."""

        def busy_seconds() -> float:
            return self.server.metric("seqserve_device_busy_seconds_total")

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(self.capacity, SECONDS)
            time.sleep(STARTED_SECONDS)
            before, began = busy_seconds(), time.monotonic()
            time.sleep(SECONDS / 2)
            share = (busy_seconds() - before) / (time.monotonic() - began)
            loading.result()
        return share

    def _job(self, callers: int, seconds: float, rate: float = 0.0) -> Job:
        address = urlsplit(self.server.address if self.transport == "http" else f"//{self.server.grpc}")
        return Job(
            self.transport,
            str(address.hostname),
            int(address.port or 0),
            oip_requests.PATH if self.transport == "grpc" else "",
            [self.request],
            "answer" if self.transport == "http" else "last floats",
            [[]],
            callers=callers,
            seconds=seconds,
            warm_up=1.0,
            grace=2 * DEADLINE_SECONDS,
            rate=rate,
            pids=list(processes(self.server).values()),
        )

    def _memory(self) -> int:
        return sum(map(resident_bytes, processes(self.server).values()))

    def _judged(self, result: Result, grown_bytes: int, lag: float) -> Step:
        failures = {reason.removeprefix("status ").partition(" ")[0]: 0 for reason in result.failures}
        for reason, count in result.failures.items():
            failures[reason.removeprefix("status ").partition(" ")[0]] += count
        refused, expired = (failures.pop(status, 0) for status in STATUSES[self.transport])
        latest = DEADLINE_SECONDS + LATE_SECONDS + LAGS * lag
        latencies = result.ordered_latencies()
        late = sum(seconds > latest for seconds in latencies)
        return Step(
            result.seconds,
            result.due,
            len(latencies),
            late,
            expired,
            refused,
            failures,
            sum(result.server_cpu_seconds),
            grown_bytes,
            lag,
        )


class Lag:
    """The longest time by which this process woke up late within the context."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self) -> Lag:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.is_set():
            due = time.monotonic() + LAG_SECONDS
            time.sleep(LAG_SECONDS)
            self.worst = max(self.worst, time.monotonic() - due)


class Probes:
    """Requests for some paths while other clients keep the service busy. seconds: how long each took, by path."""

    def __init__(self, address: str, *paths: str, connection: str = "close") -> None:
        """connection: "close" for a new connection with each request, as probes have it."""
        self._address, self._connection = address, connection
        self._ended = threading.Event()
        self.seconds: dict[str, list[float]] = {path: [] for path in paths}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send them until the end of the block."""
        with ThreadPoolExecutor(1) as pool:
            probing = pool.submit(self._run)
            try:
                yield
            finally:
                self._ended.set()
                probing.result()

    def quantile(self, path: str, share: float) -> float:
        return sorted(self.seconds[path])[int(share * (len(self.seconds[path]) - 1))]

    def _run(self) -> None:
        headers = {"Connection": self._connection}
        with httpx.Client(base_url=self._address, timeout=LIMIT_SECONDS, trust_env=False, headers=headers) as client:
            while not self._ended.wait(LAG_SECONDS):
                for path, seconds in self.seconds.items():
                    before = time.monotonic()
                    answer = client.get(path)
                    seconds.append(time.monotonic() - before)
                    assert answer.status_code == 200, answer.text


def computed(root: Path, layers: Mapping[str, object]) -> str:
    """Write a model with batches of real arithmetic, and return its name."""
    ids = models.IDS | {"vocabulary": VOCABULARY, "max_steps": MOST_STEPS}
    models.made_up(root, "deep", ids, models.EMBEDDING, layers, head={"kind": "regress", "pool": "last", "outputs": 2})
    return "deep"


def of_length(server: Server, model: str, steps: int) -> Overload:
    return Overload.of(server, "http", model, [step % VOCABULARY for step in range(steps)])


def of_capacity(server: Server, model: str, capacity: float) -> Overload:
    """Return a load of sequences of one length, chosen so that the device answers about `capacity` per second."""
    of_short = of_length(server, model, SHORT).capacity(SECONDS / 4)
    return of_length(server, model, max(LEAST_STEPS, min(MOST_STEPS, round(SHORT * of_short / capacity))))


def faults(times: float, step: Step, capacity: float) -> list[str]:
    """Return the faults of a step at a multiple of the capacity."""
    found = []
    waits = step.lag / DEADLINE_SECONDS
    if step.goodput < LEAST_GOODPUT.get(int(times), 0.0) * capacity * (1 - waits):
        found.append(f"{step.goodput:.0f} answers in time per second, of a capacity of {capacity:.0f}")
    if step.kept < LEAST_KEPT - waits:
        found.append(f"{step.late} answers late and {step.expired} requests expired after they were accepted")
    if step.other:
        found.append(f"failures {step.other}")
    if step.grown_bytes > MOST_GROWTH_BYTES:
        found.append(f"{step.grown_bytes >> 20} MiB more memory")
    return [f"{times} times: {fault}" for fault in found]


def staircase(overload: Overload, show: Callable[[object], None]) -> list[str]:
    """Offer the multiples of the capacity in turn. Returns the faults."""
    capacity = overload.capacity(SECONDS)
    show(f"{overload.transport}: {capacity:.0f} requests/s")
    found = []
    for times in STEPS:
        for _ in range(ATTEMPTS):
            step = overload.step(times * capacity, SECONDS)
            show(f"{times} times: {step}")
            wrong = faults(times, step, capacity)
            if not wrong:
                break
            # Other processes may have taken the cores, and so from the capacity.
            capacity = min(capacity, overload.capacity(SECONDS))
        found += wrong
    return found


def check_computed(
    layers: Mapping[str, object], capacity: float, scratch: Path, show: Callable[[object], None], *flags: str, **limits: str
) -> None:
    """Serve a model of these layers, and check that the goodput holds while the device computes, up to the last of STEPS.

    capacity: about the requests per second that the device should answer. flags, limits: of the server.
    """
    root = scratch / "models"
    model = computed(root, layers)
    with serving(root, scratch, *flags, **limits) as server:
        overload = of_capacity(server, model, capacity)
        share = overload.busy_share()
        show(f"the device is busy for {share:.0%} of the time")
        assert share > LEAST_BUSY, "the device is not the limit"
        before = at_rest(server)
        assert staircase(overload, show) == []
        at_rest(server).since(before).check()
