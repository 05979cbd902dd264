"""Train a text classifier of any of six families in plain PyTorch, and write it as a model folder with a card.

The data is any set in the format of `training/text_sets.py`. Early stopping and `--holdout` look at parts of the training part alone;
the test part is read once, at the end, to report the accuracy of the trained weights and of the float16 weights read back from the folder.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from training import flags as setting_flags
from training import loads, records
from training.classifier import read_back
from training.encoders import ENCODERS
from training.fitting import Fitted, Settings, fit
from training.text_sets import FOLDS, Example, MissingSet, TextSet, hold_out, read_set
from training.vocabulary import make_tokenizer, read_vectors, tokenised, words

from service.modeling import spec, store

CARD_TEMPLATE = Path(__file__).with_name("text-classification.card.md")
QUICK_EXAMPLES = 200
MAX_STEPS = 512
"""The least `max_steps` of a model; twice the longest text of the training part, where that is more."""
DEFAULTS = {encoder: Settings(encoder=encoder, hidden=100 if encoder == "cnn" else 128) for encoder in ENCODERS}


@dataclass(frozen=True)
class Vocabulary:
    """vectors: (vocabulary, width), the pretrained vectors, and NaN in the rows without a vector."""

    tokenizer: Tokenizer
    vectors: Tensor

    @classmethod
    def of(cls, examples: list[Example], settings: Settings, file: Path | None) -> Vocabulary:
        """Return the vocabulary of the training examples. file: pretrained vectors, whose width replaces `width`."""
        texts = [example.text for example in examples]
        known = read_vectors(file, words(texts)) if file else {}
        tokenizer = make_tokenizer(texts, settings.minimum_count, known)
        width = len(next(iter(known.values()))) if known else settings.width
        vectors = torch.full((tokenizer.get_vocab_size(), width), torch.nan)
        for word, vector in known.items():
            vectors[tokenizer.token_to_id(word)] = vector
        return cls(tokenizer, vectors)


@dataclass(frozen=True)
class Trained:
    """A training with its vocabulary. accuracy: the percentage on the test part, in PyTorch alone, with the weights as trained."""

    settings: Settings
    fitted: Fitted
    vocabulary: Vocabulary
    max_steps: int
    accuracy: float
    device: torch.device


def train(text_set: TextSet, settings: Settings, vectors: Path | None, device: torch.device) -> Trained:
    """Train on the training part. With patience, a development part selects the epoch: the part of the set, or tenth 0 of the training
    part."""
    rest, development = text_set.train, text_set.development or []
    if settings.patience and not development:
        rest, development = hold_out(rest, 0)
    vocabulary = Vocabulary.of(rest, settings, vectors)
    settings = replace(settings, width=vocabulary.vectors.shape[1])
    rows, development_rows, test = (
        tokenised(part, vocabulary.tokenizer, text_set.labels)
        for part in (rest, development if settings.patience else [], text_set.test)
    )
    fitted = fit(rows, development_rows, text_set.labels, vocabulary.vectors, settings, device)
    longest = max(len(row.tokens) for row in rows)
    return Trained(settings, fitted, vocabulary, max(MAX_STEPS, 2 * longest), fitted.model.accuracy(test), device)


def write(folder: Path, trained: Trained, text_set: TextSet, template: Path, source: str) -> records.Record:
    """Write the version folder, read it back and return the figures. source: the flags of the data, for the card."""
    model, settings = trained.fitted.model, trained.settings
    described = model.spec(folder.parent.name, text_set.description, trained.max_steps)
    tokenizer = trained.vocabulary.tokenizer
    store.write(folder, described, model.tensors(), tokenizer=tokenizer.to_str(pretty=True), card="")
    stored = read_back(folder, settings.encoder, settings.hidden).accuracy(tokenised(text_set.test, tokenizer, text_set.labels))
    record = {
        "kind": "training",
        "set": text_set.name,
        "fold": text_set.fold or 0,
        "encoder": settings.encoder,
        "seed": settings.seed,
        "settings": asdict(settings),
        "epoch": trained.fitted.epoch,
        "development_percent": trained.fitted.development,
        "trained_percent": trained.accuracy,
        "stored_percent": stored,
        "test_examples": len(text_set.test),
        "vectors": int((~trained.vocabulary.vectors[:, 0].isnan()).sum()),
        "training_seconds": round(trained.fitted.seconds, 1),
        **loads.gpu(trained.device),
        "curve": [asdict(epoch) | {"seconds": round(epoch.seconds, 2)} for epoch in trained.fitted.curve],
    }
    (folder / spec.CARD).write_text(card(template, text_set, settings, record | {"source": source}))
    return record | {"bytes": records.folder_bytes(folder)}


def card(template: Path, text_set: TextSet, settings: Settings, record: records.Record) -> str:
    """Return the card of a model, from a template with `$` before the names of values."""
    stopping = (
        f"The weights are those of epoch {record['epoch']}, which had the best accuracy on the development part, "
        f"{record['development_percent']:.1f} %."
        if record["development_percent"] is not None
        else "The weights are those after the last epoch."
    )
    values = asdict(settings) | {
        "name": f"{text_set.model}-{settings.encoder}",
        "description": text_set.description,
        "labels": ", ".join(text_set.labels),
        "encoder_description": ENCODERS[settings.encoder](1, settings.hidden).description,
        "flags": setting_flags.words(settings),
        "source": record["source"],
        "stopping": stopping,
        "accuracy": f"{record['stored_percent']:.1f}",
        "trained": f"{record['trained_percent']:.1f}",
        "examples": record["test_examples"],
        "vectors": record["vectors"],
    }
    return string.Template(template.read_text()).substitute(values)


def source(text_set: TextSet, vectors: Path | None, is_quick: bool) -> str:
    """Return the flags that name the data of a training."""
    fold = [] if text_set.fold is None else ["--fold", str(text_set.fold)]
    return " ".join(
        ["--set", text_set.name, *fold, *(["--vectors", vectors.name] if vectors else []), *(["--quick"] if is_quick else [])]
    )


def quick(text_set: TextSet, settings: Settings) -> tuple[TextSet, Settings]:
    """Return a small part of the set and settings of a small model, for a trial in seconds."""
    small = replace(text_set, train=text_set.train[:QUICK_EXAMPLES], test=text_set.test[:QUICK_EXAMPLES])
    return small, replace(settings, width=16, hidden=8, epochs=2)


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="trec", help="name of the set (default: %(default)s)")
    parser.add_argument("--fold", type=int, choices=range(FOLDS), default=0, help="test on this tenth of a set without parts")
    parser.add_argument(
        "--holdout", type=int, choices=range(FOLDS), help="evaluate on this tenth of the training part, write nothing"
    )
    parser.add_argument("--vectors", type=Path, help="pretrained vectors, in the text format of word2vec or GloVe")
    parser.add_argument("--models", type=Path, default=Path("models"), help="models folder to write to (default: %(default)s)")
    parser.add_argument("--name", help="name of the model (default: the set and the encoder)")
    parser.add_argument("--card", type=Path, default=CARD_TEMPLATE, help="template of the card (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="append what was measured to this file, as a line of JSON")
    parser.add_argument("--device", type=torch.device, default="cpu", help="device to train on (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model of a few examples, in seconds")
    setting_flags.add(parser, DEFAULTS)
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    torch.set_num_threads(1)  # the model is small, and one thread sums in a fixed order
    settings = DEFAULTS[vars(flags).get("encoder", "lstm")]
    settings = replace(settings, **setting_flags.given(flags, settings))
    try:
        text_set = read_set(flags.data, flags.set, flags.fold)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    if flags.quick:
        text_set, settings = quick(text_set, settings)
    if flags.holdout is not None:
        rest, held_out = hold_out(text_set.train, flags.holdout)
        trained = train(replace(text_set, train=rest, test=held_out), settings, flags.vectors, flags.device)
        print(f"{trained.accuracy:.1f} % of the {len(held_out)} held-out examples of tenth {flags.holdout}")
        return 0
    folder = flags.models / (flags.name or f"{text_set.model}-{settings.encoder}") / "1"
    trained = train(text_set, settings, flags.vectors, flags.device)
    record = write(folder, trained, text_set, flags.card, source(text_set, flags.vectors, flags.quick))
    records.append(flags.results, record | {"quick": flags.quick})
    print(
        f"{record['stored_percent']:.1f} % of the {record['test_examples']} test examples, "
        f"trained in {record['training_seconds']:.0f} s, {folder} has {record['bytes']:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
