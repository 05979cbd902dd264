"""Turns probabilities of frames into events, compares events with the places of a keyword, and chooses the threshold of an event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

EARLY, LATE = 0.2, 0.5
"""An event belongs to a keyword that ends up to `EARLY` seconds after it or up to `LATE` seconds before it."""
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)
FALSE_ALARMS_AN_HOUR = 0.5
"""The chosen threshold allows at most this rate on the babble of the development part."""
CHUNK = 100
"""Frames of a chunk for a stream that runs faster than real time: the answers do not depend on the chunks."""


@dataclass
class Detector:
    """Decides when a stream has the keyword: after `in_a_row` frames of at least `threshold`, and then not again for `rest` frames."""

    threshold: float = 0.9
    in_a_row: int = 6
    rest: int = 80
    _frame: int = field(default=0, init=False)
    _row: int = field(default=0, init=False)
    _ready: int = field(default=0, init=False)

    def add(self, probabilities: Iterable[float]) -> list[int]:
        """Add the probabilities of the next frames, and return the numbers of the frames with an event."""
        events = []
        for probability in probabilities:
            self._row = self._row + 1 if probability >= self.threshold else 0
            if self._row >= self.in_a_row and self._frame >= self._ready:
                events.append(self._frame)
                self._ready = self._frame + self.rest
                self._row = 0
            self._frame += 1
        return events


@dataclass(frozen=True)
class Score:
    """What was found in streams of `seconds` with `keywords`. latencies: seconds from the end of a word to its event."""

    keywords: int
    latencies: tuple[float, ...]
    false_alarms: int
    seconds: float

    @property
    def misses(self) -> int:
        return self.keywords - len(self.latencies)

    @property
    def false_alarms_an_hour(self) -> float:
        return self.false_alarms * 3600 / self.seconds

    def __add__(self, other: Score) -> Score:
        return Score(
            self.keywords + other.keywords,
            self.latencies + other.latencies,
            self.false_alarms + other.false_alarms,
            self.seconds + other.seconds,
        )


NOTHING = Score(0, (), 0, 0.0)


def compare(ends: Sequence[float], events: Sequence[float], seconds: float) -> Score:
    """Return the score of the events of a stream. Each event belongs to at most one keyword, and each keyword has at most one event."""
    missing, latencies = sorted(ends), []
    for event in sorted(events):
        belongs = next((end for end in missing if end - EARLY <= event <= end + LATE), None)
        if belongs is not None:
            missing.remove(belongs)
            latencies.append(event - belongs)
    return Score(len(ends), tuple(latencies), len(events) - len(latencies), seconds)


def best(spoken: Mapping[float, Score], babble: Mapping[float, Score]) -> float:
    """Return the threshold with the fewest misses among those with few (or the fewest) false alarms in babble; if equal, the highest."""

    def faults(threshold: float) -> tuple[float, int, float]:
        alarms = max(FALSE_ALARMS_AN_HOUR, babble[threshold].false_alarms_an_hour)
        return alarms, spoken[threshold].misses, -threshold

    return min(THRESHOLDS, key=faults)


def in_chunks(frames: NDArray[Any]) -> list[NDArray[np.float32]]:
    """Return frames as the chunks of a session."""
    return [frames[first : first + CHUNK].astype(np.float32) for first in range(0, len(frames), CHUNK)]


def probabilities(outputs: Iterable[Any], keyword: str) -> list[float]:
    """Return the probability of the keyword for each frame, of the outputs of a session."""
    pairs = (pair for output in outputs for pair in zip(output["labels"], output["scores"], strict=True))
    return [score if label == keyword else 1 - score for label, score in pairs]
