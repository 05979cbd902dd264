"""Smaller variants of a text classifier: made by `seqserve compress`, trained after that, or trained from the answers of the original."""

from __future__ import annotations

import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import train_text
from tokenizers import Tokenizer

from service.modeling import spec, store
from training.classifier import Classifier, read_back
from training.distillation import Distillation
from training.encoders import ENCODERS
from training.fitting import Fitted, Loss, Settings, cross_entropy, improve
from training.records import Record
from training.text_sets import Example, TextSet, hold_out
from training.vocabulary import TokenisedText, tokenised

TEMPLATE = Path(train_text.__file__).with_name("compressed-text.card.md")


@dataclass(frozen=True)
class Choices:
    """How small the variants are, and how they are trained; every field is a flag.

    rank: columns of the embedding; dropout: of every training except the original's; tuning: of a model after a change; soft: the share
    of the soft labels in the loss of a distilled student. The other settings of a training equal the original's.
    """

    rank: int = 8
    vocabulary: int = 1000
    dropout: float = 0.2
    tuning_epochs: int = 4
    tuning_rate: float = 0.001
    student_width: int = 24
    student_hidden: int = 24
    student_epochs: int = 16
    temperature: float = 5.0
    soft: float = 1.0


Flags = Callable[[Choices, Path], list[str]]
"""Returns flags of `seqserve compress`. The path is a file with the texts of the training part, one a line."""


@dataclass(frozen=True)
class Job:
    """The variants of one original. models: the folder for all of them; settings: of the original; source: the flags of the data;
    device: where models are trained."""

    models: Path
    text_set: TextSet
    settings: Settings
    choices: Choices
    source: str
    device: torch.device

    def name(self, variant: str) -> str:
        return f"{self.text_set.model}-{self.settings.encoder}-{variant}"

    def folder(self, variant: str) -> Path:
        return self.models / self.name(variant) / "1"

    @property
    def parts(self) -> tuple[list[Example], list[Example]]:
        """The part that models are trained on, and the development part that selects their epoch, as for the original."""
        given = self.text_set.development
        return (self.text_set.train, given) if given else hold_out(self.text_set.train, 0)

    def rows(self, tokenizer: Tokenizer) -> tuple[list[TokenisedText], list[TokenisedText]]:
        train, development = (tokenised(part, tokenizer, self.text_set.labels) for part in self.parts)
        return train, development

    def read(self, variant: str) -> tuple[Classifier, Tokenizer]:
        """Return the model of a variant that is not a student, and its tokenizer."""
        folder = self.folder(variant)
        model = read_back(folder, self.settings.encoder, self.settings.hidden)
        return model, Tokenizer.from_file(str(folder / spec.TOKENIZER))


def train_original(job: Job, variant: str) -> Record:
    trained = train_text.train(job.text_set, job.settings, None, job.device)
    record = train_text.write(job.folder(variant), trained, job.text_set, train_text.CARD_TEMPLATE, job.source)
    return {name: record[name] for name in ("development_percent", "training_seconds", "epoch")}


def compress(job: Job, variant: str, of: str, flags: Flags) -> Record:
    """Run `seqserve compress`, whose card compares both versions on the development part."""
    train, development = job.parts
    with tempfile.TemporaryDirectory() as folder:
        texts, data = Path(folder) / "training.txt", Path(folder) / "development.txt"
        texts.write_text("".join(f"{example.text}\n" for example in train))
        data.write_text("".join(f"{example.label} {example.text}\n" for example in development))
        command = [sys.executable, "-m", "service", "compress", job.name(of), "--models", str(job.models)]
        line = [*command, "--name", job.name(variant), "--data", str(data), *flags(job.choices, texts)]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return {"training_seconds": 0.0}


def tune(job: Job, variant: str, of: str) -> Record:
    """Train a variant that was made without training, at a lower rate and for fewer epochs than the original."""
    model, tokenizer = job.read(of)
    choices = job.choices
    settings = replace(job.settings, epochs=choices.tuning_epochs, rate=choices.tuning_rate, dropout=choices.dropout)
    how = f"The weights started from those of `{job.name(of)}`, which `seqserve compress` made."
    return fit(job, variant, model, tokenizer, settings, cross_entropy, how)


def train_student(job: Job, variant: str, is_distilled: bool) -> Record:
    """Train a small model of the same family and vocabulary, on the labels alone or on the original's answers."""
    teacher, tokenizer = job.read("original")
    choices = job.choices
    settings = replace(job.settings, width=choices.student_width, hidden=choices.student_hidden, epochs=choices.student_epochs)
    torch.manual_seed(settings.seed)
    model = Classifier(
        settings.encoder, tokenizer.get_vocab_size(), settings.width, settings.hidden, teacher.labels, settings.dropout
    )
    loss: Loss = cross_entropy
    how = "It learned the labels of the training part alone, for comparison with the distilled model of the same size."
    if is_distilled:
        loss = Distillation(teacher.to(job.device), choices.temperature, choices.soft)
        how = (
            f"It learned the probabilities of `{job.name('original')}` at the temperature {choices.temperature:g}, with the share "
            f"{choices.soft:g} of the loss; the labels have the rest (Hinton, Vinyals and Dean, 2015)."
        )
    return fit(job, variant, model, tokenizer, settings, loss, how)


def fit(job: Job, variant: str, model: Classifier, tokenizer: Tokenizer, settings: Settings, loss: Loss, how: str) -> Record:
    """Train a model and write its folder. Its embeddings move as far as the original's, relative to their length."""
    torch.manual_seed(settings.seed)
    model.dropout.p = settings.dropout
    settings = replace(settings, push=round(settings.push * length(model) / length(job.read("original")[0]), 3))
    fitted = improve(model, *job.rows(tokenizer), settings, job.device, loss)
    write(job, variant, fitted, tokenizer, settings, how)
    return {"development_percent": fitted.development, "training_seconds": round(fitted.seconds, 1), "epoch": fitted.epoch}


def length(model: Classifier) -> float:
    """Return the mean length of the vectors of the embedding."""
    return float(model.embedding.weight.detach().norm(dim=1).mean())


def write(job: Job, variant: str, fitted: Fitted, tokenizer: Tokenizer, settings: Settings, how: str) -> None:
    model = fitted.model
    max_steps = spec.read(job.folder("original")).input.max_steps
    values = asdict(settings) | {
        "name": job.name(variant),
        "description": job.text_set.description,
        "labels": ", ".join(job.text_set.labels),
        "words": f"{tokenizer.get_vocab_size():,}",
        "width": model.embedding.embedding_dim,
        "encoder_description": ENCODERS[settings.encoder](1, settings.hidden).description,
        "how": how,
        "source": job.source,
        "epoch": fitted.epoch,
        "development": "" if fitted.development is None else f"{fitted.development:.1f}",
    }
    card = string.Template(TEMPLATE.read_text()).substitute(values)
    described = model.spec(job.name(variant), job.text_set.description, max_steps)
    store.write(job.folder(variant), described, model.tensors(), tokenizer=tokenizer.to_str(pretty=True), card=card)
