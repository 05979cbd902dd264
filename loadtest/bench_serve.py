"""`python -m loadtest.bench_serve`: this service beside the plain handler, with the same weights, in one run.

Both run at once and are loaded in turn, so that whatever else the machine does meets both. Each round gives one ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import uvloop

from kernels.bench.report import device_name, slug
from loadtest import discovery, load, report, servers, traffic
from loadtest.bench import described, prepared
from loadtest.callers import Target
from loadtest.load import Figures

OURS, PLAIN = "seqserve", "plain"
MODELS = ("question-type-cnn", "question-type-lstm")
CALLERS = (1, 8, 32, 128)
PACKAGES = ("torch", "fastapi", "uvicorn", "uvloop", "httptools")


@dataclass(frozen=True, slots=True)
class Cell:
    """One server under one number of callers in one round; cpu_ms: of all its processes, for each answer."""

    server: str
    callers: int
    round: int
    figures: Figures
    cpu_ms: float

    def value(self, name: str) -> float:
        """Answers a second, milliseconds at a quantile, or milliseconds of CPU time an answer."""
        if name in report.QUANTILES:
            return report.milliseconds(self.figures)[name]
        return self.figures.rate if name == "answers/s" else self.cpu_ms


ROUNDING = 5e-3
COLUMNS = ("answers/s", *report.QUANTILES, "CPU ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a request failed: then there is nothing to compare."""
    said = _parser().parse_args(arguments)
    machine, failed = device_name(torch.device("cpu")), 0
    for model in said.models:
        cells = list(_measured(model, said.seconds, said.rounds))
        failed += sum(cell.figures.failed for cell in cells)
        print(f"\n{model}, {machine}, {date.today()}: medians of {said.rounds} rounds (lowest to highest)\n")
        print("\n".join(report.table(list(_table(cells)))), flush=True)
        _write(said.out / f"{model}-{slug(machine)}.jsonl", model, machine, cells)
    return 1 if failed else 0


def _measured(name: str, seconds: float, rounds: int) -> Iterator[Cell]:
    folder = servers.MODELS / name / "1"
    with servers.running(*servers.seqserve()) as ours, servers.running(*servers.plain(folder)) as plain:
        model = described(ours.url, name)
        source = discovery.inputs(servers.MODELS, model)
        _agree(ours, plain, source)
        for callers, round in product(CALLERS, range(rounds)):
            for server, running in ((OURS, ours), (PLAIN, plain)):
                cell = _cell(server, running, source, callers, round, seconds)
                print(report.progress(f"{server} {callers}", cell.figures, seconds), file=sys.stderr, flush=True)
                yield cell


def _agree(ours: servers.Server, plain: servers.Server, source: traffic.Traffic) -> None:
    """Nothing is timed before both give the same scores, within what float16 tables round."""
    body = source.body(inputs=50)
    for one, other in zip(*(_scores(server, body) for server in (ours, plain)), strict=True):
        if any(abs(one[label] - other[label]) > ROUNDING for label in one):
            raise SystemExit(f"the servers disagree: {one} and {other}")


def _scores(server: servers.Server, body: dict[str, Any]) -> list[dict[str, float]]:
    asked = urllib.request.Request(f"{server.url}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        return [output["scores"] for output in json.load(answer)["outputs"]]


def _cell(name: str, server: servers.Server, source: traffic.Traffic, callers: int, round: int, seconds: float) -> Cell:
    target = Target.of(server.url, "/infer")
    requests = prepared(target, source, inputs=1)
    uvloop.run(load.closed(target, requests, callers, seconds / 4, lambda _: None))
    before = server.cpu_seconds()
    figures = uvloop.run(load.closed(target, requests, callers, seconds, lambda _: None))
    used = server.cpu_seconds() - before
    return Cell(name, callers, round, figures, 1000 * used / max(1, len(figures.answers)))


def _table(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """Each server's medians, then how many times as much, or as long, the plain handler's is ours."""
    yield ["callers", "server", *(f"{one} ms" if one in report.QUANTILES else one for one in COLUMNS)]
    for callers in CALLERS:
        found = {name: [one for one in cells if one.callers == callers and one.server == name] for name in (OURS, PLAIN)}
        for name, ones in found.items():
            yield [str(callers), name, *(report.spread([one.value(column) for one in ones]) for column in COLUMNS)]
        pairs = list(zip(found[OURS], found[PLAIN], strict=True))
        ratios = [report.spread([ours.value(one) / plain.value(one) for ours, plain in pairs]) for one in COLUMNS]
        yield [str(callers), f"{OURS} / {PLAIN}", *ratios]


def _write(path: Path, model: str, machine: str, cells: Sequence[Cell]) -> None:
    where = report.where(machine, PACKAGES)
    report.write(path, [_record(model, cell) | where for cell in cells])


def _record(model: str, cell: Cell) -> dict[str, Any]:
    figures = {column: round(cell.value(column), 4) for column in COLUMNS}
    return {
        "model": model,
        "server": cell.server,
        "callers": cell.callers,
        "round": cell.round,
        **figures,
        "answers": len(cell.figures.answers),
        "failed": cell.figures.failed,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_serve", description="This service beside a plain handler.")
    parser.add_argument("models", nargs="*", default=MODELS, help="embedded text models, %(default)s unless given")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round, %(default)s unless given")
    parser.add_argument("--rounds", type=int, default=5, help="of each level, %(default)s unless given")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON lines, results/ beside the code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
