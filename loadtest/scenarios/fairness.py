"""The latency of a quiet tenant, alone and during the load of a tenant that sends twenty times as much, which overloads the service.

In the last case both use keys of one tenant, so that their requests wait in the order of their arrival.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loadtest import report, servers, synthetic_models
from loadtest.bench import CONNECTIONS, GRACE_SECONDS
from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Job, Result
from loadtest.generator.process import run_in_process
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import RATE, Trial
from loadtest.servers import ServerProcess
from loadtest.target import JSON, Target
from service.access.keys import create
from service.access.scopes import Scope
from service.modeling.spec import EmbeddingLayer, LSTMLayer, SequenceInput

SUMMARY = "the latency of one tenant beside another that sends twenty times as much"
MODEL, VOCABULARY = "fairness", 1000
QUIET, NOISY, SAME = "quiet", "noisy", "same"
"""Keys. SAME belongs to the tenant of QUIET."""
ALONE, BESIDE, UNFAIR = "alone", "beside a noisy tenant", "beside noise of its own tenant"
NOISE = {BESIDE: NOISY, UNFAIR: SAME}
REQUESTS = 64
"""Distinct requests, sent in a cycle."""
COLUMNS = (RATE, "p50_ms", "p99_ms", "noise_per_second")
RATIOS = ("p50_ms", "p99_ms")
PACKAGES = ("torch", "uvicorn", "uvloop", "httptools", "msgspec")


class Load(NamedTuple):
    """Requests of the holder of a key. rate: requests a second, 0 for a closed loop."""

    key: str
    rate: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--units", type=int, default=512, help="units of the LSTM")
    parser.add_argument("--steps", type=int, default=64, help="time steps of a request")
    parser.add_argument("--share", type=float, default=0.1, help="rate of the quiet tenant as a share of the largest rate")
    parser.add_argument(
        "--noise", type=float, default=20.0, help="rate of the noisy tenant as a multiple of the quiet tenant's"
    )
    parser.add_argument("--budget", type=float, default=1.0, help="batch_budget_ms of the service")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--log", type=Path, help="log file of the servers")
    rounds.add_options(parser, seconds=10.0, rounds=3)


def run(options: argparse.Namespace) -> int:
    """Measure the quiet tenant in all cases. Returns 1 when one of its requests failed."""
    with tempfile.TemporaryDirectory() as folder, _serving(Path(folder), options) as (server, tokens):
        bench = _Bench(server, tokens, options)
        trials = [trial for number in range(options.rounds) for trial in bench.round(number)]
    return rounds.publish("fairness", trials, [list(_table(trials))], options, PACKAGES, options.device)


@contextmanager
def _serving(folder: Path, options: argparse.Namespace) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """Run a server with a recurrent model, and yield it with the tokens of its keys."""
    ids = SequenceInput(kind="ids", vocabulary=VOCABULARY, max_steps=options.steps)
    layers = EmbeddingLayer(kind="embedding", width=64), LSTMLayer(kind="lstm", hidden=options.units)
    synthetic_models.write(folder / "models", MODEL, ids, *layers, precision="float32")
    file = folder / "keys.toml"
    tokens = {key: create(file, key, [Scope.INFER], tenant) for key, tenant in ((QUIET, QUIET), (NOISY, NOISY), (SAME, QUIET))}
    config = folder / "settings.toml"
    config.write_text(f"batch_budget_ms = {options.budget}\n")
    flags = ("--models", str(folder / "models"), "--device", options.device, "--keys", str(file), "--config", str(config))
    with servers.running(*flags, log=options.log) as server:
        yield server, tokens


class _Bench:
    """Loads one server."""

    def __init__(self, server: ServerProcess, tokens: dict[str, str], options: argparse.Namespace) -> None:
        self._server = server
        self._tokens = tokens
        self._options = options

    def round(self, number: int) -> Iterator[Trial]:
        """Measure the largest rate, and then the quiet tenant in each case at a share of it."""
        [full] = self._run([Load(NOISY, 0.0)], number)
        if not full.answers:
            raise CannotMeasure(f"no request was answered: {full.failures}")
        quiet = self._options.share * full.rate
        print(f"  largest rate {full.rate:.0f}/s", file=sys.stderr)
        for case in (ALONE, BESIDE, UNFAIR):
            noise = [Load(NOISE[case], self._options.noise * quiet)] if case in NOISE else []
            result, *others = self._run([Load(QUIET, quiet), *noise], number)
            values = {"noise_per_second": sum(other.rate for other in others)}
            yield Trial.of({"case": case}, number, result, values)

    def _run(self, loads: Sequence[Load], number: int) -> list[Result]:
        """Run loads at the same time."""
        jobs = [self._job(load, len(loads) * number + place) for place, load in enumerate(loads)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(run_in_process, jobs))

    def _job(self, load: Load, seed: int) -> Job:
        target = Target.of(self._server.url, "/infer")
        chance = np.random.default_rng(seed)
        bodies = [
            {"model": MODEL, "inputs": [chance.integers(0, VOCABULARY, self._options.steps).tolist()]} for _ in range(REQUESTS)
        ]
        key = f"Authorization: Bearer {self._tokens[load.key]}"
        requests = [target.request(json.dumps(body).encode(), JSON, key) for body in bodies]
        seconds = self._options.seconds
        duration = {"seconds": seconds, "warm_up": seconds / 4, "grace": GRACE_SECONDS}
        return Job.http(target, requests, callers=CONNECTIONS, rate=load.rate, seed=seed, **duration)


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each case."""
    yield ["case", *rounds.headings(COLUMNS), *[f"{name} / alone" for name in rounds.headings(RATIOS)]]
    alone, *_ = cases = rounds.by_case(trials)
    for case in cases:
        ratios = [report.spread(rounds.ratios(case, alone, name)) for name in RATIOS]
        yield [case[0].case["case"], *rounds.spreads(case, COLUMNS), *ratios]
