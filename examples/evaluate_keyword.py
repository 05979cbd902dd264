"""Send speech to a running service and print how well a model hears its keyword: misses, false alarms and latency.

Speakers that the training did not have speak the keyword among other words, near misses of it, and hours of babble without both. These
streams run as fast as the service answers. Then `--streams` streams run in real time, in chunks of 40 ms; their times are until the reply.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from training import live, records, speech
from training.frames import FRAME_SECONDS, Frames, FrameStream, frames, known_at
from training.keyword_data import SPEAKING, TEST
from training.service import Service
from training.spotting import NOTHING, Detector, Score, compare

CHUNK_SECONDS = 0.04
SESSION_SECONDS = 300.0
"""Of one session that runs faster than real time."""
AT_ONCE = 100
"""Frames of a chunk that runs faster than real time: the model says the same for any chunks."""


@dataclass(frozen=True)
class Part:
    """hours: the flag with its length. share: of the keyword between two pauses. near: of near misses among the words."""

    hours: str
    share: float
    near: float


PARTS = (Part("keyword_hours", 0.3, 0.0), Part("keyword_hours", 0.0, 0.05), Part("hours", 0.0, 0.0))
"""The keyword among other words, near misses, and babble."""


def probabilities(output: Any, keyword: str) -> list[float]:
    """Return the probability of the keyword for each frame of a reply."""
    pairs = zip(output["labels"], output["scores"], strict=True)
    return [score if label == keyword else 1 - score for label, score in pairs]


@dataclass(frozen=True)
class Spoken:
    """A stream as frames. ends: the seconds at which the keyword ends."""

    frames: Frames
    ends: tuple[float, ...]


def speak(keyword: str, seconds: float, part: Part, seed: tuple[int, ...]) -> Spoken:
    """Return the stream of a seed, by the test speakers."""
    stream = speech.stream(np.random.default_rng(seed), speech.TEST_SPEAKERS, seconds, keyword, part.share, part.near)
    return Spoken(frames(stream.samples), stream.ends)


async def fast(url: str, model: str, keyword: str, streams: list[Spoken], threshold: float) -> Score:
    """Return the score of streams that run as fast as the service answers. Latencies are those of the audio alone."""

    async def one(spoken: Spoken) -> Score:
        rows = spoken.frames
        answers = await live.outputs(url, model, [rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE)])
        detector = Detector(threshold)
        events = [known_at(frame) for output in answers for frame in detector.add(probabilities(output, keyword))]
        return compare(spoken.ends, events, len(rows) * FRAME_SECONDS)

    return sum(await asyncio.gather(*map(one, streams)), NOTHING)


async def real_time(url: str, model: str, keyword: str, streams: list[speech.Stream], threshold: float) -> Any:
    """Return the score of streams that run at once in real time, with latencies to the reply, and the time of each chunk."""
    size = int(CHUNK_SECONDS * speech.RATE)
    sessions = [
        live.in_real_time(url, model, np.split(stream.samples, range(size, len(stream.samples), size)), CHUNK_SECONDS,
                          FrameStream().add, 1.0 + CHUNK_SECONDS * number / len(streams))
        for number, stream in enumerate(streams)
    ]  # fmt: skip
    score = NOTHING
    replies = await asyncio.gather(*sessions)
    for stream, received in zip(streams, replies, strict=True):
        detector = Detector(threshold)
        events = [reply.done for reply in received for _ in detector.add(probabilities(reply.output, keyword))]
        score += compare(stream.ends, events, len(stream.samples) / speech.RATE)
    return score, [reply.seconds for received in replies for reply in received]


def evaluate(url: str, model: str, keyword: str, flags: argparse.Namespace) -> records.Record:
    spoken, near, babble = (total(url, model, keyword, flags, number) for number in range(len(PARTS)))
    record = {
        "kind": "served",
        "model": model,
        "threshold": flags.threshold,
        "keywords": spoken.keywords,
        "misses": spoken.misses,
        "keyword_hours": flags.keyword_hours,
        "keyword_false_alarms": spoken.false_alarms,
        "near_false_alarms": near.false_alarms,
        "babble_hours": flags.hours,
        "false_alarms_an_hour": babble.false_alarms_an_hour,
        **percentiles("audio_ms", spoken.latencies),
    }
    if flags.streams:
        randoms = [np.random.default_rng((TEST, flags.seed, len(PARTS), number)) for number in range(flags.streams)]
        streams = [speech.stream(random, speech.TEST_SPEAKERS, flags.seconds, keyword, PARTS[0].share) for random in randoms]
        score, times = asyncio.run(real_time(url, model, keyword, streams, flags.threshold))
        record |= {
            "streams": flags.streams,
            "seconds": flags.seconds,
            "live_keywords": score.keywords,
            "live_misses": score.misses,
            **percentiles("event_ms", score.latencies),
            **percentiles("chunk_ms", times),
            "chunks": len(times),
            "late_chunks": sum(seconds > CHUNK_SECONDS for seconds in times),
        }
    return record


def total(url: str, model: str, keyword: str, flags: argparse.Namespace, number: int) -> Score:
    """Return the score of one of `PARTS`."""
    part = PARTS[number]
    seconds = 3600 * getattr(flags, part.hours)
    sessions = max(1, round(seconds / SESSION_SECONDS))
    score = NOTHING
    with ThreadPoolExecutor(SPEAKING) as pool:
        for first in range(0, sessions, SPEAKING):
            seeds = [(TEST, flags.seed, number, session) for session in range(first, min(first + SPEAKING, sessions))]
            length = min(SESSION_SECONDS, seconds)
            streams = list(pool.map(partial(speak, keyword, length, part), seeds))
            score += asyncio.run(fast(url, model, keyword, streams, flags.threshold))
    return score


def percentiles(name: str, seconds: Any) -> records.Record:
    """Return the median, the 99th percentile and the maximum, in milliseconds."""
    values = 1000 * np.percentile(seconds, (50, 99, 100)) if len(seconds) else (None, None, None)
    return {f"{name}_{key}": value and round(float(value), 2) for key, value in zip(("p50", "p99", "max"), values, strict=True)}


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name of a model by train_keyword.py")
    parser.add_argument("--threshold", type=float, default=0.9, help="of an event (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=10.0, help="of babble without the keyword (default: %(default)s)")
    parser.add_argument(
        "--keyword-hours",
        type=float,
        default=1.0,
        help="of streams with the keyword, and of streams with near misses (default: %(default)s)",
    )
    parser.add_argument("--streams", type=int, default=100, help="that run at once in real time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of these (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the speech (default: %(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to which the figures are appended (default: none)")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    """Return 0 if the figures were printed, 1 if the service does not answer or lacks the model, 2 if espeak-ng is missing."""
    flags = arguments(line)
    try:
        models = {model["name"]: model for model in Service(flags.url).models()}
        keyword = models[flags.model]["head"]["labels"][1]
        record = evaluate(flags.url, flags.model, keyword, flags)
    except KeyError:
        print(f"{flags.url} has no model {flags.model!r}: it has {', '.join(sorted(models))}", file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"no answer from {flags.url} ({error.reason}): start the service with make serve", file=sys.stderr)
        return 1
    except speech.MissingProgram as error:
        print(error, file=sys.stderr)
        return 2
    records.report(flags.results, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
