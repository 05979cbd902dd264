"""Reads sets of labelled texts and divides them. Requires the standard library only.

A set NAME is one file, `NAME.txt`, which is divided into ten folds, or the files `NAME.train.txt` and `NAME.test.txt`, with
`NAME.dev.txt` where it has a development part. A line is `LABEL text`, in latin-1, with tokens separated by spaces.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

FOLDS, SPLIT_SEED = 10, 0


@dataclass(frozen=True)
class KnownSet:
    """Facts that the files of a set lack. A label in the files is the index of its name. `model` begins the names of models."""

    model: str
    description: str
    labels: tuple[str, ...]


KNOWN = {
    "trec": KnownSet(
        "question-type",
        "What an English question asks for: a description, entity, abbreviation, human, location or number",
        ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"),
    ),
    "mr": KnownSet("mr", "Whether a sentence of a film review is negative or positive", ("negative", "positive")),
    "subj": KnownSet("subj", "Whether a sentence about a film is subjective or objective", ("subjective", "objective")),
    "cr": KnownSet("cr", "Whether a sentence of a product review is negative or positive", ("negative", "positive")),
}


class MissingSet(Exception):
    """A folder lacks the files of a set. The message has the format of the files."""


@dataclass(frozen=True)
class Example:
    label: str
    text: str


@dataclass(frozen=True)
class TextSet:
    """The parts of a set; `development` is None for a set without such a file. `fold` is the tested fold of a set with folds."""

    name: str
    labels: tuple[str, ...]
    train: list[Example]
    development: list[Example] | None
    test: list[Example]
    fold: int | None

    @property
    def model(self) -> str:
        """The beginning of the names of its models."""
        return KNOWN[self.name].model if self.name in KNOWN else self.name

    @property
    def description(self) -> str:
        return KNOWN[self.name].description if self.name in KNOWN else f"The label of a text of the set {self.name}"


def read_set(folder: Path | None, name: str, fold: int = 0) -> TextSet:
    """Return a set. Raises MissingSet. fold: which tenth of a set with folds is its test part."""
    if has_folds(folder, name):
        train, test = hold_out(_read(folder, name, ""), fold)
        return TextSet(name, labels_of(name, train + test), train, None, test, fold)
    train, test = _read(folder, name, "train"), _read(folder, name, "test")
    development = _read(folder, name, "dev") if _file(folder, name, "dev").is_file() else None
    return TextSet(name, labels_of(name, train), train, development, test, None)


def read_test(folder: Path | None, name: str, fold: int = 0) -> list[Example]:
    """Return the test part of a set, which needs no other file. Raises MissingSet."""
    return hold_out(_read(folder, name, ""), fold)[1] if has_folds(folder, name) else _read(folder, name, "test")


def has_folds(folder: Path | None, name: str) -> bool:
    """Return whether the set is one file."""
    return _file(folder, name, "").is_file()


def labels_of(name: str, examples: list[Example]) -> tuple[str, ...]:
    """Return the labels of a known set, or the labels of the examples in the order of numbers or of the alphabet."""
    if name in KNOWN:
        return KNOWN[name].labels
    labels = {example.label for example in examples}
    return tuple(sorted(labels, key=int if all(map(str.isdecimal, labels)) else str))


def hold_out(examples: list[Example], fold: int) -> tuple[list[Example], list[Example]]:
    """Return nine tenths of the examples, and tenth number `fold`. The division is the same for every seed of a training."""
    shuffled = list(examples)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    begin, end = (len(shuffled) * tenth // FOLDS for tenth in (fold, fold + 1))
    return shuffled[:begin] + shuffled[end:], shuffled[begin:end]


def _read(folder: Path | None, name: str, part: str) -> list[Example]:
    file = _file(folder, name, part)
    if not file.is_file():
        raise MissingSet(_instructions(name))
    lines = [line.split(maxsplit=1) for line in file.read_text("latin-1").split("\n") if line.strip()]
    names = KNOWN[name].labels if name in KNOWN else None
    return [Example(names[int(label)] if names else label, "".join(text)) for label, *text in lines]


def _file(folder: Path | None, name: str, part: str) -> Path:
    return (folder or Path()) / ".".join(filter(None, (name, part, "txt")))


def _instructions(name: str) -> str:
    """Return instructions for a user with a folder that lacks the files of a set."""
    known = KNOWN.get(name)
    labels = (
        f"The labels of {name} are {', '.join(f'{index} {label}' for index, label in enumerate(known.labels))}."
        if known
        else ""
    )
    return f"""\
The set {name} is needed; the project does not ship it. Make a folder with {name}.txt, which is divided into ten folds, or with
  {name}.train.txt and {name}.test.txt, and {name}.dev.txt if there is a development part,
one example per line, "LABEL text", tokens separated by spaces, latin-1, and pass the folder with --data or in the environment
variable DATA. {labels}"""
