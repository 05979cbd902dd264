"""Compare settings of the text recipe on held-out tenths of the training part of a set, and print them from the best to the worst.

No text of the test part is trained or evaluated, so the settings are not chosen on it.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import train_text
from training.fitting import Settings
from training.text_sets import FOLDS, MissingSet, TextSet, hold_out, read_set


def choices(word: str) -> list[tuple[str, Any]]:
    """Return a setting with each of its values, of NAME=VALUE,VALUE. Raises ArgumentTypeError for a setting without numbers."""
    name, _, values = word.partition("=")
    default = asdict(train_text.DEFAULTS["cnn"]).get(name)
    if default is None or isinstance(default, bool | str):
        raise argparse.ArgumentTypeError(f"{name} is not a setting with a number")
    return [(name, type(default)(value)) for value in values.split(",")]


def accuracy(text_set: TextSet, settings: Settings, tenth: int, vectors: Path | None) -> float:
    """Return the percentage on a tenth of the training part of a model that was trained on the rest."""
    torch.set_num_threads(1)
    rest, held_out = hold_out(text_set.train, tenth)
    parts = replace(text_set, train=rest, test=held_out)
    return train_text.train(parts, replace(settings, seed=tenth + 1), vectors, torch.device("cpu")).accuracy


def table(measured: dict[tuple[tuple[str, Any], ...], list[float]]) -> list[str]:
    """Return the lines of a table, the best average first."""
    tenths = len(next(iter(measured.values())))
    lines = [
        f"| settings | {' | '.join(f'tenth {tenth}' for tenth in range(tenths))} | average |",
        f"|---|{'---|' * tenths}---|",
    ]
    for combination, accuracies in sorted(measured.items(), key=lambda pair: -mean(pair[1])):
        settings = ", ".join(f"{name} = {value}" for name, value in combination) or "the defaults"
        lines.append(f"| {settings} | {' | '.join(f'{value:.1f}' for value in accuracies)} | {mean(accuracies):.1f} |")
    return lines


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="trec", help="name of the set (default: %(default)s)")
    parser.add_argument("--fold", type=int, choices=range(FOLDS), default=0, help="the test part of a set without parts")
    parser.add_argument("--encoder", choices=tuple(train_text.DEFAULTS), default="lstm", help="family (default: %(default)s)")
    parser.add_argument("--try", dest="tried", type=choices, action="append", default=[], metavar="NAME=VALUE,VALUE")
    parser.add_argument("--tenths", type=int, default=3, help="how many tenths are held out in turn (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at once (default: the number of cores)")
    parser.add_argument("--vectors", type=Path, help="pretrained vectors, in the text format of word2vec or GloVe")
    parser.add_argument("--quick", action="store_true", help="small models of a few examples")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    flags = arguments(line)
    settings = train_text.DEFAULTS[flags.encoder]
    try:
        text_set = read_set(flags.data, flags.set, flags.fold)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    if flags.quick:
        text_set, settings = train_text.quick(text_set, settings)
    combinations = list(product(*flags.tried))
    with ProcessPoolExecutor(flags.jobs, get_context("spawn")) as pool:
        trainings = {
            combination: [
                pool.submit(accuracy, text_set, replace(settings, **dict(combination)), tenth, flags.vectors)
                for tenth in range(flags.tenths)
            ]
            for combination in combinations
        }
        measured = {combination: [training.result() for training in each] for combination, each in trainings.items()}
    print("\n".join(table(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
