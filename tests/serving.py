"""Start the real server, as a user does, for tests over real sockets."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

LIMIT_SECONDS = 60.0
"""Shortest limit of a wait for an event that must happen eventually."""
DEFAULTS = {"default_deadline_ms": "60000", "frontends": "1", "strict": "1", "max_memory_share": "1"}
"""Deadlines that a busy machine meets too, the same number of frontends on every machine, no start without all models, and no refusal for
memory that other processes use."""
FRESH_SECONDS = 10.0
"""How long to wait for a process that is too busy for a scrape."""
STOPPED, ZOMBIE = "T", "Z"
"""States of a process: a signal has stopped it, or it has ended and its parent has not noticed."""
Check = Callable[[], Any]


class Service(Protocol):
    """The parts of a running service that a test uses, whether its processes are separate or this process."""

    address: str

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series over all labels that are not in `labels`."""

    def events(self, name: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the events with this name in the log, without its first `since` bytes."""


class Server:
    """A running `seqserve serve`. Its log goes to a file."""

    def __init__(
        self, models: Path, scratch: Path, *flags: str, program: Sequence[str] = ("-m", "service"), **variables: str
    ) -> None:
        """program: arguments of Python that start the command line."""
        self.log_file = scratch / f"log-{time.monotonic_ns()}"
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", "--models", str(models), "--port", "0", "--grpc-port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {f"SEQSERVE_{name.upper()}": value for name, value in (DEFAULTS | variables).items()},
            )
        started = time.monotonic()
        self.address, self.grpc, self.admin, self.health = self._await_addresses()
        self.start_seconds = time.monotonic() - started
        self.client = httpx.Client(base_url=self.address, timeout=30, trust_env=False)

    def infer(self, model: str, inputs: list[Any], **options: Any) -> httpx.Response:
        return self.client.post("/infer", json={"model": model, "inputs": inputs, **options})

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series over all labels that are not in `labels`."""
        return sum_of(self.scrape(), name, labels)

    def last_metric(self, name: str, **labels: str) -> float:
        """As `metric`, without waiting for a process that is busy: its last known values count."""
        return sum_of(self.client.get("/metrics").text, name, labels)

    def scrape(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the text of /metrics. If a process was too late for it, ask again, for at most FRESH_SECONDS.

        A test that stops a process gets the last known values of this process at once. headers: further headers of the request.
        """
        until = time.monotonic() + FRESH_SECONDS
        while True:
            answer = self.client.get("/metrics", headers=headers)
            if answer.status_code != 200 or is_fresh(answer.text) or time.monotonic() > until:
                return answer.text
            if any(process_state(event["pid"]) == STOPPED for event in self.events("started")):
                return answer.text

    def pid(self, child: str) -> int:
        """Return the process id of the newest process with this name."""
        return int([event["pid"] for event in self.events("started") if event["child"] == child][-1])

    def events(self, name: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the events with this name in the log, without its first `since` bytes."""
        return [event for event in self.log(since=since) if event["event"] == name]

    def log(self, *, since: int = 0) -> list[dict[str, Any]]:
        """Return all events in the log, without its first `since` bytes. Each line must be a JSON object.

        A last line without a line break is left out: a read may see only a part of a line that is being written.
        """
        return [json.loads(line) for line in self.log_file.read_bytes()[since:].split(b"\n")[:-1]]

    @property
    def log_bytes(self) -> int:
        """The size of the whole lines of the log: the tests of a shared server look only at later events."""
        return self.log_file.read_bytes().rfind(b"\n") + 1

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit status."""
        self.client.close()
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _await_addresses(self) -> tuple[str, str, str, str]:
        """Return the addresses of HTTP, of gRPC, of administration and of health checks; empty without these ports."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(
                r"ready on (https?://\S+)(?: and for gRPC on (\S+))?(?: and for administration on (\S+))?"
                r"(?: and for health on (\S+))?",
                line,
            ):
                return found[1], found[2] or "", found[3] or "", found[4] or ""
        self.process.stdout.close()
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.log_file.read_text()}")


@contextmanager
def serving(
    models: Path, scratch: Path, *flags: str, program: Sequence[str] = ("-m", "service"), **variables: str
) -> Iterator[Server]:
    """Run a server until the end of the block. Then print its log, which pytest shows for a failed test."""
    server = Server(models, scratch, *flags, program=program, **variables)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        print(server.log_file.read_text())
        server.client.close()
        if server.process.stdout is not None:
            server.process.stdout.close()


def sum_of(metrics: str, name: str, labels: Mapping[str, str]) -> float:
    """Return the sum of a series over all labels that are not in `labels`. metrics: the text of a scrape."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def is_fresh(metrics: str) -> bool:
    """Return whether all processes replied in time for a scrape."""
    return "\nseqserve_stale_processes 0.0\n" in metrics


def idle(server: Server) -> bool:
    """Return whether all processes run, the frontends know all engines, and no request is left."""
    newest = {event["child"]: event["pid"] for event in server.events("started")}
    if not all(map(alive, newest.values())) or not server.ready():
        return False
    devices = server.client.get("/models").json()["models"][0]["device"].split(", ")
    left = [server.metric(f"seqserve_{name}") for name in ("requests_in_flight", "queue_depth", "sequences_begun")]
    return len(devices) == sum(name.startswith("engine") for name in newest) and not any(left)


@contextmanager
def asking(server: Server, *bodies: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """Send each body repeatedly, one client per body, until the block ends. Yields the list of replies so far."""
    answers: list[httpx.Response] = []
    ended = threading.Event()

    def ask(body: dict[str, Any]) -> None:
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            while not ended.is_set():
                answers.append(client.post("/infer", json=body))

    with ThreadPoolExecutor(len(bodies)) as callers:
        asked = [callers.submit(ask, body) for body in bodies]
        try:
            yield answers
        finally:
            ended.set()
        for one in asked:
            one.result()


@contextmanager
def answering(server: Server, *bodies: dict[str, Any]) -> Iterator[None]:
    """Send as `asking` does, and check that every reply has the status 200."""
    with asking(server, *bodies) as answers:
        yield
    for answer in answers:
        assert answer.status_code == 200, answer.text


def rewrite(file: Path, text: str) -> None:
    """Replace the text of a file. A process that reads the file meanwhile gets the old text or the new one."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def nearly_equal(one: Any, other: Any) -> bool:
    """Return whether two replies are equal, except for the rounding of float32, which depends on the batches that computed them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) if isinstance(one, float) else bool(one == other)


def eventually(check: Check, within_seconds: float = LIMIT_SECONDS) -> Any:
    """Return the first true result of `check`. Fails after `within_seconds`, and after LIMIT_SECONDS at the earliest.

    A busy machine takes longer than a quiet machine. The limit only ends a test whose condition never becomes true.
    """
    limit = max(within_seconds, LIMIT_SECONDS)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if result := check():
            return result
        time.sleep(0.02)
    raise AssertionError(f"still not true after {limit:.0f} s")


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    return process_state(pid) not in ("", ZOMBIE)


def process_state(pid: int) -> str:
    """Return the letter that the kernel gives to the state of a process, empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return all processes below a process."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def client_ports(pid: int) -> set[int]:
    """Return the clients' ports of the connections that a process serves."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[2].partition(":")[2], 16) for line in lines if line[9] in inodes}


def check_unharmed(server: Service) -> None:
    """Check that the server holds no requests and no sessions, and that it logged no bug."""
    eventually(lambda: server.metric("seqserve_sessions") + server.metric("seqserve_requests_in_flight") == 0, 5)
    assert server.metric("seqserve_requests_total", outcome="inference_failed") == 0
    assert not server.events("bug") and not server.events("library warning")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the supervisor may have replaced it meanwhile
            os.kill(pid, signal.SIGCONT)
