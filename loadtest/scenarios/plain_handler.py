"""This service and a plain FastAPI handler with the same weights, under the same load. Each round gives one ratio."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import product
from typing import Any

import torch

from kernels.bench.report import device_name, slug
from loadtest import discovery, report, servers, traffic
from loadtest.bench import request_cycle
from loadtest.callers import Target
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Trial

SUMMARY = "this service and a plain FastAPI handler with the same weights"
SERVICE, PLAIN = "seqserve", "plain"
MODELS = ("question-type-cnn", "question-type-lstm")
CALLERS = (1, 8, 32, 128)
PACKAGES = ("torch", "fastapi", "uvicorn", "uvloop", "httptools")
TOLERANCE = 5e-3
"""Largest difference between two scores: the tables of the service are float16."""
COLUMNS = ("answers/s", "p50_ms", "p90_ms", "p99_ms", "cpu_ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=MODELS, help="embedded text models (default: %(default)s)")
    rounds.add_options(parser, seconds=4.0, rounds=5)


def run(options: argparse.Namespace) -> int:
    """Measure every model. Returns 1 when a request failed, because the servers then did different work."""
    machine, status = device_name(torch.device("cpu")), 0
    for model in options.models:
        trials = list(_trials(model, options.seconds, options.rounds))
        print(f"\n{model}, {machine}, {date.today()}: medians of {options.rounds} rounds (lowest to highest)\n")
        print("\n".join(report.table(list(_table(trials)))), flush=True)
        path = options.out / f"{model}-{slug(machine)}.jsonl"
        status |= rounds.finish(trials, path, report.environment(machine, PACKAGES))
    return status


def _trials(name: str, seconds: float, count: int) -> Iterator[Trial]:
    folder = servers.MODELS / name / "1"
    with servers.running(*servers.seqserve()) as service, servers.running(*servers.plain(folder)) as plain:
        source = discovery.inputs(servers.MODELS, discovery.find(service.url, name))
        _check_agreement(service, plain, source)
        for callers, number, (label, server) in product(CALLERS, range(count), ((SERVICE, service), (PLAIN, plain))):
            target = Target.of(server.url, "/infer")
            requests = request_cycle(target, source, inputs=1)
            figures, before, after = rounds.measure(
                f"{label} {callers}", target, requests, callers, seconds, server.cpu_seconds
            )
            cpu_ms = 1000 * (after - before) / max(1, len(figures.answers))
            case = {"model": name, "server": label, "callers": callers}
            yield Trial(case, number, figures, rounds.values_of(figures) | {"cpu_ms": cpu_ms})


def _check_agreement(service: servers.ServerProcess, plain: servers.ServerProcess, source: traffic.Traffic) -> None:
    """Exit unless both servers return the same scores."""
    body = source.body(inputs=50)
    for ours, theirs in zip(*(_scores(server, body) for server in (service, plain)), strict=True):
        if any(abs(ours[label] - theirs[label]) > TOLERANCE for label in ours):
            raise SystemExit(f"the servers return different scores, so nothing is timed: {ours} and {theirs}")


def _scores(server: servers.ServerProcess, body: dict[str, Any]) -> list[dict[str, float]]:
    request = urllib.request.Request(f"{server.url}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return [output["scores"] for output in json.load(response)["outputs"]]


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield a line for each server, and a line for the ratio of the service to the plain handler."""
    yield ["callers", "server", *rounds.headings(COLUMNS)]
    for callers in CALLERS:
        service, plain = (
            [trial for trial in trials if (trial.case["callers"], trial.case["server"]) == (callers, label)]
            for label in (SERVICE, PLAIN)
        )
        yield [str(callers), SERVICE, *rounds.spreads(service, COLUMNS)]
        yield [str(callers), PLAIN, *rounds.spreads(plain, COLUMNS)]
        yield [str(callers), f"{SERVICE} / {PLAIN}", *rounds.ratios(service, plain, COLUMNS)]
