"""Make sets for the recipes for tags, language, spans and keywords: `python make_sets.py FOLDER [--kjv FILE] [--keyword WORD]`.

| set | tags | text | spans | source |
|---|---|---|---|---|
| `facts` | parts of a sentence | yes | yes | a grammar of short passages |
| `kjv` | punctuation after a word | yes | | the King James Bible, as Debian's package bible-kjv prints it |
| `WORD` | | | | speech of espeak-ng with this word, as frames |

`bible -f gen1:1-rev22:21 > kjv.txt` prints it; its copyright has expired. A line is a verse after its reference, such as
`Ge1:1 In the beginning God created the heaven and the earth.`
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import TypeVar

from training import facts, keyword_sets, step_sets
from training.parts import MissingData
from training.step_sets import TaggedWords

SIZES = (4000, 400, 400)
"""Generated examples of the training, development and test part."""
MINUTES = {"train": 200, "test": 120}
"""Streams of a minute in each part of the speech with a keyword."""
VERSES = 12_000
"""Training verses of a language model. A verse has five times as many steps as for a tagger, and every step needs an answer."""
POINTS = {"": "none", ",": "comma", ".": "stop", ";": "semicolon", ":": "colon", "?": "question", "!": "exclamation"}
WORD = re.compile(r"([A-Za-z][A-Za-z'-]*)[)\]>]*([,.;:?!]?)")
SEED = 1

T = TypeVar("T")


def make_facts(folder: Path, sizes: tuple[int, ...]) -> None:
    generator = random.Random(SEED)
    step_sets.write(folder, "facts", "spans", [[facts.question(generator) for _ in range(size)] for size in sizes])
    passages = [[facts.passage(generator) for _ in range(size)] for size in sizes]
    step_sets.write(folder, "facts", "tags", [[passage.tagged for passage in part] for part in passages])
    step_sets.write(folder, "facts", "text", [[passage.text for passage in part] for part in passages])


def make_kjv(folder: Path, file: Path) -> None:
    lines = [line.split(" ", 1)[1] for line in file.read_text("ascii").splitlines() if " " in line]
    train, development, test = divided(lines, 200)
    step_sets.write(folder, "kjv", "text", [train[:VERSES], development, test])
    step_sets.write(folder, "kjv", "tags", divided([tagged(verse) for verse in lines], 500))


def tagged(verse: str) -> TaggedWords:
    """Return the words of a verse in lower case, with the punctuation after each."""
    found = WORD.findall(verse)
    return TaggedWords([word.lower() for word, _ in found], [POINTS[point] for _, point in found])


def divided(examples: list[T], held_out: int) -> list[list[T]]:
    """Return a training, a development and a test part, the last two with `held_out` examples each."""
    shuffled = list(examples)
    random.Random(SEED).shuffle(shuffled)
    return [shuffled[2 * held_out :], shuffled[:held_out], shuffled[held_out : 2 * held_out]]


def main(line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the sets to")
    parser.add_argument("--kjv", type=Path, help="file of verses")
    parser.add_argument("--keyword", metavar="WORD", help="an English word to speak")
    parser.add_argument("--quick", action="store_true", help="sets of a twentieth of the size")
    flags = parser.parse_args(line)
    share = 20 if flags.quick else 1
    make_facts(flags.folder, tuple(size // share for size in SIZES))
    if flags.kjv:
        make_kjv(flags.folder, flags.kjv)
    if flags.keyword:
        try:
            keyword_sets.make(flags.folder, flags.keyword, {part: count // share for part, count in MINUTES.items()})
        except MissingData as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
