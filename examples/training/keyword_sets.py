"""Reads and makes the sets of the recipe for keywords: streams of speech as frames, half of them with the keyword.

A set is the files `KEYWORD.train.npz` and `KEYWORD.test.npz`. frames: (streams, frames, BANDS); ends: (keywords, 2), the stream of each
place of the keyword, and the second at which the keyword ends there.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training import speech
from training.parts import MissingData
from training.terminal import bar

SECONDS = 60.0
"""Seconds of a stream."""
SPEAKING = 2 * (os.cpu_count() or 1)
"""Threads that wait for espeak-ng."""
PARTS = {"train": (speech.TRAINING, speech.NEAR), "test": (speech.TEST, 0.0)}
"""The speakers of each part, and the share of near misses of the keyword among the words."""


@dataclass(frozen=True)
class Spoken:
    """A stream as frames. ends: the seconds at which the keyword ends."""

    frames: NDArray[np.float16]
    ends: tuple[float, ...]


def read(folder: Path, keyword: str, part: str) -> list[Spoken]:
    """Return a part of a set, train or test. Raises MissingData."""
    file = folder / f"{keyword}.{part}.npz"
    if not file.is_file():
        raise MissingData(
            f"{file} is missing: after make programs PROGRAMS=speech, examples/make_sets.py FOLDER --keyword {keyword} makes it. "
            "Pass the folder with "
            "--data or in the environment variable DATA."
        )
    stored = np.load(file)
    frames, ends = stored["frames"], stored["ends"]
    return [Spoken(rows, tuple(ends[ends[:, 0] == stream, 1].tolist())) for stream, rows in enumerate(frames)]


def make(folder: Path, keyword: str, sizes: dict[str, int]) -> None:
    """Write a set with this number of streams in each part. Raises MissingData."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in sizes.items():
        streams: list[Spoken] = []
        with ThreadPoolExecutor(SPEAKING) as pool, bar(f"speaking {part}", size) as progress:
            for stream in pool.map(partial(spoken, keyword, part), range(size)):
                streams.append(stream)
                progress()
        ends = [(number, end) for number, stream in enumerate(streams) for end in stream.ends]
        frames = np.stack([stream.frames for stream in streams])
        np.savez(folder / f"{keyword}.{part}.npz", frames=frames, ends=np.array(ends).reshape(-1, 2))


def spoken(keyword: str, part: str, number: int) -> Spoken:
    """Return a stream of a part. Every second stream has the keyword."""
    from training.frames import frames  # needs an optional package, which reading a set does not

    random = np.random.default_rng((list(PARTS).index(part), number))
    speakers, near = PARTS[part]
    stream = speech.stream(random, speakers, SECONDS, keyword, 0.0 if number % 2 else speech.SHARE, near)
    return Spoken(frames(stream.samples).astype(np.float16), stream.ends)
