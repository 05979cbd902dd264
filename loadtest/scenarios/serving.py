"""This service and other model servers, with the same weights and under the same load.

Rounds alternate between the servers. Each round starts each server again, with one model or without. All servers run on the same two
cores, which they share with the load generator. Nothing is timed before its answers have the scores that plain PyTorch computes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadtest import oip_requests, servers
from loadtest.baselines.classifier import CONSTANT, TextClassifier
from loadtest.comparison import models, tables
from loadtest.comparison.contenders import SEQSERVE, SERVERS, Endpoint, Server
from loadtest.comparison.tables import HELD, IN_TIME, NO_MODEL, Case, Measurements
from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job
from loadtest.generator.loops import WRONG
from loadtest.generator.process import run_in_process
from loadtest.requests import Requests
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Trial
from loadtest.traffic import Traffic, words

SUMMARY = "this service and other model servers with the same weights"
CALLERS, RATES = (1, 8, 32, 128), (1000, 2000, 4000, 10000)
OPEN_CONNECTIONS = 128
"""Connections of an open loop; a request waits if no connection is idle, and its latency includes the wait."""
REQUESTS = 500
"""Distinct requests, sent in a cycle."""
CHECK_SECONDS = 0.5
CORES = 2
PACKAGES = ("torch", "uvicorn", "uvloop", "httptools", "grpcio", "msgspec", "tokenizers")


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [server.name for server in SERVERS]
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="compared servers")
    parser.add_argument("--models", nargs="*", choices=models.MODELS, default=models.MODELS, help="compared models")
    parser.add_argument("--callers", type="count", nargs="*", default=CALLERS, help="levels of a closed loop")
    parser.add_argument("--rates", type="count", nargs="*", default=RATES, help="requests a second of an open loop, rising")
    parser.add_argument("--logs", type=Path, default=Path("build/serving"), help="folder of the servers' files and logs")
    rounds.add_options(parser, seconds=3.0, rounds=5)


def run(options: argparse.Namespace) -> int:
    """Measure every server. An interrupt ends the run and keeps its results so far. Returns 1 when a request failed."""
    # A job in the background ignores interrupts, and its servers would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # all processes inherit it
    skipped = {server.name: reason for server in SERVERS if (reason := server.why_skipped()) and server.name in options.servers}
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        models.write(Path(folder))
        for trial in _trials(Path(folder), options, skipped):
            trials.append(trial)  # an interrupt keeps the trials before it
    measured = Measurements(trials)
    options.rounds = len({trial.round for trial in trials})
    status = rounds.publish("serving", trials, tables.of(measured), options, PACKAGES)
    for name, reason in skipped.items():
        print(f"{name} was skipped: {reason}")
    return 1 if SEQSERVE in skipped else status


def _trials(folder: Path, options: argparse.Namespace, skipped: dict[str, str]) -> Iterator[Trial]:
    """Yield the trials of all rounds. A server that does not start or answers wrongly is added to `skipped`."""
    works = [*(Work.of(folder, model) for model in options.models), Work(folder)]
    for number in range(options.rounds):
        for work in works:
            for server in SERVERS:
                if server.name in options.servers and server.name not in skipped and (work.model or server.constant):
                    try:
                        yield from _measure(server, work, number, options)
                    except CannotMeasure as error:
                        skipped[server.name] = str(error)
                        print(f"{server.name} is skipped from now on: {error}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Work:
    """A model in `folder`, texts for it, and their scores; without a model, a server answers with a constant."""

    folder: Path
    model: str | None = None
    texts: Sequence[str] = ("a constant answer",)
    scores: Sequence[list[float]] = (list(CONSTANT),)

    @classmethod
    def of(cls, folder: Path, model: str) -> Work:
        version = folder / model / "1"
        description = {"name": model, "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 512}}
        traffic = Traffic(description, words((version / "tokenizer.json").read_text()))
        texts = [str(traffic.input()) for _ in range(REQUESTS)]
        return cls(folder, model, texts, TextClassifier(version).scores(texts))

    def requests(self, endpoint: Endpoint) -> Requests:
        requests = [endpoint.write(endpoint.model or str(self.model), text) for text in self.texts]
        return Requests(endpoint.transport, oip_requests.PATH, requests, endpoint.reader, list(self.scores))


def _measure(server: Server, work: Work, number: int, options: argparse.Namespace) -> Iterator[Trial]:
    """Start a server and load each of its endpoints: closed loops, then open loops up to the first rate that it does not hold."""
    name = work.model or NO_MODEL
    scratch = options.logs.resolve() / f"{server.name}-{name}".replace(" ", "-")
    with server.running(work.folder, work.model, scratch) as process:
        for endpoint in server.endpoints:
            requests = work.requests(endpoint)
            _check(requests.job(process, seconds=CHECK_SECONDS), server, endpoint)
            cases = [Case(name, server.name, endpoint.name, callers) for callers in options.callers]
            cases += [Case(name, server.name, endpoint.name, rate=rate) for rate in options.rates if work.model]
            for case in cases:
                load = {"callers": case.callers or OPEN_CONNECTIONS, "rate": case.rate, "seed": number}
                result, values = requests.measure(process, seconds=options.seconds, warm_up=options.seconds / 4, **load)
                in_time = {IN_TIME: result.answers / max(1, result.due)} if case.rate else {}
                yield Trial.of(case.labels(), number, result, values | in_time)
                if case.rate and in_time[IN_TIME] < HELD:
                    break


def _check(job: Job, server: Server, endpoint: Endpoint) -> None:
    """Wait until the endpoint answers. Raises CannotMeasure when it does not, or when its scores differ from the model's."""
    deadline = time.monotonic() + servers.START_SECONDS
    result = run_in_process(job)
    while not result.answers and WRONG not in result.failures and time.monotonic() < deadline:
        result = run_in_process(job)
    if WRONG in result.failures:
        raise CannotMeasure(f"{server.name}, {endpoint.name}: it returns other scores than the model, so it is not timed")
    if not result.answers:
        raise CannotMeasure(f"{server.name}, {endpoint.name}: it does not answer: {result.failures}")
