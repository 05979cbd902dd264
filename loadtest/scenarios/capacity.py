"""The largest rate of the service by number of frontends and size of a batch, and its latency at a share of that rate.

Several generator processes load one server: first in a closed loop, then in open loops at shares of the rate of the closed loop.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from loadtest import discovery, servers
from loadtest.bench import CONNECTIONS, GRACE_SECONDS
from loadtest.callers import Target
from loadtest.generator import websocket
from loadtest.generator.job import Job, Result
from loadtest.generator.process import run_in_processes
from loadtest.load import nearest_rank
from loadtest.report import QUANTILES
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Trial, Values
from loadtest.servers import ServerProcess
from loadtest.traffic import Traffic

SUMMARY = "the largest rate of the service by number of frontends and size of a batch, and its latency below it"
QUESTIONS, SENSOR = "question-type-cnn", "sensor-forecast"
MANY = 64
"""Inputs of a large request."""
FEWER = 4
"""Requests with many inputs have this many times fewer callers, and never more than the queue of an engine holds."""
REQUESTS = 200
"""Distinct requests of each kind, sent in a cycle."""
SESSIONS = 256
STEPS, WAITING = 64, 16
"""Time steps in a batch and sequences in the queue of an engine for each sequence in a batch, as in the service's defaults."""
COLUMNS = ("answers/s", "inputs/s", "p50_ms", "p99_ms", "frontends_us", "engine_us", "generators_us", "generators_busy")
PACKAGES = ("torch", "uvicorn", "uvloop", "httptools", "msgspec", "orjson")


class Requests(NamedTuple):
    """The requests of one kind of client, as in `generator.job.Job`. inputs: sequences of a request."""

    transport: str
    path: str
    requests: list[bytes]
    reader: str
    inputs: int = 1


class Clients(NamedTuple):
    """Writes the requests to a server. models: its models folder."""

    url: str
    models: Path

    def text(self) -> Requests:
        return self._questions(self._texts(), 1)

    def texts(self) -> Requests:
        return self._questions(self._texts(), MANY)

    def ids(self) -> Requests:
        return self._questions(Traffic(discovery.find(self.url, QUESTIONS)), MANY)

    def session(self) -> Requests:
        """Chunks for SESSIONS sessions in turn."""
        bodies = [
            {"model": SENSOR, "inputs": [rows], "session": f"capacity-{number % SESSIONS}"}
            for number, rows in enumerate(self._chunks(2 * SESSIONS))
        ]
        return Requests("http", "", [self._post(body) for body in bodies], "session")

    def socket_text(self) -> Requests:
        return self._socket(websocket.TEXT_FRAME, [json.dumps({"input": rows}).encode() for rows in self._chunks(REQUESTS)])

    def socket_binary(self) -> Requests:
        chunks = self._chunks(REQUESTS)
        return self._socket(websocket.BINARY_FRAME, [np.array(rows, "<f4").tobytes() for rows in chunks])

    def _texts(self) -> Traffic:
        return discovery.inputs(self.models, discovery.find(self.url, QUESTIONS))

    def _questions(self, traffic: Traffic, inputs: int) -> Requests:
        return Requests("http", "", [self._post(traffic.body(inputs)) for _ in range(REQUESTS)], "answer", inputs)

    def _chunks(self, count: int) -> list[Any]:
        """Return chunks of one row for the sensor model."""
        traffic = Traffic(discovery.find(self.url, SENSOR))
        return [traffic.input(1) for _ in range(count)]

    def _post(self, body: dict[str, Any]) -> bytes:
        return Target.of(self.url, "/infer").request(json.dumps(body).encode())

    def _socket(self, kind: int, payloads: list[bytes]) -> Requests:
        return Requests("websocket", f"/stream?model={SENSOR}", [websocket.frame(kind, each) for each in payloads], "session")


KINDS: dict[str, Callable[[Clients], Requests]] = {
    "text": Clients.text,
    "texts": Clients.texts,
    "ids": Clients.ids,
    "session": Clients.session,
    "socket-text": Clients.socket_text,
    "socket-binary": Clients.socket_binary,
}
"""One text a request, 64 texts, 64 lists of token ids; and chunks of one row over POST /infer and over a WebSocket."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the clients send")
    parser.add_argument("--frontends", type=int, nargs="+", default=[1], help="numbers of frontends")
    parser.add_argument("--batches", type=int, nargs="+", default=[64], help="most sequences in a batch")
    parser.add_argument("--generators", type=int, default=1, help="load generator processes")
    parser.add_argument("--callers", type=int, nargs="+", default=[32], help="concurrent callers of each generator")
    parser.add_argument(
        "--share", type=float, nargs="*", default=[0.7], help="rates of open loops as shares of the closed loop's"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--models", type=Path, default=servers.MODELS, help="models folder")
    parser.add_argument("--log", type=Path, help="log file of the servers")
    rounds.add_options(parser, seconds=3.0, rounds=3)


def run(options: argparse.Namespace) -> int:
    """Measure every kind with every number of frontends. Returns 1 when a request failed."""
    trials = [trial for number in range(options.rounds) for trial in _round(number, options)]
    return rounds.publish("capacity", trials, [list(_table(trials))], options, PACKAGES, options.device)


def _round(number: int, options: argparse.Namespace) -> Iterator[Trial]:
    for frontends, batch in product(options.frontends, options.batches):
        with _serving(frontends, batch, options) as server:
            for kind, callers in product(options.kinds, options.callers):
                requests = KINDS[kind](Clients(server.url, options.models))
                callers = callers if requests.inputs == 1 else _fewer(callers, batch, options.generators)
                sizes = {"frontends": frontends, "batch": batch, "generators": options.generators, "callers": callers}
                yield from _measure(server, requests, {"request": kind} | sizes, number, options)


def _fewer(callers: int, batch: int, generators: int) -> int:
    """Return the callers of each generator for requests with many inputs."""
    return max(1, min(callers // FEWER, WAITING * batch // MANY // generators))


@contextmanager
def _serving(frontends: int, batch: int, options: argparse.Namespace) -> Iterator[ServerProcess]:
    """Run a server with batches of at most `batch` sequences."""
    limits = {"max_batch_sequences": batch, "max_batch_tokens": STEPS * batch, "max_waiting": WAITING * batch}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "settings.toml")
        config.write_text("".join(f"{name} = {value}\n" for name, value in limits.items()))
        flags = ("--models", str(options.models), "--device", options.device, "--frontends", str(frontends))
        with servers.running(*servers.seqserve(*flags, "--config", str(config)), log=options.log) as server:
            yield server


def _measure(
    server: ServerProcess, requests: Requests, case: dict[str, Any], number: int, options: argparse.Namespace
) -> Iterator[Trial]:
    """Yield the trials of the closed loop and of each open loop."""
    closed = _trial(server, requests, case | {"loop": "closed"}, number, options)
    yield closed
    for share in options.share:
        yield _trial(server, requests, case | {"loop": f"{share:.0%}"}, number, options, share * closed.values["answers/s"])


def _trial(
    server: ServerProcess,
    requests: Requests,
    case: dict[str, Any],
    number: int,
    options: argparse.Namespace,
    rate: float = 0.0,
) -> Trial:
    """Load the server. rate: requests a second of an open loop, or 0 for a closed loop."""
    roles = [server.pids(f"service.{role}") for role in ("frontend", "engine")]
    host, _, port = server.url.partition("//")[2].partition(":")
    job = Job(
        requests.transport,
        host,
        int(port),
        requests.path,
        requests.requests,
        requests.reader,
        [[]] * len(requests.requests),
        callers=case["callers"],
        seconds=options.seconds,
        warm_up=options.seconds / 4,
        rate=rate / options.generators,
        grace=GRACE_SECONDS,
        pids=[*roles[0], *roles[1]],
    )
    if rate and requests.inputs == 1:
        job.callers = max(job.callers, CONNECTIONS // options.generators)
    jobs = [structs.replace(job, seed=number * options.generators + each) for each in range(options.generators)]
    result = run_in_processes(jobs)
    values = _values(result, len(roles[0]), options.generators) | {
        "inputs/s": requests.inputs * result.answers / result.seconds
    }
    print(f"  {rounds.label(case)}: {values['answers/s']:.0f}/s, {sum(result.failures.values())} failed", file=sys.stderr)
    return Trial(case, number, result.answers, Counter(result.failures), values)


def _values(result: Result, frontends: int, generators: int) -> Values:
    """Return the rate, the latency, and the processor time in µs for each answer. frontends: the first processes of the server."""
    per_answer = 1e6 / max(1, result.answers)
    latencies = result.ordered_latencies()
    times = {f"{name}_ms": 1000 * nearest_rank(latencies, share) if latencies else 0.0 for name, share in QUANTILES.items()}
    return times | {
        "answers/s": result.answers / result.seconds,
        "frontends_us": per_answer * sum(result.server_cpu_seconds[:frontends]),
        "engine_us": per_answer * sum(result.server_cpu_seconds[frontends:]),
        "generators_us": per_answer * result.cpu_seconds,
        "generators_busy": result.cpu_seconds / (generators * result.seconds),
    }


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each case."""
    yield ["request", "frontends", "batch", "callers", "loop", *rounds.headings(COLUMNS)]
    for case in rounds.by_case(trials):
        labels = case[0].case
        callers = f"{labels['generators']} x {labels['callers']}"
        yield [
            labels["request"],
            str(labels["frontends"]),
            str(labels["batch"]),
            callers,
            labels["loop"],
            *rounds.spreads(case, COLUMNS),
        ]
