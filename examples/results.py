"""Train every family on every set, evaluate each model through the running service, measure its speed, and draw the table.

`--all` runs four sets and six families: ten folds of a set without parts, and five seeds of a set with a test part. The command repeats no
run that the results file has. Without `--all`, `--sets` or `--encoders`, it only draws the tables in README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import train_text
from training import records, table
from training.fitting import Settings
from training.loads import measure
from training.records import Record
from training.service import Service, running
from training.text_sets import FOLDS, KNOWN, MissingSet, has_folds, read_set, read_test

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One training of a family on a set."""

    set: str
    encoder: str
    fold: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.set}-{self.encoder}-{self.fold}-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """Shared by all runs. settings: values by set and family that replace the defaults. train_device: where models are trained."""

    data: Path
    models: Path
    results: Path
    vectors: Path | None
    settings: dict[str, Any]
    train_device: str
    quick: bool

    def folder(self, run: Run) -> Path:
        """Return the models folder of a run. Each set, family and kind of training has a folder, which one service serves."""
        kind = "quick" if self.quick else self.vectors.stem if self.vectors else "full"
        return self.models / kind / f"{run.set}-{run.encoder}"

    def append(self, run: Run, record: Record) -> None:
        """Append a record, with the fields that identify its run."""
        records.append(self.results, record | self._identity(run))

    def has(self, run: Run, kind: str, device: str | None = None) -> bool:
        """Return whether the results file has such a record of the run."""
        wanted = self._identity(run) | {"kind": kind, **({"device": device} if device else {})}
        return any(wanted.items() <= record.items() for record in records.read(self.results))

    def settings_of(self, run: Run) -> Settings:
        changed = self.settings.get(run.set, {}).get(run.encoder, {})
        return replace(train_text.DEFAULTS[run.encoder], **changed, seed=run.seed)

    def _identity(self, run: Run) -> Record:
        vectors = self.vectors.name if self.vectors else None
        return asdict(run) | {"pretrained": vectors, "quick": self.quick, "requested": asdict(self.settings_of(run))}


def train(plan: Plan, run: Run) -> Record:
    """Train one model, write its folder and return its record. Runs in a process of a pool, on one thread."""
    torch.set_num_threads(1)
    settings = plan.settings_of(run)
    text_set = read_set(plan.data, run.set, run.fold)
    if plan.quick:
        text_set, settings = train_text.quick(text_set, settings)
    trained = train_text.train(text_set, settings, plan.vectors, torch.device(plan.train_device))
    source = train_text.source(text_set, plan.vectors, plan.quick)
    return train_text.write(plan.folder(run) / run.name / "1", trained, text_set, train_text.CARD_TEMPLATE, source)


def train_all(plan: Plan, groups: list[list[Run]], devices: list[str], jobs: int) -> None:
    """Train the models that have no record. Train a model again if its folder is missing and it still lacks a figure."""
    missing = [run for group in groups for run in group if needs_training(plan, run, group, devices)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        trainings = {pool.submit(train, plan, run): run for run in missing}
        for number, training in enumerate(as_completed(trainings), 1):
            plan.append(trainings[training], training.result())
            print(f"{trainings[training].name} is trained, {number} of {len(missing)}", flush=True)


def needs_training(plan: Plan, run: Run, group: list[Run], devices: list[str]) -> bool:
    if not plan.has(run, "training"):
        return True
    unmeasured = any(
        not plan.has(run, "served", device) or (run == group[0] and not plan.has(run, "speed", device)) for device in devices
    )
    return unmeasured and not (plan.folder(run) / run.name).is_dir()


def runs(data: Path, name: str, encoder: str, seeds: int, folds: int) -> list[Run]:
    """Return the runs of a family on a set: its folds, or seeds where it has a test part."""
    if has_folds(data, name):
        return [Run(name, encoder, fold, 1) for fold in range(folds)]
    return [Run(name, encoder, 0, seed) for seed in range(1, seeds + 1)]


def evaluate(plan: Plan, service: Service, run: Run, device: str) -> Record:
    """Return the accuracy of a model by HTTP, on the same texts as in its training."""
    test = read_test(plan.data, run.set, run.fold)
    accuracy = service.accuracy(run.name, test[: train_text.QUICK_EXAMPLES] if plan.quick else test)
    return {"kind": "served", "device": device, "served_percent": accuracy}


def serve(plan: Plan, group: list[Run], device: str, seconds: float) -> None:
    """Serve the models of a set and family, and append the missing figures: the accuracy of each and the speed of the first."""
    unserved = [run for run in group if not plan.has(run, "served", device)]
    has_speed = plan.has(group[0], "speed", device)
    if not unserved and has_speed:
        return
    models = plan.folder(group[0])
    with running(models, device) as service:
        for run in unserved:
            plan.append(run, evaluate(plan, service, run, device))
        for record in [] if has_speed else measure(service, models, group[0].name, device, seconds):
            plan.append(group[0], record)
    print(f"{group[0].set} {group[0].encoder} is measured on {device}", flush=True)


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="run every known set and every family")
    parser.add_argument("--sets", type=lambda word: word.split(","), help="names of sets, separated by commas (default: all)")
    parser.add_argument("--encoders", type=lambda word: word.split(","), help="families, separated by commas (default: all)")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--devices", default="cpu", help="devices to serve on, as in cpu,cuda:0 (default: %(default)s)")
    parser.add_argument("--train-device", default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at once (default: the number of cores)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings on a set with a test part (default: %(default)s)")
    parser.add_argument("--folds", type=int, default=FOLDS, help="tested folds of a set without parts (default: %(default)s)")
    parser.add_argument("--settings", type=Path, help="TOML file of settings, in tables such as [mr.gru]")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load (default: %(default)s)")
    parser.add_argument("--vectors", type=Path, help="pretrained vectors, in the text format of word2vec or GloVe")
    parser.add_argument(
        "--models", type=Path, default=Path("build/recipes"), help="folder for the models (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl", help="results file (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the table (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="small models of a few examples; their records are left out of the table"
    )
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    settings = tomllib.loads(flags.settings.read_text()) if flags.settings else {}
    plan = Plan(flags.data, flags.models, flags.results, flags.vectors, settings, flags.train_device, flags.quick)
    sets = flags.sets or (list(KNOWN) if flags.all or flags.encoders else [])
    encoders = flags.encoders or list(train_text.DEFAULTS)
    try:
        for name in sets:
            read_set(plan.data, name)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    groups = [runs(plan.data, name, encoder, flags.seeds, flags.folds) for name in sets for encoder in encoders]
    devices = flags.devices.split(",")
    train_all(plan, groups, devices, flags.jobs)
    for device in devices:
        for group in groups:
            serve(plan, group, device, flags.seconds)
    table.write(flags.page, records.read(plan.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
