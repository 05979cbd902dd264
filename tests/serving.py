"""Start the real server, as a user does, for tests over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

LIMIT_SECONDS = 60.0
"""Shortest limit of a wait for an event that must happen eventually."""
PATIENT = {"default_deadline_ms": "60000"}
"""Deadlines that a busy machine meets too."""
Check = Callable[[], Any]


class Server:
    """A running `seqserve serve`. Its log goes to a file."""

    def __init__(self, models: Path, scratch: Path, *flags: str, **variables: str) -> None:
        self.log_file = scratch / f"log-{time.monotonic_ns()}"
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service", "serve", "--models", str(models), "--port", "0", "--grpc-port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {f"SEQSERVE_{name.upper()}": value for name, value in (PATIENT | variables).items()},
            )
        started = time.monotonic()
        self.address, self.grpc = self._await_addresses()
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
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def pid(self, child: str) -> int:
        """Return the process id of the newest process with this name."""
        return int([event["pid"] for event in self.events("started") if event["child"] == child][-1])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log_file.read_text().splitlines() if (event := json.loads(line))["event"] == name]

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

    def _await_addresses(self) -> tuple[str, str]:
        """Return the addresses of HTTP and of gRPC; the second is empty without gRPC."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready on (http://\S+)(?: and for gRPC on (\S+))?", line):
                return found[1], found[2] or ""
        self.process.stdout.close()
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.log_file.read_text()}")


@contextmanager
def serving(models: Path, scratch: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """Run a server until the end of the block. Then print its log, which pytest shows for a failed test."""
    server = Server(models, scratch, *flags, **variables)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        print(server.log_file.read_text())
        server.client.close()
        if server.process.stdout is not None:
            server.process.stdout.close()


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
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def check_unharmed(server: Server) -> None:
    """Check that the server holds no requests and no sessions, and that it logged no bug."""
    eventually(lambda: server.metric("seqserve_sessions") + server.metric("seqserve_requests_in_flight") == 0, 5)
    assert server.metric("seqserve_requests_total", outcome="inference_failed") == 0
    assert not server.events("bug") and not server.events("library warning")
