"""The whole service on one device and on several, with a model that keeps a device busy."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from loadtest import servers, synthetic_models
from loadtest.callers import Target
from loadtest.load import Figures
from loadtest.scenarios import rounds
from loadtest.scenarios.rounds import Contender, Trial
from service.modeling.spec import EmbeddingLayer, LSTMLayer, SequenceInput

SUMMARY = "the whole service on one device and on several"
MODEL, VOCABULARY = "lstm-deep", 1000
INPUTS = 64
"""Sequences of a request: a full batch."""
REQUESTS = 16
"""Distinct requests, sent in a cycle."""
CALLERS_PER_DEVICE = 8
"""Enough to keep a batch waiting for each device."""
SETTINGS = "max_batch_tokens = 65536\nmax_waiting = 4096\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="comma-separated devices")
    parser.add_argument("--hidden", type=int, default=1024, help="units of each of the model's four layers")
    parser.add_argument("--steps", type=int, default=512, help="time steps of a sequence")
    parser.add_argument("--frontends", type=int, default=8, help="number of frontend processes")
    parser.add_argument("--log", type=Path, help="log file of the servers")
    rounds.add_options(parser, seconds=4.0, rounds=3)


def run(options: argparse.Namespace) -> int:
    """Measure the first device, then all devices. Returns 1 when a request failed."""
    devices: list[str] = options.devices.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        models, config = Path(scratch) / "models", Path(scratch) / "settings.toml"
        ids = SequenceInput(kind="ids", vocabulary=VOCABULARY, max_steps=options.steps)
        layers = EmbeddingLayer(kind="embedding", width=256), LSTMLayer(kind="lstm", hidden=options.hidden, depth=4)
        synthetic_models.write(models, MODEL, ids, *layers)
        config.write_text(SETTINGS)
        levels = [devices[:count] for count in (1, len(devices))]
        trials = [_trial(models, config, level, number, options) for number in range(options.rounds) for level in levels]
    print(f"{MODEL}, 4 x {options.hidden} units, {options.steps} steps, {INPUTS} sequences a request")
    return rounds.publish("devices", trials, [list(_table(trials))], options, ("torch",), devices[0])


def _trial(models: Path, config: Path, devices: Sequence[str], number: int, options: argparse.Namespace) -> Trial:
    """Start a server on `devices` and load it with a closed loop."""
    flags = {"--config": config, "--models": models, "--device": ",".join(devices), "--frontends": options.frontends}
    words = (str(word) for flag in flags.items() for word in flag)
    case = {"devices": tuple(devices), "hidden": options.hidden, "steps": options.steps, "frontends": options.frontends}
    with servers.running(*servers.seqserve(*words), log=options.log) as server:
        target = Target.of(server.url, "/infer")
        requests = itertools.cycle([target.request(_body(seed, options.steps)) for seed in range(REQUESTS)])
        callers = CALLERS_PER_DEVICE * len(devices)
        return Contender(case, target, requests, callers, costs=_sequences).trial(number, options.seconds)


def _sequences(figures: Figures, *_: None) -> tuple[dict[str, float], dict[str, float]]:
    return {"sequences_per_second": INPUTS * figures.rate}, {}


def _body(seed: int, steps: int) -> bytes:
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=(INPUTS, steps)).tolist()
    return json.dumps({"model": MODEL, "inputs": ids, "deadline_ms": 60_000}).encode()


def _table(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yield one line for each set of devices. times: the rate, compared with one device in the same round."""
    yield ["devices", "sequences/s", "times"]
    alone, *_ = cases = rounds.by_case(trials)
    for case in cases:
        column = ["sequences_per_second"]
        yield [",".join(case[0].case["devices"]), *rounds.spreads(case, column), *rounds.ratios(case, alone, column)]
