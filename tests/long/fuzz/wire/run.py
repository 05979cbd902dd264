"""Runs conversations against a service, and accounts for every reply, stall, byte and label."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.target import JSON, Target
from service.access.keys import create
from service.access.scopes import Scope
from service.errors import BY_CODE
from tests import models
from tests.accumulator import at_rest
from tests.callers import Caller
from tests.long.fuzz.wire.conversation import PATIENCE_SECONDS, Judgement, Line, pieces
from tests.long.fuzz.wire.grpc import GrpcSource
from tests.long.fuzz.wire.http import HttpSource
from tests.long.fuzz.wire.websocket import WebSocketSource
from tests.planted import constants, plant
from tests.serving import Server, serving
from tests.steady import processes, resident_bytes

ROUNDS = 40
"""Least number of rounds. A round ends when all its connections are closed; then the memory is sampled."""
LONGEST_ROUND = 20_000
CONNECTIONS = 400
"""Connections at once. Many of them wait for the limit of an incomplete request."""
SHARES = {"http": 0.8, "grpc": 0.1, "websocket": 0.1}
"""Shares of the connections."""
CANARY = 1_000
"""A request with a known answer follows after each such number of requests."""
LEAVES = 0.03
"""Share of the clients that abort their connection."""
WARM_UP_CONNECTIONS = 500
MAX_CALLBACK_SECONDS = 0.010
"""No request may occupy the event loop for longer. This is processor time."""
MOST_STALLS = 1e-4
"""Callbacks beyond MAX_CALLBACK_SECONDS by request. On a busy machine a callback that is short everywhere else may take 20 ms of processor
time, once in 50,000 requests: its caches are cold, or the time of the kernel counts."""
MOST_METRICS_BYTES = 1 << 20
MOST_GROWTH_BYTES = 8 << 20
"""Growth of a process."""
ROOT = Path(__file__).resolve().parents[4]
MOST_FAULTS = 5
"""Descriptions of a kind that are kept."""
SETTINGS = {"idle_seconds": "20", "session_idle_seconds": "2"}
CONSTANTS = {"service.frontend.connection_guard.RECEIVE_SECONDS": 1, "service.access.refused_keys.DELAY_SECONDS": 0}
"""Connections whose requests do not end wait for this long. Wrong keys do not delay the run."""
STAGES = ("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total")
NAME = "fuzzed"
"""Name of the tenant whose key the fuzzer has."""
TRACES = re.compile(rb'Traceback|site-packages|\.py"|\.py:\d|line \d+, in ')


@dataclass
class Account:
    """The replies. requests: replies to fuzzed requests, and connections that ended without a reply."""

    requests: int = 0
    connections: int = 0
    replies: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    canaries: int = 0
    longest_collection: float = 0.0
    longest_callback: float = 0.0
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, number: int, kind: str, judgement: Judgement) -> None:
        self.connections += 1
        self.requests += max(1, judgement.replies.total())
        self.replies.update({f"{kind} {status}": count for status, count in judgement.replies.items()})
        for fault in judgement.faults:
            self.wrong("reply", f"connection {number}: {fault}")

    def wrong(self, finding: str, fault: str) -> None:
        self.findings[finding] += 1
        if self.findings[finding] <= MOST_FAULTS:
            self.faults.append(f"{finding}: {fault}")

    def __str__(self) -> str:
        common = ", ".join(f"{status} {count}" for status, count in sorted(self.replies.items()))
        grown = ", ".join(f"{name} {grown_bytes(samples) / 2**20:+.2f}" for name, samples in self.memory.items())
        return (
            f"{self.requests} requests on {self.connections} connections, {self.canaries} canaries, longest collection "
            f"{1000 * self.longest_collection:.0f} ms, longest callback {1000 * self.longest_callback:.0f} ms, MiB: {grown}; {common}"
        )


def forbidden_in(data: bytes, words: Iterable[bytes]) -> bytes | None:
    """Return a text in the data that no reply and no line of the log may contain: one of the words, or a trace of the service's code."""
    trace = TRACES.search(data)
    return next((word for word in words if word in data), None) or (trace and trace[0])


class Fuzzer:
    """Sends mutated requests to a server with keys."""

    def __init__(self, server: Server, token: str, folders: Iterable[Path], seed: int = 0) -> None:
        """token: a key of the server. folders: whose paths no reply may contain."""
        self._server = server
        self._seed = seed
        self._secrets = [word.encode() for word in (token, token.partition(".")[2], *map(str, folders))]
        self._sources: dict[str, HttpSource | GrpcSource | WebSocketSource] = {
            "http": HttpSource(token),
            "grpc": GrpcSource(token),
            "websocket": WebSocketSource(token),
        }
        self._addresses = {kind: urlsplit(server.address) for kind in SHARES} | {"grpc": urlsplit(f"//{server.grpc}")}
        self._processes = processes(server)
        self._log_bytes = server.log_bytes
        self._known_labels = label_values(server.scrape()) | documented_labels()
        self._numbers = iter(range(sys.maxsize))
        self._token = token
        self._canary: object = None
        self.account = Account()

    def run(self, requests: int, after_round: Callable[[Account], object] = lambda _: None) -> Account:
        """Send rounds until this many requests are answered. Then check the metrics and the log of the server."""
        account, size = self.account, min(LONGEST_ROUND, max(1, requests // ROUNDS))
        while account.requests < requests:
            uvloop.run(self._round(min(requests, account.requests + size)))
            self._sample()
            after_round(account)
        self._check_server()
        return account

    async def warm_up(self) -> None:
        """Send some connections that do not count: the first request of each kind takes longer."""
        await asyncio.gather(*(self._connect(-1 - number) for number in range(WARM_UP_CONNECTIONS)))
        self._canary = await self._infer()
        self.account = Account()

    async def _round(self, until: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._work(until))

    async def _work(self, until: int) -> None:
        account = self.account
        while account.requests < until:
            await self._connect(next(self._numbers))
            if account.requests >= account.canaries * CANARY:
                account.canaries += 1
                try:
                    answer = await self._infer()
                except OSError as error:
                    answer = error
                if answer != self._canary:
                    account.wrong("canary", f"{answer!r} after {account.requests} requests")

    async def _connect(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        kind = chance.choices([*SHARES], [*SHARES.values()])[0]
        conversation, address = self._sources[kind].conversation(chance), self._addresses[kind]
        parts, leaves = pieces(conversation.data, chance), chance.random() < LEAVES
        loop = asyncio.get_running_loop()
        try:
            _, line = await loop.create_connection(lambda: Line(conversation), str(address.hostname), int(address.port or 0))
            received = await line.talk(parts, quiet=kind != "http", leaves=leaves)
        except OSError as error:
            self.account.wrong("connection", f"{number}: {error}")
            return
        if received is None:
            self.account.wrong(
                "hanging", f"connection {number} was open after {PATIENCE_SECONDS:g} s: {conversation.data[:500]!r}"
            )
            received = b""
        judgement = Judgement() if leaves else conversation.judge(received)
        self.account.add(number, kind, judgement)
        for text in (received, *judgement.texts):
            if revealed := forbidden_in(text, self._secrets):
                self.account.wrong("leak", f"connection {number}: {revealed!r} in {text[:1000]!r}")

    async def _infer(self) -> object:
        """Return the answer to the canary, on a separate connection."""
        target = Target.of(self._server.address, "/infer")
        caller = await Caller.connect(target)
        body = json.dumps({"model": "tagger", "inputs": ["how far is the sea"]}).encode()
        reply = await caller.ask(target.request(body, JSON, f"Authorization: Bearer {self._token}"))
        caller.hang_up()
        return json.loads(reply.body).get("outputs", reply)

    def _sample(self) -> None:
        try:
            running = processes(self._server)
        except ValueError:  # a line of the log that is not an event; `_check_line` reports it
            running = self._processes
        if running != self._processes:
            self.account.wrong("restart", f"{running}, not {self._processes}")
            self._processes = running
        for name, pid in self._processes.items():
            self.account.memory.setdefault(name, []).append((self.account.requests, resident_bytes(pid)))

    def _check_server(self) -> None:
        """Check the counts, the labels and the log of the server."""
        account, server = self.account, self._server
        at_rest(server).check()
        for name, samples in account.memory.items():
            if grown_bytes(samples) > MOST_GROWTH_BYTES:
                account.wrong("growth", f"{name} by {grown_bytes(samples) / 2**20:.1f} MiB in {account.requests} requests")
        if failed := server.metric("seqserve_requests_total", outcome="inference_failed"):
            account.wrong("failed", f"{failed:.0f} requests failed")
        text = server.scrape()
        for value in sorted(label_values(text) - self._known_labels):
            account.wrong("label", repr(value[:200]))
        if len(text) > MOST_METRICS_BYTES:
            account.wrong("label", f"/metrics has {len(text)} bytes")
        for line in server.log_file.read_bytes()[self._log_bytes :].split(b"\n")[:-1]:  # the last may be half written
            self._check_line(line)

    def _check_line(self, line: bytes) -> None:
        try:
            event = json.loads(line)["event"]
        except (ValueError, KeyError, TypeError):
            self.account.wrong("log", f"a line that is not an event: {line[:500]!r}")
            return
        if event in ("bug", "library warning"):
            self.account.wrong("bug", line.decode())
        elif revealed := forbidden_in(line, self._secrets):
            self.account.wrong("log", f"{revealed!r} in {line[:500]!r}")


def note_stalls(account: Account, lines: Iterable[str]) -> None:
    """Note the callbacks that took too long. lines: what `timed-callbacks` of tests/planted has recorded.

    Collections of garbage are noted apart: the loop of a server whose callbacks are timed leaves more garbage than the usual loop.
    """
    stalls = list[str]()
    for line in lines:
        seconds, _, _, collecting = line.split()[:4]
        account.longest_collection = max(account.longest_collection, float(collecting))
        account.longest_callback = max(account.longest_callback, float(seconds) - float(collecting))
        if float(seconds) - float(collecting) > MAX_CALLBACK_SECONDS:
            stalls.append(line)
    if len(stalls) > account.requests * MOST_STALLS:
        for line in stalls:
            account.wrong("stall", line)


def label_values(metrics: str) -> set[str]:
    """Return the values of all labels in the text of /metrics except the bounds of buckets, which are numbers."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return {value for sample in samples for name, value in sample.labels.items() if name != "le" or not _is_number(value)}


def documented_labels() -> set[str]:
    """Return the values that docs/operations.md lists, and the codes of errors."""
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2]
    return {*re.findall(r"`([A-Za-z0-9_]+)`", table), *BY_CODE, *STAGES, NAME}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def served(root: Path) -> Path:
    """Write a models folder for the fuzzer."""
    for make in (models.sensors, *models.OF_EVERY_HEAD.values()):
        make(root)
    return root


@contextmanager
def fuzzed(folder: Path, scratch: Path, seed: int = 0) -> Iterator[Fuzzer]:
    """Run a server for the fuzzer, with the callbacks of its frontends timed, and note callbacks that took too long."""
    keys, callbacks = scratch / "keys.toml", scratch / "callbacks"
    token = create(keys, NAME, [Scope.INFER, Scope.SESSION, Scope.METRICS], NAME)
    callbacks.touch()
    with pytest.MonkeyPatch.context() as patch:
        plant("timed-callbacks", patch)
        patch.setenv("CALLBACKS", str(callbacks))
        with constants(CONSTANTS), serving(folder, scratch, "--keys", str(keys), **SETTINGS) as server:
            server.client.headers["authorization"] = f"Bearer {token}"
            fuzzer = Fuzzer(server, token, [folder, scratch, ROOT, Path(sys.prefix), Path.home()], seed)
            uvloop.run(fuzzer.warm_up())
            before = callbacks.stat().st_size
            yield fuzzer
            note_stalls(fuzzer.account, callbacks.read_text()[before:].splitlines())


def grown_bytes(samples: Sequence[tuple[int, int]]) -> int:
    """Return how much a process has grown since a fifth of its requests: memory pools have their size by then."""
    warm = next(held for sent, held in samples if sent >= samples[-1][0] / 5)
    return samples[-1][1] - warm
