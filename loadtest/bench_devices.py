"""`python -m loadtest.bench_devices`: this service on one device and on several, with a model that keeps a device busy."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch
import uvloop

from kernels.bench.report import device_name, slug
from loadtest import load, made_up, report, servers
from loadtest.callers import Target
from loadtest.load import Figures
from service.modeling.spec import EmbeddingLayer, LSTMLayer, SequenceInput

MODEL, VOCABULARY = "lstm-deep", 1000
INPUTS = 64
"""Sequences of a request: a full turn."""
REQUESTS = 16
"""Different ones, sent in turn."""
CALLERS_EACH = 8
"""For each device: it has always another turn before it."""
SETTINGS = "max_batch_tokens = 65536\nmax_waiting = 4096\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a request failed."""
    said = _parser().parse_args(arguments)
    devices: list[str] = said.devices.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        models, config = Path(scratch) / "models", Path(scratch) / "settings.toml"
        _model(models, said.hidden, said.steps)
        config.write_text(SETTINGS)
        levels = [devices[:count] for count in (1, len(devices))]
        rounds = [[_figures(models, config, level, said) for level in levels] for _ in range(said.rounds)]
    machine = device_name(torch.device(devices[0]))
    print(f"{MODEL}, 4 x {said.hidden} units, {said.steps} steps, {INPUTS} sequences a request, on {machine}, {date.today()}\n")
    print("\n".join(_table(levels, rounds)) + "\n")
    report.write(said.out / f"devices-{slug(machine)}.jsonl", _records(levels, rounds, said, machine))
    return 1 if any(figures.failed for round in rounds for figures in round) else 0


def _figures(models: Path, config: Path, devices: Sequence[str], said: argparse.Namespace) -> Figures:
    """Of a closed loop on a server of its own."""
    flags = (
        "--config",
        str(config),
        "--models",
        str(models),
        "--device",
        ",".join(devices),
        "--frontends",
        str(said.frontends),
    )
    with servers.running(*servers.seqserve(*flags), log=said.log) as server:
        target = Target.of(server.url, "/infer")
        requests = itertools.cycle([target.request(_body(seed, said.steps)) for seed in range(REQUESTS)])
        callers = CALLERS_EACH * len(devices)
        uvloop.run(load.closed(target, requests, callers, said.seconds / 4, lambda _: None))
        figures = uvloop.run(load.closed(target, requests, callers, said.seconds, lambda _: None))
    print(report.progress(",".join(devices), figures, said.seconds), file=sys.stderr, flush=True)
    return figures


def _body(seed: int, steps: int) -> bytes:
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=(INPUTS, steps)).tolist()
    return json.dumps({"model": MODEL, "inputs": ids, "deadline_ms": 60_000}).encode()


def _model(root: Path, hidden: int, steps: int) -> None:
    ids = SequenceInput(kind="ids", vocabulary=VOCABULARY, max_steps=steps)
    made_up.write(root, MODEL, ids, EmbeddingLayer(kind="embedding", width=256), LSTMLayer(kind="lstm", hidden=hidden, depth=4))


def _table(levels: Sequence[Sequence[str]], rounds: Sequence[Sequence[Figures]]) -> list[str]:
    """Sequences a second, and how many times as many as on one device in the same round: medians, lowest to highest."""
    rates = [[INPUTS * figures.rate for figures in round] for round in rounds]
    lines = [["devices", "sequences/s", "times"]]
    for at, level in enumerate(levels):
        times = [one[at] / one[0] for one in rates]
        lines.append([",".join(level), report.spread([one[at] for one in rates]), report.spread(times)])
    return list(report.table(lines))


def _records(
    levels: Sequence[Sequence[str]], rounds: Sequence[Sequence[Figures]], said: argparse.Namespace, machine: str
) -> list[dict[str, object]]:
    return [
        {
            "devices": list(level),
            "round": number,
            "sequences_per_second": round(INPUTS * figures.rate, 1),
            **{f"{name}_ms": round(value, 3) for name, value in report.milliseconds(figures).items()},
            "failed": figures.failed,
            "hidden": said.hidden,
            "steps": said.steps,
            "frontends": said.frontends,
            "machine": machine,
            "date": str(date.today()),
        }
        for number, found in enumerate(rounds)
        for level, figures in zip(levels, found, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_devices", description="One device, then several.")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="%(default)s unless given")
    parser.add_argument("--hidden", type=int, default=1024, help="units of each of the model's four layers")
    parser.add_argument("--steps", type=int, default=512, help="of a sequence")
    parser.add_argument("--frontends", type=int, default=8, help="processes that parse requests")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round, %(default)s unless given")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s unless given")
    parser.add_argument("--log", type=Path, help="file for what the servers say")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON lines, results/ beside the code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
