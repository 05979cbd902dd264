"""Reads the files of the TREC question classification set. Requires the standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAIN_FILE, TEST_FILE = "trec.train.txt", "trec.test.txt"
LABELS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")
QUESTIONS = {TRAIN_FILE: "5,452 questions", TEST_FILE: "500 questions"}


@dataclass(frozen=True)
class Question:
    label: int
    text: str


def read_questions(file: Path) -> list[Question]:
    lines = (line.split(maxsplit=1) for line in file.read_text("latin-1").split("\n") if line)
    return [Question(int(label), text) for label, text in lines]


def is_missing(folder: Path | None, *files: str) -> bool:
    """Return whether the folder is None or lacks a file."""
    return folder is None or not all((folder / name).is_file() for name in files)


def download_instructions(*files: str) -> str:
    """Return instructions for a user with a folder that lacks a file."""
    listed = "\n".join(f"  {name:16}{QUESTIONS[name]}" for name in files)
    return f"""\
The TREC question classification set (Li and Roth, 2002) is needed; the project does not ship it. Make a folder with
{listed}
one question per line, "LABEL text", tokens separated by spaces, latin-1, with the labels
  {", ".join(f"{index} {label}" for index, label in enumerate(LABELS))}
and pass the folder with --data or in the environment variable DATA."""
