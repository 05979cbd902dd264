"""Reads and writes the sets of the recipes for tags, language and spans. Requires the standard library only.

A set NAME is the files `NAME.train.KIND`, `NAME.dev.KIND` and `NAME.test.KIND` in UTF-8. KIND is

- `tags`: a line is a word, a tab and the label of the word; an empty line ends a sequence; a space within a word becomes `_`;
- `text`: a line is a sequence for a language model;
- `spans`: a line is a JSON object with a `question` and a `passage`, words with spaces between them, and the first and the last word of
  the answer, `start` and `end`, counted from 0 in the passage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.parts import MissingData, Parts

PARTS = ("train", "dev", "test")
TERMS = {
    "kjv": "The text is the King James Bible of 1611 as Debian's package bible-kjv has it; its copyright has expired.",
    "facts": "The data comes from a small grammar, and the model understands no other English.",
}
"""The source and the terms of known sets, for cards."""
OTHER_TERMS = "The data has its own terms, and a model folder with a tokenizer has the words of the vocabulary."


@dataclass(frozen=True)
class TaggedWords:
    """A sequence of words with a label for each."""

    words: list[str]
    labels: list[str]


@dataclass(frozen=True)
class Question:
    """A question about a passage. start, end: the first and the last word of the answer in the passage."""

    question: str
    passage: str
    start: int
    end: int


def read(folder: Path, name: str, kind: str) -> Parts:
    """Return a set. Raises MissingData."""
    return Parts(*(read_part(folder, name, kind, part) for part in PARTS))


def read_part(folder: Path, name: str, kind: str, part: str) -> list[Any]:
    """Return the examples of a part: TaggedWords, str or Question. Raises MissingData."""
    file = folder / f"{name}.{part}.{kind}"
    if not file.is_file():
        raise MissingData(
            f"{file} is missing. The set {name} needs {', '.join(f'{name}.{each}.{kind}' for each in PARTS)}; "
            f"examples/make_sets.py makes such files, and {Path(__file__).name} describes them. Pass their folder with --data or in "
            "the environment variable DATA."
        )
    text = file.read_text("utf-8")
    lines = text.removesuffix("\n").split("\n") if text else []
    if kind == "tags":
        return list(_tagged(lines))
    return [Question(**json.loads(line)) for line in lines] if kind == "spans" else lines


def write(folder: Path, name: str, kind: str, parts: Iterable[Iterable[Any]]) -> None:
    """Write the training, development and test part of a set."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, examples in zip(PARTS, parts, strict=True):
        lines = (line for example in examples for line in _lines(example))
        (folder / f"{name}.{part}.{kind}").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _tagged(lines: list[str]) -> Iterator[TaggedWords]:
    words: list[str] = []
    labels: list[str] = []
    for line in [*lines, ""]:
        if line:
            word, label = line.split("\t")
            words.append("_".join(word.split()))
            labels.append(label)
        elif words:
            yield TaggedWords(words, labels)
            words, labels = [], []


def _lines(example: TaggedWords | Question | str) -> Iterator[str]:
    if isinstance(example, TaggedWords):
        yield from (f"{word}\t{label}" for word, label in zip(example.words, example.labels, strict=True))
        yield ""
    else:
        yield json.dumps(asdict(example)) if isinstance(example, Question) else example
