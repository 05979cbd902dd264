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

import numpy as np

from loadtest import report, servers, synthetic_models
from loadtest.bench import CONNECTIONS, GRACE_SECONDS
from loadtest.discovery import CannotMeasure
from loadtest.generator.job import Result
from loadtest.generator.process import run_in_process
from loadtest.requests import Requests
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import RATE, Trial
from loadtest.servers import ServerProcess
from loadtest.target import JSON, Target
from service.access.keys import create
from service.access.scopes import Scope
from service.modeling.spec import SequenceInput
from service.modeling.spec.layers import EmbeddingLayer, LSTMLayer

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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--units", type="count", default=512, help="units of the LSTM")
    parser.add_argument("--steps", type="count", default=64, help="time steps of a request")
    parser.add_argument("--share", type="amount", default=0.1, help="rate of the quiet tenant as a share of the largest rate")
    parser.add_argument(
        "--noise", type="amount", default=20.0, help="rate of the noisy tenant as a multiple of the quiet tenant's"
    )
    parser.add_argument("--budget", type="amount", default=1.0, help="batch_budget_ms of the service")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--log", type=Path, help="log file of the servers")
    rounds.add_options(parser, seconds=10.0, rounds=3)


def run(options: argparse.Namespace) -> int:
    """Measure the quiet tenant in all cases. Returns 1 when one of its requests failed."""
    with tempfile.TemporaryDirectory() as folder, _serving(Path(folder), options) as (server, tokens):
        trials = [trial for number in range(options.rounds) for trial in _round(server, tokens, number, options)]
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


def _round(server: ServerProcess, tokens: dict[str, str], number: int, options: argparse.Namespace) -> Iterator[Trial]:
    """Measure the largest rate, and then the quiet tenant in each case at a share of it."""

    def load(rates: dict[str, float]) -> list[Result]:
        """Load the server with several keys at the same time: requests a second by key, 0 for a closed loop."""
        jobs = [
            _requests(tokens[key], seed, options.steps).job(server, callers=CONNECTIONS, rate=rate, seed=seed, **duration)
            for seed, (key, rate) in enumerate(rates.items(), len(rates) * number)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(run_in_process, jobs))

    duration = {"seconds": options.seconds, "warm_up": options.seconds / 4, "grace": GRACE_SECONDS}
    [full] = load({NOISY: 0.0})
    if not full.answers:
        raise CannotMeasure(f"no request was answered: {full.failures}")
    quiet = options.share * full.rate
    print(f"  largest rate {full.rate:.0f}/s", file=sys.stderr)
    for case in (ALONE, BESIDE, UNFAIR):
        noise = {NOISE[case]: options.noise * quiet} if case in NOISE else {}
        result, *others = load({QUIET: quiet, **noise})
        yield Trial.of({"case": case}, number, result, {"noise_per_second": sum(other.rate for other in others)})


def _requests(token: str, seed: int, steps: int) -> Requests:
    """Return the requests of the holder of a key."""
    chance, target = np.random.default_rng(seed), Target("127.0.0.1", 0, "/infer")
    bodies = [{"model": MODEL, "inputs": [chance.integers(0, VOCABULARY, steps).tolist()]} for _ in range(REQUESTS)]
    headers = (JSON, f"Authorization: Bearer {token}")
    return Requests("http", "", [target.request(json.dumps(body).encode(), *headers) for body in bodies], "answer")


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each case."""
    yield ["case", *rounds.headings(COLUMNS), *[f"{name} / alone" for name in rounds.headings(RATIOS)]]
    alone, *_ = cases = rounds.by_case(trials)
    for case in cases:
        ratios = [report.spread(rounds.ratios(case, alone, name)) for name in RATIOS]
        yield [case[0].case["case"], *rounds.spreads(case, COLUMNS), *ratios]
