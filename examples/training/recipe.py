"""What the recipes share: the command that reads a set, trains, writes a model folder with a card, and prints the results as a table."""

from __future__ import annotations

import argparse
import json
import os
import string
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from service.modeling import spec, store
from service.modeling.spec import SequenceInput
from service.modeling.spec.heads import Head
from training import flags as setting_flags
from training import terminal
from training.fitting import Fitted
from training.model import Model
from training.parts import MissingData, Parts
from training.service import Advance, Service, ignore

EXAMPLES = Path(__file__).parent.parent
QUICK_EXAMPLES = 200
"""Examples of each part in a quick trial."""

Record = dict[str, Any]
"""A measurement: the quality of a model by figure, with its kind, task, set and name."""


@dataclass(frozen=True)
class Trained:
    """A trained model with what its folder says about it."""

    model: Model
    fitted: Fitted
    description: str
    inputs: SequenceInput
    head: Head
    tokenizer: Tokenizer | None = None


class Recipe(ABC):
    """The part that differs between the recipes. An answer has the same form from PyTorch and from the service."""

    task: str
    default_set: str
    has_sets = True
    """Whether there is more than one set."""
    settings: ClassVar[Mapping[str, Any]]
    """The default settings by family, dataclasses with a field for each flag. The first family is the default."""
    quick: ClassVar[Mapping[str, Any]]
    """The settings of a quick trial that differ."""

    def __init__(self) -> None:
        self.template = EXAMPLES / f"{self.task}.card.md"
        """The template of the card, with `$` before the names of values."""

    @abstractmethod
    def read(self, data: Path, name: str, settings: Any) -> Parts:
        """Return a set. Raises MissingData."""

    @abstractmethod
    def read_test(self, data: Path, name: str) -> list[Any]:
        """Return the test part of a set. Raises MissingData."""

    @abstractmethod
    def train(self, name: str, parts: Parts, settings: Any, device: torch.device) -> Trained:
        """Train on the training part of the set `name`. The test part is not used."""

    @abstractmethod
    def answers(self, trained: Trained, examples: list[Any]) -> list[Any]:
        """Return the model's answer to each example, in PyTorch."""

    @abstractmethod
    def ask(self, service: Service, model: str, examples: list[Any], advance: Advance = ignore) -> list[Any]:
        """Return the answer of a served model to each example."""

    @abstractmethod
    def quality(self, examples: list[Any], answers: list[Any]) -> dict[str, float]:
        """Return the figures of quality by name, the main figure first."""

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        """Return the values of the template that only this recipe has."""
        return {}

    def prefix(self, name: str) -> str:
        """Return the beginning of the names of the models of a set."""
        return f"{name}-{self.task}"

    def model_name(self, name: str, encoder: str) -> str:
        return f"{self.prefix(name)}-{encoder}"


def run(recipe: Recipe, name: str, parts: Parts, settings: Any, folder: Path, device: torch.device, source: str) -> Record:
    """Train, write the version folder, read it back and return the record. source: the flags of the data, for the card."""
    torch.manual_seed(settings.seed)
    trained = recipe.train(name, parts, settings, device)
    model = trained.model.to("cpu")
    tokenizer = trained.tokenizer.to_str(pretty=True) if trained.tokenizer else None
    described = model.spec(folder.parent.name, trained.description, trained.inputs, trained.head)
    store.write(folder, described, model.tensors(), tokenizer=tokenizer, card="")
    model.load(folder)
    quality = recipe.quality(parts.test, recipe.answers(trained, parts.test))
    record = {
        "kind": "training",
        "task": recipe.task,
        "set": name,
        "model": folder.parent.name,
        "encoder": settings.encoder,
        "seed": settings.seed,
        "epoch": trained.fitted.epoch,
        "quality": quality,
        "examples": len(parts.test),
        "training_seconds": round(trained.fitted.seconds, 1),
    }
    (folder / spec.CARD).write_text(card(recipe, parts, trained, settings, record, source))
    return record | {"bytes": sum(file.stat().st_size for file in folder.iterdir())}


def card(recipe: Recipe, parts: Parts, trained: Trained, settings: Any, record: Record, source: str) -> str:
    """Return the card of a model."""
    values = asdict(settings) | {
        "name": record["model"],
        "description": trained.description,
        "labels": ", ".join(getattr(trained.head, "labels", ())),
        "encoder_description": trained.model.encoder.description,
        "flags": " ".join(filter(None, (source, setting_flags.words(settings)))),
        "epoch": record["epoch"],
        "examples": record["examples"],
        "quality": terminal.sentence(record["quality"]),
    }
    values |= recipe.card_values(record["set"], parts, trained)
    return string.Template(recipe.template.read_text()).substitute(values)


def arguments(recipe: Recipe, description: str, line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser, recipe)
    parser.add_argument("--models", type=Path, default=Path("models"), help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: from the set and the family)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model of a few examples, in seconds")
    parser.add_argument("--card", type=Path, default=recipe.template, help="template of the card (default: %(default)s)")
    setting_flags.add(parser, recipe.settings)
    return parser.parse_args(line)


def add_data_flags(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    """Add the flags of a set, and of the results."""
    data = Path(os.environ.get("DATA", "."))
    parser.add_argument("--data", type=Path, default=data, help="folder of the sets (default: $DATA, or else this folder)")
    parser.add_argument("--results", type=Path, help="append what was measured to this file, as lines of JSON")
    parser.set_defaults(set=recipe.default_set)
    if recipe.has_sets:
        parser.add_argument("--set", default=recipe.default_set, help="name of the set (default: %(default)s)")


def append(file: Path | None, measured: list[Record]) -> None:
    """Append records to a file, if it is named."""
    if file is not None:
        with file.open("a") as lines:
            lines.writelines(f"{json.dumps(record)}\n" for record in measured)


def main(recipe: Recipe, description: str | None, line: list[str] | None = None) -> int:
    """Run the command. Return 0 if the model was written, 2 if the set is missing."""
    flags = arguments(recipe, description or "", line)
    recipe.template = flags.card
    torch.set_num_threads(1)  # the model is small, and one thread sums in a fixed order
    settings = recipe.settings[getattr(flags, "encoder", next(iter(recipe.settings)))]
    if flags.quick:
        settings = replace(settings, **recipe.quick)
    settings = replace(settings, **setting_flags.given(flags, settings))
    try:
        parts = recipe.read(flags.data, flags.set, settings)
    except MissingData as error:
        print(error, file=sys.stderr)
        return 2
    if flags.quick:
        parts = parts.sample(QUICK_EXAMPLES)
    name = flags.name or recipe.model_name(flags.set, settings.encoder)
    chosen = ["--set", flags.set] if recipe.has_sets else []
    source = [*chosen, *(["--quick"] if flags.quick else [])]
    record = run(recipe, flags.set, parts, settings, flags.models / name / "1", flags.device, " ".join(source))
    append(flags.results, [record])
    quality, seconds = record["quality"], f"{record['training_seconds']:.0f}"
    row = [name, *map(terminal.number, quality.values()), str(record["epoch"]), seconds, f"{record['bytes']:,}"]
    columns = (f"model, {len(parts.test)} examples", *map(terminal.heading, quality), "epoch", "training, s", "bytes")
    terminal.table(columns, [row])
    print(
        f"{flags.models / name / '1'} is written. Serve it with `seqserve serve --models {flags.models}`, and measure it there"
    )
    print(f"with `python examples/evaluate.py {' '.join([recipe.task, *chosen])} --model {name}`.")
    return 0
