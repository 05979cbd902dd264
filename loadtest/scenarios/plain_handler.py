"""This service and a plain FastAPI handler with the same weights, under the same load. Each round gives one ratio."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from loadtest import discovery, servers, traffic
from loadtest.bench import request_cycle
from loadtest.callers import Target
from loadtest.discovery import CannotMeasure
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Contender, Trial

SUMMARY = "this service and a plain FastAPI handler with the same weights"
SERVICE, PLAIN = "seqserve", "plain"
MODELS = ("question-type-cnn", "question-type-lstm")
CALLERS = (1, 8, 32, 128)
PACKAGES = ("torch", "fastapi", "uvicorn", "uvloop", "httptools")
TOLERANCE = 5e-3
"""Largest difference between two scores: the tables of the service are float16."""
COLUMNS = ("answers/s", "p50_ms", "p90_ms", "p99_ms", "cpu_ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=MODELS, help="embedded text models")
    parser.add_argument("--callers", type=int, nargs="+", default=CALLERS, help="levels of concurrent callers")
    rounds.add_options(parser, seconds=4.0, rounds=5)


def run(options: argparse.Namespace) -> int:
    """Measure every model. Returns 1 when a request failed, because the servers then did different work."""
    status = 0
    for model in options.models:
        trials = list(_trials(model, options))
        status |= rounds.publish(model, trials, [list(_table(trials))], options, PACKAGES)
    return status


def _trials(name: str, options: argparse.Namespace) -> Iterator[Trial]:
    folder = servers.MODELS / name / "1"
    with servers.all_running(servers.seqserve(), servers.plain(folder)) as (service, plain):
        source = discovery.inputs(servers.MODELS, discovery.find(service.url, name))
        _check_agreement(service, plain, source)
        targets = [(label, server, Target.of(server.url, "/infer")) for label, server in ((SERVICE, service), (PLAIN, plain))]
        for callers in options.callers:
            contenders = [
                Contender(
                    {"model": name, "server": label, "callers": callers},
                    target,
                    request_cycle(target, source, inputs=1),
                    callers,
                    server.cpu_seconds,
                    lambda figures, before, after: ({"cpu_ms": 1000 * (after - before) / max(1, len(figures.answers))}, {}),
                )
                for label, server, target in targets
            ]
            yield from rounds.alternate(contenders, options)


def _check_agreement(service: servers.ServerProcess, plain: servers.ServerProcess, source: traffic.Traffic) -> None:
    """Exit unless both servers return the same scores."""
    body = source.body(inputs=50)
    for ours, theirs in zip(*(_scores(server, body) for server in (service, plain)), strict=True):
        if any(abs(ours[label] - theirs[label]) > TOLERANCE for label in ours):
            raise CannotMeasure(f"the servers return different scores, so nothing is timed: {ours} and {theirs}")


def _scores(server: servers.ServerProcess, body: dict[str, Any]) -> list[dict[str, float]]:
    request = urllib.request.Request(f"{server.url}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return [output["scores"] for output in json.load(response)["outputs"]]


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield a line for each server, and a line for the ratio of the service to the plain handler."""
    yield ["callers", "server", *rounds.headings(COLUMNS)]
    for service, plain in zip(*[iter(rounds.by_case(trials))] * 2, strict=True):
        callers = str(service[0].case["callers"])
        yield [callers, SERVICE, *rounds.spreads(service, COLUMNS)]
        yield [callers, PLAIN, *rounds.spreads(plain, COLUMNS)]
        yield [callers, f"{SERVICE} / {PLAIN}", *rounds.ratios(service, plain, COLUMNS)]
