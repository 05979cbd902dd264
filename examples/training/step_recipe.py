"""What the recipes for tags, language and spans share: a model over token ids with scores at every step."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from service.modeling.spec import SequenceInput
from service.modeling.spec.heads import Head
from training import step_sets
from training.batches import NO_TARGET, Batch, Row, batches, shuffled_batches
from training.encoders import STEP_ENCODERS
from training.fitting import fit
from training.model import Embedding, Model
from training.parts import Parts
from training.recipe import Recipe, Trained

MAX_STEPS = 2048
"""The least `max_steps` of a model; twice the longest row of the training part, where that is more."""
BYTES = 256
"""The vocabulary of a model without a tokenizer."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. `width` is the embedding's, `hidden` the units per direction or filters.

    Training ends after `epochs`, or when `patience` epochs have brought no lower loss on the development part; the model of the best
    epoch is kept. Words that occur less than `minimum_count` times are unknown.
    """

    encoder: str
    width: int = 64
    hidden: int = 128
    epochs: int = 4
    batch: int = 32
    rate: float = 0.003
    dropout: float = 0.2
    minimum_count: int = 2
    patience: int = 2
    seed: int = 1


def families(**changes: Any) -> dict[str, Settings]:
    """Return the settings of every family, the default family first."""
    return {encoder: Settings(encoder, **changes) for encoder in ("lstm", "sru", "qrnn", "gru", "cnn", "tcn")}


class StepRecipe(Recipe):
    settings: ClassVar[Mapping[str, Settings]] = families()
    quick: ClassVar = {"width": 16, "hidden": 8, "epochs": 2}
    description: str
    kind: str
    """The kind of set in `step_sets.py`."""
    causal = False

    @abstractmethod
    def prepare(self, examples: list[Any], settings: Settings) -> tuple[Head, int, Tokenizer | None]:
        """Return the head, its scores at a step, and the tokenizer, None for bytes. Only the training part decides them."""

    @abstractmethod
    def rows(self, examples: list[Any], head: Head, tokenizer: Tokenizer | None) -> list[Row]:
        """Return examples as the model reads them, with their targets."""

    @abstractmethod
    def answer(self, scores: Tensor, example: Any, head: Head) -> Any:
        """Return the answer, as the service gives it, for the scores of an example, (steps, scores)."""

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy over the steps of a batch. scores: (rows, steps, scores)."""
        return nn.functional.cross_entropy(scores.transpose(1, 2), batch.targets, ignore_index=NO_TARGET)

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        return step_sets.read(data, name, self.kind)

    def read_test(self, data: Path, name: str) -> list[Any]:
        return step_sets.read_part(data, name, self.kind, "test")

    def train(self, name: str, parts: Parts, settings: Settings, device: torch.device) -> Trained:
        head, outputs, tokenizer = self.prepare(parts.train, settings)
        vocabulary = tokenizer.get_vocab_size() if tokenizer else BYTES
        embedding = Embedding(vocabulary, settings.width, dropout=settings.dropout)
        encoder = STEP_ENCODERS[settings.encoder](settings.width, settings.hidden, self.causal)
        model = Model(embedding, encoder, outputs, dropout=settings.dropout).to(device)
        train, development = (self.rows(part, head, tokenizer) for part in (parts.train, parts.development))
        shuffler = random.Random(settings.seed)

        def backward(batch: Batch) -> Tensor:
            batch = batch.to(device)
            loss = self.loss(model(batch.inputs, batch.lengths), batch)
            torch.autograd.backward(loss)
            return loss.detach()

        fitted = fit(
            model,
            settings.epochs,
            settings.rate,
            lambda _: shuffled_batches(train, settings.batch, shuffler),
            backward,
            score=lambda: -self.mean_loss(model, development, settings.batch),
            patience=settings.patience,
        )
        longest = max(len(row.inputs) for row in train)
        kind, max_steps = "text" if tokenizer else "ids", max(MAX_STEPS, 2 * longest)
        inputs = SequenceInput.model_validate({"kind": kind, "vocabulary": vocabulary, "max_steps": max_steps})
        return Trained(model, fitted, self.description, inputs, head, tokenizer)

    @torch.no_grad()
    def mean_loss(self, model: Model, rows: list[Row], size: int) -> float:
        """Return the mean of the loss over the targets of the rows."""
        total, targets = 0.0, 0
        for batch in (each.to(model.device) for each in batches(rows, size)):
            count = int((batch.targets != NO_TARGET).sum())
            total += count * float(self.loss(model(batch.inputs, batch.lengths), batch))
            targets += count
        return total / targets

    def answers(self, trained: Trained, examples: list[Any]) -> list[Any]:
        rows = self.rows(examples, trained.head, trained.tokenizer)
        scores = trained.model.scores([row.inputs for row in rows])
        return [self.answer(each, example, trained.head) for each, example in zip(scores, examples, strict=True)]

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        return {"terms": step_sets.TERMS.get(name, step_sets.OTHER_TERMS)}
