"""Train the model question-type-lstm in plain PyTorch and write it as a model folder.

Settings are judged with `--holdout`, on a fixed tenth of the training file. The test file is read once, at the end of a
full training, to report the accuracy of the float16 weights as they were read back from the folder.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import string
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from service.zoo import spec, store
from service.zoo.spec import ClassifyHead, EmbeddingLayer, Layer, LSTMLayer, ModelSpec, SequenceInput

NAME = "question-type-lstm"
TRAIN_FILE, TEST_FILE = "trec.train.txt", "trec.test.txt"
LABELS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")
UNKNOWN_WORD, UNKNOWN = "[UNK]", 0
SPLIT_SEED = 0
CARD_TEMPLATE = Path(__file__).with_name("question-type-lstm.card.md")
WHAT_TO_FETCH = f"""\
The TREC question classification set (Li and Roth, 2002) is needed; the project does not ship it. Make a folder with
  {TRAIN_FILE}  5,452 questions
  {TEST_FILE}     500 questions
one question a line, "LABEL text", tokens separated by spaces, latin-1, with the labels
  {", ".join(f"{index} {label}" for index, label in enumerate(LABELS))}
and name the folder with --data or in the environment variable DATA."""


@dataclass(frozen=True)
class Settings:
    """What a training depends on besides its data; every field is a flag."""

    encoder: str = "lstm"
    width: int = 300
    hidden: int = 128
    epochs: int = 10
    batch: int = 25
    rate: float = 0.002
    dropout: float = 0.5
    word_dropout: float = 0.1
    minimum_count: int = 2
    seed: int = 2


@dataclass(frozen=True)
class Question:
    label: int
    text: str


@dataclass(frozen=True)
class Batch:
    """Questions side by side: tokens (rows, longest), padded with anything beyond each row's length."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


class Encoder(nn.Module, ABC):
    """Embedded words to one vector a word. Another kind is a subclass, listed in ENCODERS."""

    layer: Layer
    """How the model folder describes it."""

    @abstractmethod
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """(rows, steps, width) to (rows, steps, layer.outputs); steps beyond a row's length must not reach its others."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Views of the parameters under the names and in the layouts of the model folder."""


class LSTM(Encoder):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layer = LSTMLayer(kind="lstm", hidden=settings.hidden, bidirectional=True)
        self.lstm = nn.LSTM(settings.width, settings.hidden, batch_first=True, bidirectional=True)
        for suffix in ("", "_reverse"):  # PyTorch has two biases where the folder has one: the second stays zero
            nn.init.zeros_(self.lstm.get_parameter(f"bias_hh_l0{suffix}")).requires_grad_(False)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    def tensors(self) -> dict[str, Tensor]:
        views = {}
        for direction, suffix in (("forward", ""), ("backward", "_reverse")):
            views[f"0.{direction}.input"] = self.lstm.get_parameter(f"weight_ih_l0{suffix}").T
            views[f"0.{direction}.recurrent"] = self.lstm.get_parameter(f"weight_hh_l0{suffix}").T
            views[f"0.{direction}.bias"] = self.lstm.get_parameter(f"bias_ih_l0{suffix}")
        return views


ENCODERS = {"lstm": LSTM}


class Classifier(nn.Module):
    """Embedding, encoder, max over time, linear layer."""

    def __init__(self, vocabulary: int, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.width)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        self.encoder = ENCODERS[settings.encoder](settings)
        self.head = nn.Linear(self.encoder.layer.outputs, len(LABELS))
        self.dropout = nn.Dropout(settings.dropout)
        self.word_dropout = settings.word_dropout

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            tokens = tokens.masked_fill(torch.rand(tokens.shape) < self.word_dropout, UNKNOWN)
        encoded: Tensor = self.encoder(self.dropout(self.embedding(tokens)), lengths)
        beyond = torch.arange(tokens.shape[1]) >= lengths[:, None]
        pooled = encoded.masked_fill(beyond[:, :, None], -math.inf).amax(dim=1)
        scores: Tensor = self.head(self.dropout(pooled))
        return scores

    def tensors(self) -> dict[str, Tensor]:
        """Views of the parameters under the names and in the layouts of the model folder."""
        encoder = {f"layers.1.{name}": view for name, view in self.encoder.tensors().items()}
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {"layers.0.weight": self.embedding.weight, **encoder, **head}

    def spec(self) -> ModelSpec:
        vocabulary, width = self.embedding.weight.shape
        return ModelSpec(
            name=NAME,
            description="What an English question asks for: a description, entity, abbreviation, human, location or number",
            precision="float16",
            input=SequenceInput(kind="text", vocabulary=vocabulary, max_steps=512),
            layers=(EmbeddingLayer(kind="embedding", width=width), self.encoder.layer),
            head=ClassifyHead(kind="classify", pool="max", labels=LABELS),
        )


def read_questions(file: Path) -> list[Question]:
    rows = (line.split(maxsplit=1) for line in file.read_text("latin-1").split("\n") if line)
    return [Question(int(label), text) for label, text in rows]


def holdout_split(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """Nine tenths to train on and the tenth that judges settings, the same for every seed of a training."""
    shuffled = list(questions)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    tenth = len(questions) // 10
    return shuffled[tenth:], shuffled[:tenth]


def make_tokenizer(questions: list[Question], minimum_count: int) -> Tokenizer:
    """Whole words and single punctuation marks, lower case; the unknown token is number 0."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator((question.text for question in questions), trainer)
    return tokenizer


def batches(questions: list[Question], tokenizer: Tokenizer, size: int) -> Iterator[Batch]:
    for start in range(0, len(questions), size):
        chosen = questions[start : start + size]
        rows = [torch.tensor(tokenizer.encode(question.text).ids) for question in chosen]
        lengths = torch.tensor([len(row) for row in rows])
        yield Batch(pad_sequence(rows, batch_first=True), lengths, torch.tensor([question.label for question in chosen]))


def train(questions: list[Question], tokenizer: Tokenizer, settings: Settings, held_out: list[Question]) -> Classifier:
    """The model after the last epoch. The rate falls to zero, so that no epoch has to be picked."""
    torch.manual_seed(settings.seed)
    shuffler = random.Random(settings.seed)
    model = Classifier(tokenizer.get_vocab_size(), settings)
    optimizer = torch.optim.Adam(model.parameters(), settings.rate)
    steps = settings.epochs * math.ceil(len(questions) / settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for epoch in range(1, settings.epochs + 1):
        model.train()
        for batch in batches(shuffler.sample(questions, len(questions)), tokenizer, settings.batch):
            step(model, batch, optimizer)
            schedule.step()
        judged = f": {accuracy(model, held_out, tokenizer):.1f} % of {len(held_out)} held-out questions" if held_out else ""
        print(f"epoch {epoch} of {settings.epochs}{judged}", flush=True)
    return model


def step(model: Classifier, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch.tokens, batch.lengths), batch.labels)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def accuracy(model: Classifier, questions: list[Question], tokenizer: Tokenizer) -> float:
    """Percent of the questions that get their label."""
    model.eval()
    right = [model(batch.tokens, batch.lengths).argmax(1) == batch.labels for batch in batches(questions, tokenizer, 50)]
    return 100 * torch.cat(right).double().mean().item()


@torch.no_grad()
def read_back(folder: Path, settings: Settings) -> Classifier:
    """The model as it lies in `folder`, in float32."""
    described = spec.read(folder)
    model = Classifier(described.input.vocabulary or 0, settings)
    arrays = store.read_arrays(folder, described)
    for name, view in model.tensors().items():
        view.copy_(arrays[name])
    return model


def report_holdout(questions: list[Question], settings: Settings) -> None:
    rest, held_out = holdout_split(questions)
    train(rest, make_tokenizer(rest, settings.minimum_count), settings, held_out)


def train_and_write(questions: list[Question], test: list[Question], settings: Settings, folder: Path) -> None:
    start = time.monotonic()
    tokenizer = make_tokenizer(questions, settings.minimum_count)
    model = train(questions, tokenizer, settings, held_out=[])
    seconds = time.monotonic() - start
    store.write(folder, model.spec(), model.tensors(), tokenizer=tokenizer.to_str(pretty=True), card="")
    measured = f"{accuracy(read_back(folder, settings), test, tokenizer):.1f} % of the {len(test)} test questions"
    (folder / spec.CARD).write_text(card(settings, measured))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{measured}, trained in {seconds:.0f} s, {folder} has {size:,} bytes")


def card(settings: Settings, measured: str) -> str:
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asdict(settings).items())
    return string.Template(CARD_TEMPLATE.read_text()).substitute(asdict(settings), flags=flags, measured=measured)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the two files, $DATA unless given")
    parser.add_argument("--models", type=Path, default="models", help="folder of models to write to, %(default)s unless given")
    parser.add_argument("--holdout", action="store_true", help="train on nine tenths and report on the tenth; write nothing")
    for setting in fields(Settings):
        flag, choices = f"--{setting.name.replace('_', '-')}", sorted(ENCODERS) if setting.name == "encoder" else None
        kind, default = type(setting.default), setting.default
        parser.add_argument(flag, type=kind, default=default, choices=choices, help="%(default)s unless given")
    return parser.parse_args()


def main() -> int:
    flags = arguments()
    if flags.data is None or not all((flags.data / name).is_file() for name in (TRAIN_FILE, TEST_FILE)):
        print(WHAT_TO_FETCH, file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the model is small, and one thread adds up in one order
    settings = Settings(**{setting.name: getattr(flags, setting.name) for setting in fields(Settings)})
    questions = read_questions(flags.data / TRAIN_FILE)
    if flags.holdout:
        report_holdout(questions, settings)
    else:
        train_and_write(questions, read_questions(flags.data / TEST_FILE), settings, flags.models / NAME / "1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
