"""Reads sets of labelled time series. A set NAME is the files `NAME_TRAIN.ts` and `NAME_TEST.ts`, in a folder or in its folder NAME.

A line of such a file is a series: its channels and then its label, separated by colons. A channel is numbers separated by commas. Series
may differ in length. Lines that begin with @ or # describe the set.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DEVELOPMENT_SHARE, SPLIT_SEED = 0.2, 0
Rows = NDArray[np.float32]
"""(steps, channels)"""


class MissingSet(Exception):
    """A folder lacks the files of a set. The message says where sets are."""


@dataclass(frozen=True)
class Series:
    label: str
    rows: Rows


@dataclass(frozen=True)
class SeriesSet:
    name: str
    labels: tuple[str, ...]
    train: list[Series]
    test: list[Series]


def read_set(folder: Path | None, name: str) -> SeriesSet:
    """Return a set. Raises MissingSet."""
    train, test = (read(folder, name, part) for part in ("TRAIN", "TEST"))
    labels = {series.label for series in train}
    return SeriesSet(name, tuple(sorted(labels, key=int if all(map(str.isdecimal, labels)) else str)), train, test)


def read(folder: Path | None, name: str, part: str) -> list[Series]:
    """Return a part of a set, TRAIN or TEST. Raises MissingSet."""
    places = [(folder or Path()) / inner / f"{name}_{part}.ts" for inner in ("", name)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise MissingSet(
            f"{places[0]} is needed; the project does not ship it. `make series` unpacks some sets and prints their folder: pass it "
            "with --data or in the environment variable DATA. More sets are at timeseriesclassification.com"
        )
    return [parse(line) for line in file.read_text().splitlines() if line.strip() and line[0] not in "@#"]


def parse(line: str) -> Series:
    """Return the series of a line."""
    *channels, label = line.strip().split(":")
    return Series(label, np.array([channel.split(",") for channel in channels], np.float32).T)


def hold_out(series: list[Series], seed: int = SPLIT_SEED) -> tuple[list[Series], list[Series]]:
    """Return four fifths of the series of each label for training, and a fifth for development."""
    by_label = defaultdict(list)
    for one in random.Random(seed).sample(series, len(series)):
        by_label[one.label].append(one)
    parts: tuple[list[Series], list[Series]] = ([], [])
    for group in by_label.values():
        count = round(DEVELOPMENT_SHARE * len(group))
        parts[0].extend(group[count:])
        parts[1].extend(group[:count])
    return parts
