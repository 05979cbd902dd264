"""Train every family on sets with an output per step, evaluate each model through the running service, and draw the tables.

`--all` runs tags and text on `hidden` and `kjv`, and spans on `facts`. The command repeats nothing that the results file has. Without
`--all` or `--sets`, it only draws the tables in README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import train_language
import train_spans
import train_tags
from training import records, step_recipe, step_sets, step_table
from training.baselines import baseline
from training.encoders import STEP_ENCODERS
from training.loads import CALLERS, measure
from training.records import Record
from training.service import Service, running
from training.step_recipe import Recipe, model_name
from training.step_tasks import TASKS

HERE = Path(__file__).parent
RECIPES: dict[str, Recipe] = {
    recipe.task.kind: recipe for recipe in (train_tags.Tagger(), train_language.LanguageModel(), train_spans.SpanFinder())
}
EPOCHS = {("hidden", "tags"): 8, ("hidden", "text"): 8, ("kjv", "tags"): 1, ("kjv", "text"): 1, ("facts", "spans"): 6}
"""Epochs by set and kind: a minute or two on one thread."""

Model = tuple[str, str, str]
"""The name of a set, its kind, and the family."""


@dataclass(frozen=True)
class Plan:
    """Shared by all runs. with_speed: whether to measure the speed as well as the quality."""

    data: Path | None
    models: Path
    results: Path
    quick: bool
    with_speed: bool = True

    def folder(self, name: str, kind: str) -> Path:
        """Return the models folder of a set, which one service serves."""
        return self.models / f"steps-{'quick' if self.quick else 'full'}" / f"{name}-{kind}"

    def has(self, **wanted: Any) -> bool:
        """Return whether the results file has such a record."""
        wanted |= {"quick": self.quick}
        return any(wanted.items() <= record.items() for record in records.read(self.results))

    def is_measured(self, model: Model, device: str) -> bool:
        """Return whether the results file has all figures of a served model."""
        name, kind, encoder = model
        last = {"kind": "speed", "callers": CALLERS[-1]} if self.with_speed else {"kind": "served"}
        return self.has(**last, set=name, task=kind, encoder=encoder, device=device)


def train(plan: Plan, name: str, kind: str, encoder: str, device: str) -> Record:
    """Train one model, write its folder and return its record. Runs in a process of a pool, on one thread."""
    torch.set_num_threads(1)
    recipe = RECIPES[kind]
    settings = recipe.defaults[encoder]
    settings = replace(settings, epochs=EPOCHS.get((name, kind), settings.epochs))
    folder = plan.folder(name, kind) / model_name(name, kind, encoder) / "1"
    return step_recipe.run(recipe, plan.data, name, settings, folder, torch.device(device), plan.quick)


def compare(plan: Plan, name: str, kind: str) -> None:
    """Append the figures of simple models, and the best possible figures if they are known."""
    if plan.has(kind="reference", set=name, task=kind):
        return
    train, _, test = step_sets.read(plan.data, name, kind)
    best = step_sets.optimum(plan.data, name, kind)
    references = baseline(kind, train, test) | ({"best possible": best} if best else {})
    for reference, figures in references.items():
        shared = {"kind": "reference", "task": kind, "set": name, "quick": plan.quick}
        records.append(plan.results, shared | {"encoder": reference, "trained": figures})


def train_all(plan: Plan, models: list[Model], device: str, jobs: int, devices: list[str]) -> None:
    """Train the models that have no record. Train a model again if its folder is missing and it still lacks a figure."""
    missing = [model for model in models if needs_training(plan, model, devices)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        trainings = {pool.submit(train, plan, *model, device): model for model in missing}
        for number, training in enumerate(as_completed(trainings), 1):
            records.append(plan.results, training.result())
            print(f"{model_name(*trainings[training])} is trained, {number} of {len(missing)}", flush=True)


def needs_training(plan: Plan, model: Model, devices: list[str]) -> bool:
    name, kind, encoder = model
    if not plan.has(kind="training", set=name, task=kind, encoder=encoder):
        return True
    unmeasured = any(not plan.is_measured(model, device) for device in devices)
    return unmeasured and not (plan.folder(name, kind) / model_name(*model)).is_dir()


def serve(plan: Plan, name: str, kind: str, encoders: list[str], device: str, seconds: float) -> None:
    """Serve the models of a set, and append the quality and the speed of each."""
    missing = [encoder for encoder in encoders if not plan.is_measured((name, kind, encoder), device)]
    if not missing:
        return
    test = step_sets.read_part(plan.data, name, kind, "test")
    test = test[: TASKS[kind].quick_examples] if plan.quick else test
    with running(plan.folder(name, kind), device) as service:
        for encoder in missing:
            shared = {"task": kind, "set": name, "encoder": encoder, "quick": plan.quick}
            for record in measured(
                service, plan.folder(name, kind), model_name(name, kind, encoder), kind, test, device, seconds
            ):
                records.append(plan.results, record | shared)
            print(f"{model_name(name, kind, encoder)} is measured on {device}", flush=True)


def measured(
    service: Service, models: Path, model: str, kind: str, test: list[Any], device: str, seconds: float
) -> list[Record]:
    """Return the quality of a model by HTTP, and its speed unless `seconds` is 0."""
    quality = TASKS[kind].quality(test, TASKS[kind].ask(service, model, test))
    loads = measure(service, models, model, device, seconds) if seconds else []
    return [{"kind": "served", "device": device, "served": quality}, *loads]


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="run every set and every family")
    parser.add_argument("--sets", type=lambda word: word.split(","), help="sets and kinds, as in hidden/tags,facts/spans")
    parser.add_argument("--encoders", type=lambda word: word.split(","), help="families, separated by commas (default: all)")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--devices", default="cpu", help="devices to serve on, as in cpu,cuda:0 (default: %(default)s)")
    parser.add_argument("--train-device", default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at once (default: the number of cores)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of each load; 0 measures the quality only (default: %(default)s)"
    )
    parser.add_argument(
        "--models", type=Path, default=Path("build/recipes"), help="folder for the models (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "step-results.jsonl", help="results file (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the tables (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models of a few examples, left out of the tables")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    plan = Plan(flags.data, flags.models, flags.results, flags.quick, flags.seconds > 0)
    chosen = flags.sets or (["/".join(pair) for pair in EPOCHS] if flags.all else [])
    sets = [(name, kind) for name, _, kind in (word.partition("/") for word in chosen)]
    encoders = flags.encoders or list(STEP_ENCODERS)
    try:
        for name, kind in sets:
            step_sets.read(plan.data, name, kind)
    except step_sets.MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    for name, kind in sets:
        compare(plan, name, kind)
    devices = flags.devices.split(",")
    train_all(plan, [(*each, encoder) for each in sets for encoder in encoders], flags.train_device, flags.jobs, devices)
    for device in devices:
        for name, kind in sets:
            serve(plan, name, kind, encoders, device, flags.seconds)
    step_table.write(flags.page, records.read(plan.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
