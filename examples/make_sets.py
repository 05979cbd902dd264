"""Make sets for the recipes with an output per step: `python make_sets.py FOLDER [--kjv FILE]`.

| set | tags | text | spans | source |
|---|---|---|---|---|
| `hidden` | yes | yes | | a hidden Markov model, with the best figures that any model can reach |
| `facts` | | | yes | a grammar; a perfect model finds every span |
| `kjv` | yes | yes | | the King James Bible, as Debian's package bible-kjv prints it |
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from training import facts, hidden_markov, step_sets, verses
from training.hidden_markov import HiddenMarkovModel
from training.step_tasks import Language, Tags

SIZES = (4000, 400, 400)
"""Generated examples of the training, development and test part."""
VERSES = 12_000
"""Training verses of a language model. A verse has five times as many steps as for a tagger, and every step needs an answer."""


def make_hidden(folder: Path, sizes: tuple[int, ...]) -> None:
    """Write the set of the hidden Markov model, and its best figures on the test part."""
    model = HiddenMarkovModel.random()
    generator = np.random.default_rng(hidden_markov.SEED)
    parts = [[model.sample(generator) for _ in range(size)] for size in sizes]
    lines = [["".join(example.words) for example in part] for part in parts]
    step_sets.write(folder, "hidden", "tags", parts)
    step_sets.write(folder, "hidden", "text", lines)
    best = {
        "tags": Tags().quality(parts[2], [model.best_labels(example.words) for example in parts[2]]),
        "text": Language().quality(lines[2], [model.logarithms(example.words) for example in parts[2]]),
    }
    (folder / "hidden.optimum.json").write_text(json.dumps(best, indent=2) + "\n")


def make_facts(folder: Path, sizes: tuple[int, ...]) -> None:
    generator = random.Random(1)
    step_sets.write(folder, "facts", "spans", [[facts.question(generator) for _ in range(size)] for size in sizes])
    (folder / "facts.optimum.json").write_text(json.dumps({"spans": {"exact": 100.0, "f1": 100.0}}, indent=2) + "\n")


def make_kjv(folder: Path, file: Path) -> None:
    lines = verses.verses(file)
    train, development, test = verses.divided(lines, 200)
    step_sets.write(folder, "kjv", "text", [train[:VERSES], development, test])
    step_sets.write(folder, "kjv", "tags", verses.divided([verses.tagged(verse) for verse in lines], 500))


def main(line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the sets to")
    parser.add_argument("--kjv", type=Path, help="file of verses: bible -f gen1:1-rev22:21 > kjv.txt")
    parser.add_argument("--quick", action="store_true", help="sets of a twentieth of the size")
    flags = parser.parse_args(line)
    flags.folder.mkdir(parents=True, exist_ok=True)
    sizes = tuple(size // 20 for size in SIZES) if flags.quick else SIZES
    make_hidden(flags.folder, sizes)
    make_facts(flags.folder, sizes)
    if flags.kjv:
        make_kjv(flags.folder, flags.kjv)
    return 0


if __name__ == "__main__":
    main()
