"""Reads sets of labelled time series. A set NAME is the files `NAME_TRAIN.ts` and `NAME_TEST.ts`, in a folder or in its folder NAME.

A line of such a file is a series: its channels and then its label, separated by colons. A channel is numbers separated by commas. Series
may differ in length. Lines that begin with @ or # describe the set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.parts import MissingData


@dataclass(frozen=True)
class Series:
    """rows: (steps, channels)."""

    label: str
    rows: NDArray[np.float32]


def read(folder: Path, name: str, part: str) -> list[Series]:
    """Return a part of a set, TRAIN or TEST. Raises MissingData."""
    places = [folder / inner / f"{name}_{part}.ts" for inner in ("", name)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise MissingData(
            f"{places[0]} is needed; the project does not ship it. `make programs PROGRAMS=series` unpacks some sets and prints their "
            "folder: pass it with --data or in the environment variable DATA. More sets are at timeseriesclassification.com"
        )
    return [parse(line) for line in file.read_text().splitlines() if line.strip() and line[0] not in "@#"]


def parse(line: str) -> Series:
    """Return the series of a line."""
    *channels, label = line.strip().split(":")
    return Series(label, np.array([channel.split(",") for channel in channels], np.float32).T)
