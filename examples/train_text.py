"""Train the models question-type-lstm, -sru and -cnn in plain PyTorch and write each as a model folder.

`--holdout` evaluates settings on fixed tenths of the training file. The test file is read once, at the end of a full training, to report
the accuracy of the float16 weights read back from the folder.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import string
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from questions import (
    TENTHS,
    UNKNOWN,
    PaddedBatch,
    TokenisedQuestion,
    batches,
    hold_out,
    make_tokenizer,
    shuffled_batches,
    tokenised,
)
from text_encoders import ENCODERS
from torch import Tensor, nn
from trec import LABELS, TEST_FILE, TRAIN_FILE, Question, download_instructions, is_missing, read_questions

from service.modeling import spec, store
from service.modeling.spec import ClassifyHead, EmbeddingLayer, ModelSpec, SequenceInput

CARD_TEMPLATE = Path(__file__).with_name("question-type.card.md")


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. For a CNN, `hidden` is the number of filters of each width."""

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
    seed: int = 1


DEFAULTS = {"lstm": Settings(encoder="lstm"), "sru": Settings(encoder="sru"), "cnn": Settings(encoder="cnn", hidden=100)}


class Classifier(nn.Module):
    """An embedding, an encoder with maximum over time, and a linear layer."""

    def __init__(self, vocabulary: int, settings: Settings) -> None:
        super().__init__()
        self.name = f"question-type-{settings.encoder}"
        self.embedding = nn.Embedding(vocabulary, settings.width)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        self.encoder = ENCODERS[settings.encoder](settings.width, settings.hidden)
        self.head = nn.Linear(self.encoder.layer.outputs, len(LABELS))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        encoded = self.encoder(self.dropout(self.embedding(tokens)), lengths)
        scores: Tensor = self.head(self.dropout(encoded))
        return scores

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder."""
        encoder = {f"layers.1.{name}": view for name, view in self.encoder.tensors().items()}
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {"layers.0.weight": self.embedding.weight, **encoder, **head}

    def spec(self) -> ModelSpec:
        vocabulary, width = self.embedding.weight.shape
        return ModelSpec(
            name=self.name,
            description="What an English question asks for: a description, entity, abbreviation, human, location or number",
            precision="float16",
            input=SequenceInput(kind="text", vocabulary=vocabulary, max_steps=512),
            layers=(EmbeddingLayer(kind="embedding", width=width), self.encoder.layer),
            head=ClassifyHead(kind="classify", pool=("max",), labels=LABELS),
        )


def train(rows: list[TokenisedQuestion], vocabulary: int, settings: Settings) -> Classifier:
    """Return the model after the last epoch. The learning rate falls to zero, so there is no need to choose an epoch."""
    torch.manual_seed(settings.seed)
    shuffler = random.Random(settings.seed)
    model = Classifier(vocabulary, settings).train()
    optimizer = torch.optim.Adam(model.parameters(), settings.rate, fused=True)
    steps = settings.epochs * math.ceil(len(rows) / settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(settings.epochs):
        for batch in shuffled_batches(rows, settings.batch, shuffler):
            step(model, with_word_dropout(batch, settings.word_dropout), optimizer, settings)
            schedule.step()
    return model.eval()


def step(model: Classifier, batch: PaddedBatch, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Train on the batch, and on the same batch with embeddings that are moved towards a higher loss."""
    optimizer.zero_grad()
    torch.autograd.backward(loss(model, batch, settings.smoothing))
    with pushed(model.embedding.weight, settings.push):
        torch.autograd.backward(loss(model, batch, settings.smoothing))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def loss(model: Classifier, batch: PaddedBatch, smoothing: float) -> Tensor:
    return nn.functional.cross_entropy(model(batch.tokens, batch.lengths), batch.labels, label_smoothing=smoothing)


@contextmanager
def pushed(weight: Tensor, distance: float) -> Iterator[None]:
    """Within the context, move `weight` by `distance` along its gradient: adversarial training (Miyato et al., 2017)."""
    assert weight.grad is not None
    before = weight.detach().clone()
    weight.data.add_(weight.grad / weight.grad.norm().clamp_min(1e-9), alpha=distance)
    yield
    weight.data.copy_(before)


def with_word_dropout(batch: PaddedBatch, share: float) -> PaddedBatch:
    """Replace some words by the unknown token, so that its embedding is trained."""
    return replace(batch, tokens=batch.tokens.masked_fill(torch.rand(batch.tokens.shape) < share, UNKNOWN))


@torch.no_grad()
def accuracy(model: Classifier, rows: list[TokenisedQuestion]) -> float:
    """Return the percentage of rows with the correct prediction."""
    right = [model(batch.tokens, batch.lengths).argmax(1) == batch.labels for batch in batches(rows, 50)]
    return 100 * torch.cat(right).double().mean().item()


@torch.no_grad()
def read_back(folder: Path, settings: Settings) -> Classifier:
    """Read the model in `folder`, in float32."""
    described = spec.read(folder)
    model = Classifier(described.input.vocabulary or 0, settings).eval()
    arrays = store.read_arrays(folder, described)
    for name, view in model.tensors().items():
        view.copy_(arrays[name])
    return model


def report_holdout(questions: list[Question], settings: Settings, fold: int) -> None:
    rest, held_out = hold_out(questions, fold)
    tokenizer = make_tokenizer(rest, settings.minimum_count)
    model = train(tokenised(rest, tokenizer), tokenizer.get_vocab_size(), settings)
    print(f"{accuracy(model, tokenised(held_out, tokenizer)):.1f} % of the {len(held_out)} held-out questions of tenth {fold}")


def train_and_write(questions: list[Question], test: list[Question], settings: Settings, models: Path) -> None:
    start = time.monotonic()
    tokenizer = make_tokenizer(questions, settings.minimum_count)
    model = train(tokenised(questions, tokenizer), tokenizer.get_vocab_size(), settings)
    seconds = time.monotonic() - start
    folder = models / model.name / "1"
    store.write(folder, model.spec(), model.tensors(), tokenizer=tokenizer.to_str(pretty=True), card="")
    measured = f"{accuracy(read_back(folder, settings), tokenised(test, tokenizer)):.1f} % of the {len(test)} test questions"
    (folder / spec.CARD).write_text(card(model, settings, measured))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{measured}, trained in {seconds:.0f} s, {folder} has {size:,} bytes")


def card(model: Classifier, settings: Settings, measured: str) -> str:
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asdict(settings).items())
    values = asdict(settings) | {
        "name": model.name,
        "encoder_description": model.encoder.description,
        "flags": flags,
        "measured": measured,
    }
    return string.Template(CARD_TEMPLATE.read_text()).substitute(values)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the two files (default: $DATA)")
    parser.add_argument("--models", type=Path, default="models", help="models folder to write to (default: %(default)s)")
    parser.add_argument(
        "--holdout", type=int, choices=range(TENTHS), help="hold out this tenth and evaluate on it, write nothing"
    )
    parser.add_argument("--encoder", choices=tuple(DEFAULTS), default="lstm", help="default: %(default)s")
    for name, default in asdict(DEFAULTS["lstm"]).items():
        if name != "encoder":
            defaults = ", ".join(f"{getattr(settings, name)} for {encoder}" for encoder, settings in DEFAULTS.items())
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=type(default), default=argparse.SUPPRESS, help=f"default: {defaults}")
    return parser.parse_args()


def main() -> int:
    flags = arguments()
    if is_missing(flags.data, TRAIN_FILE, TEST_FILE):
        print(download_instructions(TRAIN_FILE, TEST_FILE), file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the model is small, and one thread sums in a fixed order
    overrides = {name: value for name, value in vars(flags).items() if name in asdict(DEFAULTS["lstm"])}
    settings = replace(DEFAULTS[flags.encoder], **overrides)
    questions = read_questions(flags.data / TRAIN_FILE)
    if flags.holdout is not None:
        report_holdout(questions, settings, flags.holdout)
    else:
        train_and_write(questions, read_questions(flags.data / TEST_FILE), settings, flags.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
