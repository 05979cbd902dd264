"""Send speech to a running service and print how well a model hears its keyword: misses, false alarms and latency.

Speakers that the training did not have speak the keyword among other words, near misses of it, and hours of babble without both. These
streams run as fast as the service answers. Then `--streams` streams run in real time, in chunks of 40 ms; their times are until the reply.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from training import live, records, speech
from training.frames import FRAME_SECONDS, FrameStream
from training.hearing import Unavailable, heard, keyword_of, probabilities
from training.keyword_data import SPEAKING, TEST, TEST_BABBLE, TEST_NEAR, Part, Spoken, spoken
from training.service import cpu_seconds
from training.spotting import NOTHING, Detector, Score, compare

CHUNK_SECONDS = 0.04
SESSION_SECONDS = 300.0
"""Seconds of one session that runs faster than real time."""
LIVE = 3
"""Marks the seeds of streams in real time."""


async def fast(url: str, model: str, keyword: str, streams: list[Spoken], threshold: float) -> Score:
    """Return the score of streams that run as fast as the service answers. Latencies count the audio alone."""

    async def one(stream: Spoken) -> Score:
        events = await heard(url, model, keyword, stream.frames.astype(np.float32), threshold)
        return compare(stream.ends, events, len(stream.frames) * FRAME_SECONDS)

    return sum(await asyncio.gather(*map(one, streams)), NOTHING)


async def real_time(
    url: str, model: str, keyword: str, streams: list[speech.Stream], threshold: float
) -> tuple[Score, list[list[live.Reply]]]:
    """Return the score of streams that run at once in real time, with latencies to the reply, and the replies of each stream."""
    size = int(CHUNK_SECONDS * speech.RATE)
    sessions = [
        live.in_real_time(url, model, np.split(stream.samples, range(size, len(stream.samples), size)), CHUNK_SECONDS,
                          FrameStream().add, 1.0 + CHUNK_SECONDS * number / len(streams))
        for number, stream in enumerate(streams)
    ]  # fmt: skip
    score = NOTHING
    with live.without_collections():
        replies = await asyncio.gather(*sessions)
    for stream, received in zip(streams, replies, strict=True):
        detector = Detector(threshold)
        events = [reply.done for reply in received for _ in detector.add(probabilities(reply.output, keyword))]
        score += compare(stream.ends, events, len(stream.samples) / speech.RATE)
    return score, replies


def evaluate(keyword: str, flags: argparse.Namespace) -> records.Record:
    record: records.Record = {"kind": "served", "model": flags.model, "threshold": flags.threshold}
    if flags.hours:
        record |= faster(keyword, flags)
    if flags.streams:
        record |= at_once(keyword, flags)
    return record


def faster(keyword: str, flags: argparse.Namespace) -> records.Record:
    """Return the figures of streams faster than real time."""
    parts = ((TEST, flags.keyword_hours), (TEST_NEAR, flags.keyword_hours), (TEST_BABBLE, flags.hours))
    with_keyword, near, babble = (total(keyword, part, 3600 * hours, flags) for part, hours in parts)
    return {
        "keywords": with_keyword.keywords,
        "misses": with_keyword.misses,
        "keyword_hours": flags.keyword_hours,
        "keyword_false_alarms": with_keyword.false_alarms,
        "near_false_alarms": near.false_alarms,
        "babble_hours": flags.hours,
        "false_alarms": babble.false_alarms,
        "false_alarms_an_hour": babble.false_alarms_an_hour,
        **percentiles("audio_ms", with_keyword.latencies),
    }


def total(keyword: str, part: Part, seconds: float, flags: argparse.Namespace) -> Score:
    """Return the score of a part."""
    sessions, length = max(1, round(seconds / SESSION_SECONDS)), min(SESSION_SECONDS, seconds)
    score = NOTHING
    with ThreadPoolExecutor(SPEAKING) as pool:
        for first in range(0, sessions, SPEAKING):
            seeds = [(flags.seed, session) for session in range(first, min(first + SPEAKING, sessions))]
            streams = list(pool.map(lambda seed: spoken(flags.data, keyword, part, seed, length), seeds))
            score += asyncio.run(fast(flags.url, flags.model, keyword, streams, flags.threshold))
    return score


def at_once(keyword: str, flags: argparse.Namespace) -> records.Record:
    """Return the figures of streams in real time. A chunk is late when its reply takes longer than the next chunk."""
    randoms = [np.random.default_rng((TEST.number, flags.seed, LIVE, number)) for number in range(flags.streams)]
    streams = [speech.stream(random, TEST.names, flags.seconds, keyword, TEST.share) for random in randoms]
    shares = {"generator": core_share(time.process_time)}
    if flags.service_pid:
        shares["service"] = core_share(lambda: cpu_seconds(flags.service_pid))
    score, replies = asyncio.run(real_time(flags.url, flags.model, keyword, streams, flags.threshold))
    times = [[reply.seconds for reply in received] for received in replies]
    late = [[seconds > CHUNK_SECONDS for seconds in received] for received in times]
    return {
        "streams": flags.streams,
        "seconds": flags.seconds,
        "live_keywords": score.keywords,
        "live_misses": score.misses,
        **percentiles("event_ms", score.latencies),
        **percentiles("chunk_ms", [seconds for received in times for seconds in received]),
        "chunks": sum(map(len, times)),
        "late_chunks": sum(map(sum, late)),
        "late_streams": sum(map(any, late)),
        "streams_behind_at_end": sum(received[-1] for received in late),
        **{f"{name}_core_percent": share() for name, share in shares.items()},
    }


def core_share(cpu_time: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns the share of a core used since this call, in percent."""
    used, start = cpu_time(), time.monotonic()
    return lambda: round(100 * (cpu_time() - used) / (time.monotonic() - start), 1)


def percentiles(name: str, seconds: Any) -> records.Record:
    """Return the median, the 99th percentile and the maximum, in milliseconds."""
    values = 1000 * np.percentile(seconds, (50, 99, 100)) if len(seconds) else (None, None, None)
    return {f"{name}_{key}": value and round(float(value), 2) for key, value in zip(("p50", "p99", "max"), values, strict=True)}


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name of a model by train_keyword.py")
    parser.add_argument("--threshold", type=float, default=0.9, help="of an event (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=10.0, help="of babble; 0 runs only in real time (default: %(default)s)")
    parser.add_argument(
        "--keyword-hours",
        type=float,
        default=1.0,
        help="of streams with the keyword, and of streams with near misses (default: %(default)s)",
    )
    parser.add_argument("--streams", type=int, default=100, help="that run at once in real time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of these (default: %(default)s)")
    parser.add_argument(
        "--service-pid", type=int, help="process of the service on this machine, to measure its share of a core"
    )
    parser.add_argument("--data", type=Path, help="folder that keeps the frames for the next evaluation (default: none)")
    parser.add_argument("--seed", type=int, default=1, help="of the speech (default: %(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to which the figures are appended (default: none)")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    """Return 0 if the figures were printed, 1 if the service does not answer or lacks the model, 2 if espeak-ng is missing."""
    flags = arguments(line)
    try:
        record = evaluate(keyword_of(flags.url, flags.model), flags)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    except speech.MissingProgram as error:
        print(error, file=sys.stderr)
        return 2
    records.report(flags.results, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
