"""Turns the verses of the King James Bible into a text for a language model, and into words with the punctuation after them as labels.

Debian's package bible-kjv prints the text, whose copyright has expired: `bible -f gen1:1-rev22:21 > kjv.txt`. A line is a verse after its
reference, such as `Ge1:1 In the beginning God created the heaven and the earth.`
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TypeVar

from training.step_sets import TaggedWords

POINTS = {"": "none", ",": "comma", ".": "stop", ";": "semicolon", ":": "colon", "?": "question", "!": "exclamation"}
WORD = re.compile(r"([A-Za-z][A-Za-z'-]*)[)\]>]*([,.;:?!]?)")
SEED = 1

T = TypeVar("T")


def verses(file: Path) -> list[str]:
    """Return the verses without their references."""
    return [line.split(" ", 1)[1] for line in file.read_text("ascii").splitlines() if " " in line]


def tagged(verse: str) -> TaggedWords:
    """Return the words of a verse in lower case, with the punctuation after each."""
    found = WORD.findall(verse)
    return TaggedWords([word.lower() for word, _ in found], [POINTS[point] for _, point in found])


def divided(examples: list[T], held_out: int) -> list[list[T]]:
    """Return a training, a development and a test part, the last two with `held_out` examples each."""
    shuffled = list(examples)
    random.Random(SEED).shuffle(shuffled)
    return [shuffled[2 * held_out :], shuffled[:held_out], shuffled[held_out : 2 * held_out]]
