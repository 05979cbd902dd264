"""The real server as a user starts it, for tests that speak to it over a real socket."""

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

START_SECONDS = 60.0
PATIENT = {"default_deadline_ms": "60000"}
"""A crowded machine must not fail a test that is not about time."""
Check = Callable[[], Any]


class Server:
    """One running `seqserve serve`; its log lines go to a file."""

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
        """The sum of one series over all label values that are not given."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def pid(self, child: str) -> int:
        """Process id of the newest child in this place of the house."""
        return int([event["pid"] for event in self.events("started") if event["child"] == child][-1])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log_file.read_text().splitlines() if (event := json.loads(line))["event"] == name]

    def stop(self, number: int = signal.SIGINT) -> int:
        """Exit status after the signal."""
        self.client.close()
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _await_addresses(self) -> tuple[str, str]:
        """Of HTTP and of gRPC, which is empty where there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready on (http://\S+)(?: and for gRPC on (\S+))?", line):
                return found[1], found[2] or ""
        self.process.stdout.close()
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.log_file.read_text()}")


@contextmanager
def serving(models: Path, scratch: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server that ends with the block. Its log is printed at the end, and pytest shows it beside a test that failed."""
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
    """A caller for each of these, who asks again and again until the block ends; gives what they were answered so far."""
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
    """As `asking`; all are answered with 200."""
    with asking(server, *bodies) as answers:
        yield
    for answer in answers:
        assert answer.status_code == 200, answer.text


def eventually(check: Check, within_seconds: float) -> Any:
    """The first true result of `check`; fails when none came in time."""
    until = time.monotonic() + within_seconds
    while time.monotonic() < until:
        if result := check():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {within_seconds} s")


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def check_unharmed(server: Server) -> None:
    """Whatever was sent, nothing is left of it, and nothing ended in a fault of ours."""
    eventually(lambda: server.metric("seqserve_sessions") + server.metric("seqserve_requests_in_flight") == 0, 5)
    assert server.metric("seqserve_requests_total", outcome="inference_failed") == 0
    assert not server.events("bug") and not server.events("server said")
