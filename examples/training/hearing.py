"""Asks a running service when a model of train_keyword.py hears its keyword."""

from __future__ import annotations

import urllib.error
from typing import Any

from training import live
from training.frames import Frames, known_at
from training.service import Service
from training.spotting import Detector

AT_ONCE = 100
"""Frames of a chunk that runs faster than real time: the answers do not depend on the chunks."""


class Unavailable(Exception):
    """The service does not answer, or lacks the model."""


def keyword_of(url: str, model: str) -> str:
    """Return the keyword of a served model. Raises Unavailable."""
    try:
        models = {served["name"]: served for served in Service(url).models()}
    except urllib.error.URLError as error:
        raise Unavailable(f"no answer from {url} ({error.reason}): start the service with make serve") from error
    if model not in models:
        raise Unavailable(f"{url} has no model {model!r}: it has {', '.join(sorted(models))}")
    keyword: str = models[model]["head"]["labels"][1]
    return keyword


def probabilities(output: Any, keyword: str) -> list[float]:
    """Return the probability of the keyword for each frame of a reply."""
    pairs = zip(output["labels"], output["scores"], strict=True)
    return [score if label == keyword else 1 - score for label, score in pairs]


async def heard(url: str, model: str, keyword: str, frames: Frames, threshold: float) -> list[float]:
    """Return the seconds of audio after which a session hears the keyword. It runs as fast as the service answers."""
    chunks, detector = [frames[first : first + AT_ONCE] for first in range(0, len(frames), AT_ONCE)], Detector(threshold)
    answers = await live.outputs(url, model, chunks)
    return [known_at(frame) for output in answers for frame in detector.add(probabilities(output, keyword))]
