"""Streams of synthetic speech as frames, with the places of the keyword. A folder keeps them, so that all families share them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from training import speakers, speech
from training.frames import BANDS, FRAME_SECONDS, WINDOW_SECONDS, frames
from training.terminal import bar

SPEAKING = 2 * (os.cpu_count() or 1)
"""Threads that wait for espeak-ng."""
START, STOP = 0.03, 0.15
"""Seconds after the end of a keyword between which frames are positive: the model hears the following audio, and may not answer later."""
BEFORE, BEHIND = 0.1, 0.05
"""Seconds before the end of a keyword, and after its positive frames, in which frames do not count."""
CUT_FRAMES = 80
"""Frames at the beginning of a window in which a keyword may be incomplete."""
WEIGHT = 2.0
"""Weight of a positive frame: there are few of them."""
TILTS = 6
"""Points of a random curve along the bands."""


@dataclass(frozen=True)
class Part:
    """Streams of one purpose. number: the first number of every seed. share: of the utterances that end with the keyword, where an
    utterance is between two pauses. near: share of near misses among the words."""

    name: str
    number: int
    names: tuple[str, ...]
    share: float = 0.0
    near: float = 0.0


LEARNING_PARTS = (
    Part("the training part", 0, speakers.TRAINING, 0.6, 0.08),
    Part("babble to train on", 3, speakers.TRAINING, 0.0, 0.03),
    Part("the development part", 1, speakers.DEVELOPMENT, 0.6, 0.05),
    Part("babble of the development part", 4, speakers.DEVELOPMENT),
)
TEST, TEST_BABBLE = Part("the test part", 2, speakers.TEST, 0.3), Part("babble of the test part", 6, speakers.TEST)


@dataclass(frozen=True)
class Spoken:
    """A stream as frames. ends: the seconds at which the keyword ends."""

    frames: NDArray[np.float16]
    ends: tuple[float, ...]


def spoken(folder: Path | None, keyword: str, part: Part, seed: tuple[int, ...], seconds: float) -> Spoken:
    """Return the stream of a seed, from the folder if it has it."""
    name = "-".join(map(str, (keyword, part.number, *seed)))
    file = folder / f"{name}-{seconds:g}.npz" if folder else None
    if file and file.is_file():
        stored = np.load(file)
        return Spoken(stored["frames"], tuple(stored["ends"].tolist()))
    stream = speech.stream(np.random.default_rng((part.number, *seed)), part.names, seconds, keyword, part.share, part.near)
    made = Spoken(frames(stream.samples).astype(np.float16), stream.ends)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp.npz")
        np.savez(unfinished, frames=made.frames, ends=np.array(made.ends))
        unfinished.rename(file)
    return made


def corpus(folder: Path | None, keyword: str, part: Part, seeds: Sequence[tuple[int, ...]], seconds: float) -> list[Spoken]:
    """Return the streams of some seeds of a part."""
    with ThreadPoolExecutor(SPEAKING) as pool, bar(f"speaking {part.name}", len(seeds)) as progress:

        def made(seed: tuple[int, ...]) -> Spoken:
            stream = spoken(folder, keyword, part, seed, seconds)
            progress()
            return stream

        return list(pool.map(made, seeds))


def marks(ends: tuple[float, ...], count: int) -> tuple[Tensor, Tensor]:
    """Return the label and the weight of each of `count` frames.

    A frame is positive (1) when it is complete between `START` and `STOP` seconds after the end of a keyword. Frames shortly before and
    after these have no weight: the answers of the model do not matter there.
    """
    complete = torch.arange(count) * FRAME_SECONDS + WINDOW_SECONDS
    labels, weights = torch.zeros(count, dtype=torch.long), torch.ones(count)
    for end in ends:
        weights[(complete >= end - BEFORE) & (complete < end + STOP + BEHIND)] = 0.0
    for end in ends:
        positive = (complete >= end + START) & (complete < end + STOP)
        labels[positive], weights[positive] = 1, WEIGHT
    return labels, weights


@dataclass(frozen=True)
class Cut:
    """Windows of a batch. numbers: of the windows; starts: the stream and the first frame of each."""

    numbers: Tensor
    starts: list[tuple[int, int]]


class Windows:
    """Streams as windows at random places. A window has no weight where it may have cut off a keyword."""

    def __init__(self, streams: Sequence[Spoken], length: int) -> None:
        self.frames = torch.from_numpy(np.stack([stream.frames for stream in streams]))
        count = self.frames.shape[1]
        self.length = min(length, count)
        marked = [marks(stream.ends, count) for stream in streams]
        self.labels, self.weights = (torch.stack(column) for column in zip(*marked, strict=True))
        starts = range(0, count - self.length + 1, self.length)
        self.places = [(stream, start) for stream in range(len(streams)) for start in starts]
        self.losses = torch.ones(len(self.places))
        """The loss of each window in its latest batch: the caller sets them."""

    def epoch(self, size: int, share: float) -> list[Cut]:
        """Return batches that have `share` of the windows, in random order: all of them, or mostly those with large losses."""
        some = torch.multinomial(self.losses.clamp(min=1e-4).sqrt(), max(1, int(share * len(self.places))))
        last, cuts = self.frames.shape[1] - self.length, []
        for numbers in torch.split(some[torch.randperm(len(some))], size):
            shifts = torch.randint(self.length, (len(numbers),)).tolist()
            places = [self.places[number] for number in numbers]
            moved = [(stream, min(start + shift, last)) for (stream, start), shift in zip(places, shifts, strict=True)]
            cuts.append(Cut(numbers, moved))
        return cuts

    def batch(self, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
        """Return the frames (windows, frames, BANDS), and the labels and weights (windows, frames) of a batch."""
        frames, labels, weights = (
            torch.stack([rows[stream, start : start + self.length] for stream, start in cut.starts])
            for rows in (self.frames, self.labels, self.weights)
        )
        is_whole = (torch.arange(self.length) >= CUT_FRAMES) | (labels == 0)
        return frames.float(), labels, weights * is_whole


def varied(frames: Tensor, loudness: float, warp: float, tilt: float) -> Tensor:
    """Return frames (windows, frames, BANDS) as other throats, microphones and distances would have them.

    loudness, tilt: standard deviations in log energies, of a constant of the window, and of `TILTS` points along its bands. warp: the
    largest relative change of the frequencies.
    """
    windows = len(frames)
    points = loudness * torch.randn(windows, 1, 1) + tilt * torch.randn(windows, 1, TILTS)
    return warped(frames, warp) + nn.functional.interpolate(points, size=BANDS, mode="linear", align_corners=True)


def warped(frames: Tensor, spread: float) -> Tensor:
    """Return frames (windows, frames, BANDS) of longer and shorter throats: each window with its bands at other frequencies."""
    factors = 1 + spread * (2 * torch.rand(len(frames), 1) - 1)
    places = (torch.arange(BANDS) * factors).clamp(0, BANDS - 1)
    below = places.long().clamp(max=BANDS - 2)
    share = (places - below)[:, None]
    low, high = (frames.gather(2, bands[:, None].expand_as(frames)) for bands in (below, below + 1))
    return (1 - share) * low + share * high
