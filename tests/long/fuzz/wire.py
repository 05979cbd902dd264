"""`python -m tests.long.fuzz.wire --requests 2000000`: send hostile traffic to a new service, and account for every reply and what is left.

tests/long/test_fuzz.py runs a part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from service.access.keys import create
from service.access.scopes import Scope
from service.errors import BY_CODE
from tests import models
from tests.accumulator import at_rest
from tests.long.fuzz.traffic import SOURCES, Conversation, Judgement, pieces
from tests.planted import constants, plant
from tests.serving import Server, serving
from tests.steady import processes, resident_bytes

ROUNDS, LONGEST_ROUND = 40, 20_000
"""Least number of rounds, and most requests of one. A round ends when all its connections are closed; then the memory is sampled."""
CONNECTIONS = 400
"""Connections at once. Many of them wait for the limit of an incomplete request."""
SHARES = {"http": 0.9, "grpc": 0.1}
"""Shares of the connections."""
LEAVES = 0.03
"""Share of the clients that abort their connection."""
QUIET_SECONDS, PATIENCE_SECONDS = 1.0, 60.0
"""A client that gets nothing for the first time closes, where the service waits for more without a limit. A connection that is open for
the second is lost."""
WARM_UP_CONNECTIONS = 500
MAX_CALLBACK_SECONDS, MOST_STALLS = 0.010, 1e-4
"""No request may occupy the event loop for longer. This is processor time. On a busy machine a callback that is short everywhere else may
take 20 ms of it, once in 50,000 requests: its caches are cold, or the time of the kernel counts."""
MOST_METRICS_BYTES, MOST_GROWTH_BYTES = 1 << 20, 8 << 20
"""Of /metrics, and growth of a process."""
ROOT = Path(__file__).resolve().parents[3]
MOST_FAULTS = 5
"""Descriptions of a kind that are kept."""
SETTINGS = {"idle_seconds": "20", "session_idle_seconds": "2"}
CONSTANTS = {"service.frontend.guards.connection_guard.RECEIVE_SECONDS": 1, "service.access.refused_keys.DELAY_SECONDS": 0}
"""Connections whose requests do not end wait for this long. Wrong keys do not delay the run."""
STAGES = ("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total")
NAME = "fuzzed"
"""Name of the tenant whose key the fuzzer has."""
KNOWN = {"model": "tagger", "inputs": ["how far is the sea"]}
TRACES = re.compile(rb'Traceback|site-packages|\.py"|\.py:\d|line \d+, in ')


async def talk(address: str, conversation: Conversation, parts: Iterable[bytes], *, quiet: bool, leaves: bool) -> bytes | None:
    """Return the bytes received until the connection ended or the last request was answered; None if neither happened.

    quiet: whether this side closes when nothing more arrives. leaves: whether it aborts the connection at once.
    """
    target, received = urlsplit(address), b""
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            with suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):  # uvloop: a write after the end
                if conversation.opening:
                    writer.write(conversation.opening)
                    received = await reader.readuntil(b"\r\n\r\n")
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0)
                while not leaves and not conversation.answered(received):
                    try:
                        async with asyncio.timeout(QUIET_SECONDS if quiet else None):
                            part = await reader.read(1 << 16)
                    except TimeoutError:
                        break
                    if not part:
                        break
                    received += part
    except TimeoutError:
        return None
    finally:
        writer.transport.abort()
    return received


async def send(address: str, data: bytes) -> bytes:
    """Send bytes on a separate connection, and return the bytes received until it ends."""
    received = await talk(address, Conversation(data, lambda _: Judgement()), [data], quiet=False, leaves=False)
    assert received is not None, "the connection stayed open"
    return received


@dataclass
class Account:
    """The replies. requests: replies to fuzzed requests, and connections that ended without a reply."""

    requests: int = 0
    replies: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def wrong(self, finding: str, fault: str) -> None:
        self.findings[finding] += 1
        if self.findings[finding] <= MOST_FAULTS:
            self.faults.append(f"{finding}: {fault}")

    def __str__(self) -> str:
        common = ", ".join(f"{status} {count}" for status, count in sorted(self.replies.items()))
        grown = ", ".join(f"{name} {grown_bytes(samples) / 2**20:+.2f}" for name, samples in self.memory.items())
        return f"{self.requests} requests, MiB: {grown}; {common}; {self.faults or 'nothing wrong'}"


def grown_bytes(samples: list[tuple[int, int]]) -> int:
    """Return how much a process has grown since a fifth of its requests: memory pools have their size by then."""
    return samples[-1][1] - next(held for sent, held in samples if sent >= samples[-1][0] / 5)


class Fuzzer:
    """Sends mutated requests to a server with keys."""

    def __init__(self, server: Server, token: str, folders: Iterable[Path], seed: int = 0) -> None:
        """token: a key of the server. folders: whose paths no reply may contain."""
        self._server, self._token, self._seed = server, token, seed
        self._secrets = [word.encode() for word in (token, token.partition(".")[2], *map(str, folders))]
        self._addresses = dict.fromkeys(SHARES, server.address) | {"grpc": f"//{server.grpc}"}
        self._processes = processes(server)
        self._log_bytes = server.log_bytes
        self._known_labels = label_values(server.scrape()) | documented_labels()
        self._answer = self._known()
        self._numbers = iter(range(sys.maxsize))
        self.account = Account()

    def run(self, requests: int) -> None:
        """Send rounds until this many requests are answered. Then check the metrics and the log of the server."""
        account, size = self.account, min(LONGEST_ROUND, max(1, requests // ROUNDS))
        while account.requests < requests:
            uvloop.run(self._round(min(requests, account.requests + size)))
            if (answer := self._known()) != self._answer:
                account.wrong("known answer", f"{answer!r} after {account.requests} requests")
            self._sample()
        self._check_server()

    async def warm_up(self) -> None:
        """Send some connections that do not count: the first request of each kind takes longer."""
        await asyncio.gather(*(self._connect(-1 - number) for number in range(WARM_UP_CONNECTIONS)))
        self.account = Account()

    async def _round(self, until: int) -> None:
        async def work() -> None:
            while self.account.requests < until:
                await self._connect(next(self._numbers))

        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(work())

    async def _connect(self, number: int) -> None:
        chance, account = random.Random(f"{self._seed} {number}"), self.account
        [kind] = chance.choices([*SHARES], [*SHARES.values()])
        conversation = SOURCES[kind](self._token, chance)
        parts, leaves = pieces(conversation.data, chance), chance.random() < LEAVES
        try:
            received = await talk(self._addresses[kind], conversation, parts, quiet=kind != "http", leaves=leaves)
        except OSError as error:
            account.wrong("connection", f"{number}: {error}")
            return
        if received is None:
            account.wrong("hanging", f"connection {number} stayed open: {conversation.data[:500]!r}")
        judgement = conversation.judge(received) if received and not leaves else Judgement()
        account.requests += max(1, judgement.replies.total())
        account.replies.update({f"{kind} {status}": count for status, count in judgement.replies.items()})
        for fault in judgement.faults:
            account.wrong("reply", f"connection {number}: {fault}")
        for text in (received or b"", *judgement.texts):
            if revealed := self._forbidden_in(text):
                account.wrong("leak", f"connection {number}: {revealed!r} in {text[:1000]!r}")

    def _forbidden_in(self, data: bytes) -> bytes | None:
        """Return a text in the data that no reply and no line of the log may contain: a secret, or a trace of the service's code."""
        trace = TRACES.search(data)
        return next((word for word in self._secrets if word in data), None) or (trace and trace[0])

    def _known(self) -> object:
        """Return the answer to a request whose answer stays the same, or the reply in its place."""
        reply = self._server.client.post("/infer", json=KNOWN)
        return reply.json().get("outputs", reply.text)

    def _sample(self) -> None:
        with suppress(ValueError):  # a line of the log that is not an event; `_check_server` reports it
            if (running := processes(self._server)) != self._processes:
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
            try:
                wrong = json.loads(line)["event"] in ("bug", "library warning") or self._forbidden_in(line) is not None
            except (ValueError, KeyError, TypeError):
                wrong = True
            if wrong:
                account.wrong("log", repr(line[:1000]))


def note_stalls(account: Account, lines: list[str]) -> None:
    """Note the callbacks that took too long. lines: what `timed-callbacks` of tests/planted has recorded.

    Collections of garbage do not count: the loop of a server whose callbacks are timed leaves more garbage than the usual loop.
    """
    records = [(line, [float(line.split()[place]) for place in (0, 3)]) for line in lines]
    stalls = [line for line, (seconds, collecting) in records if seconds - collecting > MAX_CALLBACK_SECONDS]
    if len(stalls) > account.requests * MOST_STALLS:
        for line in stalls:
            account.wrong("stall", line)


def label_values(metrics: str) -> set[str]:
    """Return the values of all labels in the text of /metrics except the bounds of buckets."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return {value for sample in samples for name, value in sample.labels.items() if name != "le"}


def documented_labels() -> set[str]:
    """Return the values that docs/operations.md lists, and the codes of errors."""
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2]
    return {*re.findall(r"`([A-Za-z0-9_]+)`", table), *BY_CODE, *STAGES, NAME}


@contextmanager
def fuzzed(scratch: Path, seed: int = 0) -> Iterator[Fuzzer]:
    """Run a server for the fuzzer, with the callbacks of its frontends timed, and note callbacks that took too long."""
    folder, keys, callbacks = scratch / "models", scratch / "keys.toml", scratch / "callbacks"
    for make in (models.sensors, *models.OF_EVERY_HEAD.values()):
        make(folder)
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


def main() -> int:
    """Return the exit status: 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.long.fuzz.wire", description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seqserve-fuzz-") as scratch, fuzzed(Path(scratch), options.seed) as fuzzer:
        fuzzer.run(options.requests)
    print(fuzzer.account)
    return int(bool(fuzzer.account.findings))


if __name__ == "__main__":
    sys.exit(main())
