"""Reads sets of labelled texts. Requires the standard library only.

A set NAME is the files `NAME.train.txt` and `NAME.test.txt`, with `NAME.dev.txt` where it has a development part. A line is `LABEL text`,
in latin-1, with tokens separated by spaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.parts import MissingData, Parts, hold_out, in_order


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
}


@dataclass(frozen=True)
class Example:
    label: str
    text: str


def read(folder: Path, name: str, *, development: bool) -> Parts:
    """Return a set. Raises MissingData. development: hold out tenth 0 of the training part if there is no development part."""
    train, test = read_part(folder, name, "train"), read_part(folder, name, "test")
    if not development:
        return Parts(train, [], test)
    if (folder / f"{name}.dev.txt").is_file():
        return Parts(train, read_part(folder, name, "dev"), test)
    return Parts(*hold_out(train), test)


def description(name: str) -> str:
    return KNOWN[name].description if name in KNOWN else f"The label of a text of the set {name}"


def labels_of(name: str, examples: list[Example]) -> tuple[str, ...]:
    """Return the labels of a known set, or the labels of the examples."""
    return KNOWN[name].labels if name in KNOWN else in_order({example.label for example in examples})


def read_part(folder: Path, name: str, part: str) -> list[Example]:
    """Return a part of a set: train, dev or test. Raises MissingData."""
    file = folder / f"{name}.{part}.txt"
    if not file.is_file():
        raise MissingData(_instructions(name))
    lines = [line.split(maxsplit=1) for line in file.read_text("latin-1").split("\n") if line.strip()]
    names = KNOWN[name].labels if name in KNOWN else None
    return [Example(names[int(label)] if names else label, "".join(text)) for label, *text in lines]


def _instructions(name: str) -> str:
    """Return instructions for a user with a folder that lacks the files of a set."""
    labels = ", ".join(f"{index} {label}" for index, label in enumerate(KNOWN[name].labels)) if name in KNOWN else ""
    return f"""\
The set {name} is needed; the project does not ship it. Make a folder with {name}.train.txt and
{name}.test.txt, and {name}.dev.txt if there is a development part, one example per line, "LABEL text", tokens separated by
spaces, latin-1, and pass the folder with --data or in the environment variable DATA. {labels and f"The labels of {name} are {labels}."}"""
