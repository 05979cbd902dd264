"""The common command of the recipes with an output per step: read a set, train, write the model folder with a card, report."""

from __future__ import annotations

import argparse
import os
import string
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.modeling import spec, store
from service.modeling.spec import Head, ModelSpec, SequenceInput
from training import flags as setting_flags
from training import records, step_sets
from training.encoders import STEP_ENCODERS
from training.step_fitting import Fitted, Loss, Row, Settings, batches, fit
from training.step_model import StepModel
from training.step_tasks import Task

QUICK_EXAMPLES = 200
"""Examples of the training part in a quick trial."""
MAX_STEPS = 2048
"""The least `max_steps` of a model; twice the longest row of the training part, where that is more."""
ROWS = 32
"""Rows of a batch that is only evaluated."""


@dataclass(frozen=True)
class Prepared:
    """A set as a model reads it. parts: the rows of the training, development and test part; outputs: the scores of a step."""

    parts: list[list[Row]]
    vocabulary: int
    outputs: int
    head: Head
    tokenizer: str | None = None


class Recipe(ABC):
    """The part that differs between the recipes."""

    task: Task
    description: str
    template: Path
    """The template of the card, with `$` before the names of values."""
    defaults: dict[str, Settings]
    """By family."""
    causal = False
    loss: Loss

    @abstractmethod
    def prepare(self, parts: list[list[Any]], settings: Settings) -> Prepared:
        """Return the rows of the examples. Only the training part decides the vocabulary and the labels."""

    @abstractmethod
    def answer(self, scores: Tensor, example: Any, prepared: Prepared) -> Any:
        """Return the answer, as the service gives it, for the scores of the steps of an example, (steps, outputs)."""

    def spec(self, name: str, model: StepModel, prepared: Prepared) -> ModelSpec:
        longest = max(len(row.inputs) for row in prepared.parts[0])
        return ModelSpec(
            name=name,
            description=self.description,
            precision="float16",
            input=SequenceInput(
                kind="ids" if prepared.tokenizer is None else "text",
                vocabulary=prepared.vocabulary,
                max_steps=max(MAX_STEPS, 2 * longest),
            ),
            layers=model.layers,
            head=prepared.head,
        )


def train(recipe: Recipe, prepared: Prepared, settings: Settings, device: torch.device) -> Fitted:
    """Train on the training part; the development part selects the epoch."""
    torch.manual_seed(settings.seed)
    model = StepModel(
        settings.encoder,
        prepared.vocabulary,
        settings.width,
        settings.hidden,
        prepared.outputs,
        causal=recipe.causal,
        dropout=settings.dropout,
    )
    return fit(model.to(device), prepared.parts[0], prepared.parts[1], recipe.loss, settings)


@torch.no_grad()
def quality(recipe: Recipe, model: StepModel, prepared: Prepared, test: list[Any]) -> dict[str, float]:
    """Return the figures of quality on the test part in PyTorch alone."""
    scores = (
        each[:length]
        for batch in batches(prepared.parts[2], ROWS)
        for each, length in zip(model(batch.inputs, batch.lengths), batch.lengths, strict=True)
    )
    answers = [recipe.answer(each, example, prepared) for each, example in zip(scores, test, strict=True)]
    return recipe.task.quality(test, answers)


def run(
    recipe: Recipe, data: Path | None, name: str, settings: Settings, folder: Path, device: torch.device, is_quick: bool = False
) -> records.Record:
    """Train on the set `name`, write the version folder, read it back and return the figures. Raises MissingSet."""
    parts = step_sets.read(data, name, recipe.task.kind)
    if is_quick:
        parts, settings = quick(parts, settings, recipe.task)
    prepared = recipe.prepare(parts, settings)
    fitted = train(recipe, prepared, settings, device)
    model, trained = fitted.model, quality(recipe, fitted.model, prepared, parts[2])
    store.write(
        folder, recipe.spec(folder.parent.name, model, prepared), model.tensors(), tokenizer=prepared.tokenizer, card=""
    )
    model.load(folder)
    record = {
        "kind": "training",
        "task": recipe.task.kind,
        "set": name,
        "quick": is_quick,
        "encoder": settings.encoder,
        "settings": asdict(settings),
        "epoch": fitted.epoch,
        "development_loss": fitted.development,
        "trained": trained,
        "stored": quality(recipe, model, prepared, parts[2]),
        "test_examples": len(parts[2]),
        "training_seconds": round(fitted.seconds, 1),
    }
    (folder / spec.CARD).write_text(card(recipe, folder.parent.name, model, prepared, settings, record))
    return record | {"bytes": records.folder_bytes(folder)}


def card(recipe: Recipe, name: str, model: StepModel, prepared: Prepared, settings: Settings, record: records.Record) -> str:
    """Return the card of a model."""
    values = asdict(settings) | {
        "name": name,
        "labels": ", ".join(getattr(prepared.head, "labels", ())),
        "terms": step_sets.TERMS.get(record["set"], step_sets.OTHER_TERMS),
        "flags": setting_flags.words(settings),
        "encoder_description": model.encoder.description,
        "source": f"--set {record['set']}{' --quick' if record['quick'] else ''}",
        "epoch": record["epoch"],
        "examples": record["test_examples"],
        "stored": figures(record["stored"]),
        "trained": figures(record["trained"]),
    }
    return string.Template(recipe.template.read_text()).substitute(values)


def figures(quality: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in quality.items())


def quick(parts: list[list[Any]], settings: Settings, task: Task) -> tuple[list[list[Any]], Settings]:
    """Return a few examples of each part and settings of a small model, for a trial in seconds."""
    sizes = (QUICK_EXAMPLES, task.quick_examples, task.quick_examples)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)], replace(settings, width=16, hidden=8, epochs=2)


def arguments(recipe: Recipe, name: str, line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=recipe.description)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default=name, help="name of the set (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=Path("models"), help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: the set, the kind of set and the encoder)")
    parser.add_argument("--results", type=Path, help="append what was measured to this file, as a line of JSON")
    parser.add_argument("--device", type=torch.device, default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model of a few examples, in seconds")
    setting_flags.add(parser, recipe.defaults)
    return parser.parse_args(line)


def main(recipe: Recipe, name: str, line: list[str] | None = None) -> int:
    """Run the command. name: the default set."""
    flags = arguments(recipe, name, line)
    torch.set_num_threads(1)  # the model is small, and one thread sums in a fixed order
    settings = recipe.defaults[vars(flags).get("encoder", "lstm")]
    settings = replace(settings, **setting_flags.given(flags, settings))
    folder = flags.models / (flags.name or model_name(flags.set, recipe.task.kind, settings.encoder)) / "1"
    try:
        record = run(recipe, flags.data, flags.set, settings, folder, flags.device, flags.quick)
    except step_sets.MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    records.append(flags.results, record)
    figure = record["stored"][recipe.task.figure]
    print(
        f"{figure:.2f} {recipe.task.unit} on {record['test_examples']} test examples, trained in {record['training_seconds']:.0f} s, "
        f"{folder} has {record['bytes']:,} bytes"
    )
    return 0


def model_name(name: str, kind: str, encoder: str) -> str:
    return f"{name}-{kind}-{encoder}"


def defaults(**changes: Any) -> dict[str, Settings]:
    """Return the settings of every family."""
    return {encoder: Settings(encoder=encoder, **changes) for encoder in STEP_ENCODERS}
