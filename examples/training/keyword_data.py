"""Streams of synthetic speech as frames, with the places of the keyword. A folder keeps them, so that all families share them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training import speech
from training.frames import BANDS, FRAME_SECONDS, WINDOW_SECONDS, frames

TRAINING, DEVELOPMENT, TEST = range(3)
"""The first number of every seed, by the purpose of its streams."""
SPEAKING = 2 * (os.cpu_count() or 1)
"""Threads that wait for espeak-ng."""
SHARE, NEAR = 0.6, 0.05
"""Share of utterances that end with the keyword, and share of near misses among the words. An utterance is between two pauses."""
AFTER, UNDECIDED = 0.2, 0.1
"""Seconds after the end of a keyword in which frames are positive, and seconds around these in which frames do not count."""
CUT_FRAMES = 80
"""Frames at the beginning of a window in which a keyword may be incomplete."""
WEIGHT = 2.0
"""Weight of a positive frame: there are few of them."""


@dataclass(frozen=True)
class Corpus:
    """frames: (streams, frames, BANDS). ends: the seconds at which the keyword ends in each stream."""

    frames: NDArray[np.float16]
    ends: list[tuple[float, ...]]


def corpus(folder: Path | None, keyword: str, purpose: int, streams: int, seconds: float) -> Corpus:
    """Return the streams of a seed, from the folder if it has them."""
    file = folder / f"{keyword}-{purpose}-{streams}-{seconds:g}.npz" if folder else None
    if file and file.is_file():
        stored = np.load(file)
        return Corpus(stored["frames"], [tuple(row[row >= 0].tolist()) for row in stored["ends"]])
    speakers = speech.TEST_SPEAKERS if purpose == TEST else speech.TRAINING_SPEAKERS

    def spoken(number: int) -> tuple[NDArray[np.float16], tuple[float, ...]]:
        stream = speech.stream(np.random.default_rng((purpose, number)), speakers, seconds, keyword, SHARE, NEAR)
        return frames(stream.samples).astype(np.float16), stream.ends

    with ThreadPoolExecutor(SPEAKING) as pool:
        rows, ends = zip(*pool.map(spoken, range(streams)), strict=True)
    made = Corpus(np.stack(rows), list(ends))
    if file:
        padded = np.full((streams, max(map(len, made.ends), default=0)), -1.0)
        for row, places in zip(padded, made.ends, strict=True):
            row[: len(places)] = places
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, frames=made.frames, ends=padded)
    return made


def marks(ends: tuple[float, ...], count: int) -> tuple[Tensor, Tensor]:
    """Return the label and the weight of each of `count` frames.

    A frame is positive (1) when it is complete within `AFTER` seconds after the end of a keyword. Frames shortly before and after these
    have no weight: it does not matter what the model says there.
    """
    complete = torch.arange(count) * FRAME_SECONDS + WINDOW_SECONDS
    labels, weights = torch.zeros(count, dtype=torch.long), torch.ones(count)
    for end in ends:
        weights[(complete >= end - UNDECIDED) & (complete < end + AFTER + 2 * UNDECIDED)] = 0.0
    for end in ends:
        positive = (complete >= end) & (complete < end + AFTER)
        labels[positive], weights[positive] = 1, WEIGHT
    return labels, weights


class Windows:
    """The training part as windows at random places of its streams. A window has no weight where it may have cut off a keyword."""

    def __init__(self, part: Corpus, length: int) -> None:
        self.frames, self.length = torch.from_numpy(part.frames), min(length, part.frames.shape[1])
        marked = [marks(ends, self.frames.shape[1]) for ends in part.ends]
        self.labels, self.weights = (torch.stack(column) for column in zip(*marked, strict=True))

    def epoch(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of frames, labels and weights that have as many frames as the part, in random order."""
        streams, count = self.frames.shape[:2]
        places = [(stream, start) for stream in range(streams) for start in range(0, count - self.length + 1, self.length)]
        for batch in torch.split(torch.randperm(len(places)), size):
            shift = torch.randint(self.length, (len(batch),)).tolist()
            cuts = [
                (places[index][0], min(places[index][1] + by, count - self.length))
                for index, by in zip(batch, shift, strict=True)
            ]
            frames, labels, weights = (
                torch.stack([rows[stream, start : start + self.length] for stream, start in cuts])
                for rows in (self.frames, self.labels, self.weights)
            )
            whole = (torch.arange(self.length) >= CUT_FRAMES) | (labels == 0)
            yield frames.float(), labels, weights * whole


def warped(frames: Tensor, spread: float) -> Tensor:
    """Return frames (windows, frames, BANDS) of longer and shorter throats: each window with its bands at other frequencies."""
    factors = 1 + spread * (2 * torch.rand(len(frames), 1) - 1)
    places = (torch.arange(BANDS) * factors).clamp(0, BANDS - 1)
    below = places.long().clamp(max=BANDS - 2)
    share = (places - below)[:, None]
    low, high = (frames.gather(2, bands[:, None].expand_as(frames)) for bands in (below, below + 1))
    return (1 - share) * low + share * high
