"""Turns probabilities of frames into events, and compares events with the places of a keyword."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BANDS = 40
"""Log-mel energies of a frame."""
FRAME_SECONDS, WINDOW_SECONDS = 0.010, 0.025
"""Seconds between frames, and the seconds of audio that a frame covers."""
EARLY, LATE = 0.2, 0.5
"""An event belongs to a keyword that ends up to `EARLY` seconds after it or up to `LATE` seconds before it."""
THRESHOLD, IN_A_ROW, REST = 0.9, 6, 80
"""An event is `IN_A_ROW` frames of at least a threshold, and then no event for `REST` frames."""
CHUNK = 100
"""Frames of a chunk for a stream that runs faster than real time: the answers do not depend on the chunks."""


def events(probabilities: Iterable[float], threshold: float = THRESHOLD) -> list[float]:
    """Return the seconds at which a stream has the keyword, of the probability of each frame: the frame is complete then."""
    found, row, ready = [], 0, 0
    for frame, probability in enumerate(probabilities):
        row = row + 1 if probability >= threshold else 0
        if row >= IN_A_ROW and frame >= ready:
            found.append(frame * FRAME_SECONDS + WINDOW_SECONDS)
            row, ready = 0, frame + REST
    return found


def latencies(ends: Sequence[float], heard: Sequence[float]) -> list[float]:
    """Return the seconds from the end of each heard keyword to its event. An event belongs to one keyword at most; others are false."""
    missing, found = sorted(ends), []
    for event in sorted(heard):
        belongs = next((end for end in missing if end - EARLY <= event <= end + LATE), None)
        if belongs is not None:
            missing.remove(belongs)
            found.append(event - belongs)
    return found


def in_chunks(frames: NDArray[Any]) -> list[NDArray[np.float32]]:
    """Return frames as the chunks of a session."""
    return [frames[first : first + CHUNK].astype(np.float32) for first in range(0, len(frames), CHUNK)]


def probabilities(outputs: Iterable[Any], keyword: str) -> list[float]:
    """Return the probability of the keyword for each frame, of the outputs of a session."""
    pairs = (pair for output in outputs for pair in zip(output["labels"], output["scores"], strict=True))
    return [score if label == keyword else 1 - score for label, score in pairs]
