"""Run a real Prometheus that scrapes a real server under mixed load."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from service.access.keys import create
from service.access.scopes import Scope
from tests.deploy.shipped import DEPLOY, features, program, read
from tests.serving import Server, eventually

TEXTS = ["how far is the sea ?", "who", "who was the first ?", "is the sea far"]
STEP = [0.1, 0.2, 0.3]


class Prometheus:
    """A running Prometheus with the shipped rules, which scrapes the server at `address` every second."""

    def __init__(self, folder: Path, address: str, **scrape: Any) -> None:
        log = folder / "prometheus.log"
        storage, listen = f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [program("prometheus"), f"--config.file={configured(folder, address, **scrape)}", storage, listen, *features()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            found = eventually(lambda: re.search(r"msg=\"Listening on\".* address=(\S+)", log.read_text()))
            eventually(lambda: "Server is ready to receive web requests" in log.read_text())  # until then it answers 503
        except AssertionError:
            self.process.kill()
            self.process.wait()
            raise AssertionError(log.read_text()) from None
        self._client = httpx.Client(base_url=f"http://{found[1]}/api/v1", timeout=10, trust_env=False)

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of a reply. Fails with the error of Prometheus."""
        answer = self._client.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str, start: float, end: float) -> list[float]:
        """Return every value of an expression, over all its series, second by second."""
        series = self.get("query_range", query=expression, start=start, end=end, step=1)["result"]
        return [float(value) for one in series for _, value in one["values"]]

    def now(self) -> float:
        """Return the current time of its clock."""
        return float(self.get("query", query="time()")["result"][1])

    def stop(self) -> None:
        self._client.close()
        self.process.terminate()
        self.process.wait(20)


def configured(folder: Path, address: str, **scrape: Any) -> Path:
    """Write the shipped configuration with the server at this address as its target, scraped every second. scrape: more keys of the job."""
    configuration = read("prometheus.yml")
    configuration["global"] |= dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s")
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [address.removeprefix("http://")]
    configuration["scrape_configs"][0] |= scrape
    for name in configuration["rule_files"]:
        shutil.copy(DEPLOY / name, folder / name)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    return file


@contextmanager
def watching(folder: Path, address: str, **scrape: Any) -> Iterator[Prometheus]:
    """Run a Prometheus until the end of the block. scrape: as `configured` takes it."""
    prometheus = Prometheus(folder, address, **scrape)
    try:
        yield prometheus
    finally:
        prometheus.stop()


class Tokens(NamedTuple):
    """Keys of a server: an operator's key with every scope, and keys of two tenants. The shop exceeds its quota."""

    operator: str
    shop: str
    laboratory: str

    @classmethod
    def create(cls, file: Path) -> Tokens:
        clients = [Scope.INFER, Scope.SESSION]
        return cls(
            operator=create(file, "operator", [*clients, Scope.METRICS, Scope.ADMIN], "operators"),
            shop=create(file, "shop", clients, "sales", weight=2.0, max_requests_per_second=10),
            laboratory=create(file, "laboratory", clients, "research"),
        )


class Caller(NamedTuple):
    """A client with the key of a tenant."""

    client: httpx.Client
    token: str


@contextmanager
def callers(server: Server, tokens: Tokens) -> Iterator[None]:
    """Send requests of several tenants until the block ends.

    They are valid and invalid, have chunks of sessions, short deadlines, no key, or a client that disconnects.
    """
    over = threading.Event()
    ways = [
        *[(way, tokens.shop) for way in (_asks_texts, _asks_texts)],
        *[(way, tokens.laboratory) for way in (_asks_rows, _asks_for_what_is_wrong, _has_no_time, _hangs_up, _sends_chunks)],
        *[(way, tokens.operator) for way in (_asks_texts, _has_no_key)],
    ]
    threads = [threading.Thread(target=_until, args=(over, way, server, token)) for way, token in ways]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _until(over: threading.Event, way: Callable[[Caller, int], None], server: Server, token: str) -> None:
    """While an engine restarts, clients get 503 or no reply, and continue."""
    headers = {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=server.address, headers=headers, timeout=10, trust_env=False) as client:
        for batch in count():
            if over.wait(0.02):
                return
            with contextlib.suppress(httpx.TransportError, OSError):
                way(Caller(client, token), batch)


def _asks_texts(caller: Caller, batch: int) -> None:
    caller.client.post("/infer", json={"model": "words", "inputs": TEXTS[: 1 + batch % len(TEXTS)]})


def _asks_rows(caller: Caller, batch: int) -> None:
    caller.client.post("/infer", json={"model": "sensors", "inputs": [[STEP] * 20, [STEP] * (5 + batch % 50)]})


def _sends_chunks(caller: Caller, batch: int) -> None:
    """Send ten chunks of a session, and end it with the last. Also send a chunk of a session that is not open."""
    chunk = {"model": "sensors", "inputs": [[STEP] * 2]}
    caller.client.post("/infer", json={**chunk, "session": f"pump-{batch // 10}", "end": batch % 10 == 9})
    caller.client.post("/infer", json={**chunk, "session": "closed", "start": False})


def _asks_for_what_is_wrong(caller: Caller, batch: int) -> None:
    wrong = [
        {"model": "nobody", "inputs": ["?"]},
        {"model": "words", "inputs": [1.5]},
        {"model": "sensors", "inputs": [[[1.0]]]},
    ]
    caller.client.post("/infer", json=wrong[batch % len(wrong)])


def _has_no_time(caller: Caller, batch: int) -> None:
    caller.client.post("/infer", json={"model": "words", "inputs": TEXTS, "deadline_ms": 0.5})


def _has_no_key(caller: Caller, batch: int) -> None:
    caller.client.post("/infer", json={"model": "words", "inputs": TEXTS}, headers={"authorization": ""})


def _hangs_up(caller: Caller, batch: int) -> None:
    body = json.dumps({"model": "sensors", "inputs": [[STEP] * 3_000]}).encode()
    head = f"POST /infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {caller.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((caller.client.base_url.host, caller.client.base_url.port or 80)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.02)


def finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
