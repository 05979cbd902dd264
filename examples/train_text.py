"""Train a classifier of texts, and write it as a model folder with a card.

The data is any set in the format of `training/text_sets.py`. A development part selects the epoch: that of the set or, if it has none, a
tenth of the training part. With `--patience 0`, the model of the last epoch on the whole training part is kept.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from training import text_sets
from training.batches import Batch, Row, shuffled_batches
from training.encoders import ENCODERS
from training.fitting import fit
from training.model import Embedding, Model
from training.parts import Parts
from training.recipe import Recipe, Trained, main
from training.service import Advance, Service, ignore
from training.text_sets import Example
from training.tokenization import UNKNOWN, text_tokenizer, token_ids

from service.modeling.spec import MAX_SHOWN, SequenceInput
from service.modeling.spec.heads import ClassifyHead

FAMILIES = ("lstm", "sru", "qrnn", "gru", "cnn", "tcn")
MAX_STEPS = 512
"""The least `max_steps` of a model; twice the longest text of the training part, where that is more."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. For a CNN, `hidden` is the number of filters of each width.

    Training ends after `epochs`, or when `patience` epochs have brought no better accuracy on the development part; the model of the
    best epoch is then kept. With a patience of 0, no part is held out. Words that occur less than `minimum_count` times are unknown.
    """

    encoder: str
    width: int = 300
    hidden: int = 128
    epochs: int = 8
    batch: int = 25
    rate: float = 0.002
    dropout: float = 0.5
    word_dropout: float = 0.1
    smoothing: float = 0.1
    push: float = 4.0
    minimum_count: int = 2
    patience: int = 3
    seed: int = 1


class TextRecipe(Recipe):
    task, default_set = "text", "trec"
    settings: ClassVar = {encoder: Settings(encoder, hidden=100 if encoder == "cnn" else 128) for encoder in FAMILIES}
    quick: ClassVar = {"width": 16, "hidden": 8, "epochs": 2}

    def read(self, data: Path, name: str, settings: Settings) -> Parts:
        return text_sets.read(data, name, development=settings.patience > 0)

    def read_test(self, data: Path, name: str) -> list[Example]:
        return text_sets.read_part(data, name, "test")

    def train(self, name: str, parts: Parts, settings: Settings, device: torch.device) -> Trained:
        texts, labels = [example.text for example in parts.train], text_sets.labels_of(name, parts.train)
        tokenizer = text_tokenizer(texts, settings.minimum_count)
        vocabulary = tokenizer.get_vocab_size()
        embedding = Embedding(vocabulary, settings.width, dropout=settings.dropout, bound=0.25)
        encoder = ENCODERS[settings.encoder](settings.width, settings.hidden)
        model = Model(embedding, encoder, len(labels), pooled=True, dropout=settings.dropout).to(device)
        rows = [Row(token_ids(tokenizer, each.text), torch.tensor([labels.index(each.label)])) for each in parts.train]
        shuffler = random.Random(settings.seed)

        def backward(batch: Batch) -> Tensor:
            return adversarial(model, with_word_dropout(batch, settings.word_dropout).to(device), settings)

        def accuracy() -> float:
            answers = labelled(model, tokenizer, labels, parts.development)
            return self.quality(parts.development, answers)["accuracy_percent"]

        fitted = fit(
            model,
            settings.epochs,
            settings.rate,
            lambda _: shuffled_batches(rows, settings.batch, shuffler),
            backward,
            score=accuracy if parts.development else None,
            patience=settings.patience,
        )
        longest = max(len(row.inputs) for row in rows)
        steps, example = max(MAX_STEPS, 2 * longest), texts[0][:MAX_SHOWN] or None
        inputs = SequenceInput(kind="text", vocabulary=vocabulary, max_steps=steps, example=example)
        head = ClassifyHead(kind="classify", pool=("max",), labels=labels)
        return Trained(model, fitted, text_sets.description(name), inputs, head, tokenizer)

    def answers(self, trained: Trained, examples: list[Example]) -> list[str]:
        assert isinstance(trained.head, ClassifyHead) and trained.tokenizer
        return labelled(trained.model, trained.tokenizer, trained.head.labels, examples)

    def ask(self, service: Service, model: str, examples: list[Example], advance: Advance = ignore) -> list[str]:
        texts = [example.text for example in examples]
        return [output["label"] for output in service.outputs(model, texts, advance)]

    def quality(self, examples: list[Example], answers: list[str]) -> dict[str, float]:
        right = sum(example.label == answer for example, answer in zip(examples, answers, strict=True))
        return {"accuracy_percent": 100 * right / len(examples)}

    def card_values(self, name: str, parts: Parts, trained: Trained) -> dict[str, Any]:
        score, epoch = trained.fitted.score, trained.fitted.epoch
        best = (
            f"The weights are those of epoch {epoch}, which had the best accuracy on the development part, {score or 0:.1f} %."
        )
        return {"stopping": "The weights are those after the last epoch." if score is None else best}

    def prefix(self, name: str) -> str:
        return text_sets.KNOWN[name].model if name in text_sets.KNOWN else name


@torch.no_grad()
def labelled(model: Model, tokenizer: Tokenizer, labels: Sequence[str], examples: list[Example]) -> list[str]:
    """Return the label with the highest score of each text."""
    scores = model.scores([token_ids(tokenizer, example.text) for example in examples])
    return [labels[int(row.argmax())] for row in scores]


def adversarial(model: Model, batch: Batch, settings: Settings) -> Tensor:
    """Add the gradients of a batch, and those of the same batch with embeddings that are moved by `push` towards a higher loss (Miyato et
    al., 2017). Return the loss."""

    def backward() -> Tensor:
        scores = model(batch.inputs, batch.lengths)
        loss = nn.functional.cross_entropy(scores, batch.targets[:, 0], label_smoothing=settings.smoothing)
        torch.autograd.backward(loss)
        return loss.detach()

    assert isinstance(model.inputs, Embedding)
    loss, weight = backward(), model.inputs.table.weight
    if settings.push:
        assert weight.grad is not None
        before = weight.detach().clone()
        weight.data.add_(weight.grad / weight.grad.norm().clamp_min(1e-9), alpha=settings.push)
        backward()
        weight.data.copy_(before)
    return loss


def with_word_dropout(batch: Batch, share: float) -> Batch:
    """Replace some words by the unknown token, so that its embedding is trained."""
    return replace(batch, inputs=batch.inputs.masked_fill(torch.rand(batch.inputs.shape) < share, UNKNOWN))


if __name__ == "__main__":
    sys.exit(main(TextRecipe(), __doc__))
