"""Send simulated streams to a running service, row by row, and print how good the intervals of a forecast and its anomaly scores are.

Each stream is a session. The answer to a row has the quantiles of the next one, and a reading is unexpected when it is far from them. The
threshold is the score that one of 100 steps of ordinary streams exceeds. Then streams with faults of a sensor follow.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.error
from pathlib import Path

import numpy as np
from signals import CHANNELS, streams
from train_forecast import FIRST, TEST
from training import live, records
from training.anomalies import Streams, count, plant
from training.intervals import Forecasts, coverage, ordered, pinball, surprise, threshold, width
from training.service import Service

AT_ONCE = 16
"""Sessions that run at once."""


async def forecasts(url: str, model: str, readings: Streams) -> Forecasts:
    """Return the forecasts after each row except the last. readings: (streams, steps, channels)."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def values(stream: Streams) -> list[list[float]]:
        async with limit:
            return [output["value"] for output in await live.outputs(url, model, [row[None] for row in stream[:-1]])]

    answers = await asyncio.gather(*(values(stream) for stream in readings))
    return ordered(np.array(answers), readings.shape[-1])


async def times(url: str, model: str, stream: Streams) -> list[float]:
    """Return the seconds from sending a row to its reply, for the rows of one session."""
    seconds = []
    async with live.session(url, model) as socket:
        for row in stream:
            start = time.monotonic()
            await live.answer(socket, row[None])
            seconds.append(time.monotonic() - start)
    return seconds


def evaluate(url: str, model: str, flags: argparse.Namespace) -> records.Record:
    ordinary = streams((TEST, flags.seed, 0), flags.streams, flags.steps + 1)
    forecast, following = asyncio.run(forecasts(url, model, ordinary))[:, FIRST:], ordinary[:, 1 + FIRST :].astype(np.float64)
    limit = threshold(surprise(forecast, following), flags.false_alarms)
    faulty, faults = plant(
        np.random.default_rng((TEST, flags.seed)), streams((TEST, flags.seed, 1), flags.streams, flags.steps + 1)
    )
    scores = surprise(asyncio.run(forecasts(url, model, faulty)), faulty[:, 1:].astype(np.float64))
    alarms = np.pad(scores > limit, ((0, 0), (1, 0)))
    alarms[:, : FIRST + 1] = False
    result = count(alarms, faults)
    seconds = asyncio.run(times(url, model, ordinary[0]))
    return {
        "kind": "served",
        "model": model,
        "readings": following.size,
        "loss": round(pinball(forecast, following), 4),
        "coverage_percent": round(100 * coverage(forecast, following), 1),
        "width": round(width(forecast), 3),
        "threshold": round(limit, 2),
        "faults": len(faults),
        **{f"found_{kind}_percent": round(100 * share, 1) for kind, share in result.found.items()},
        "false_alarms_of_1000": round(result.false_alarms, 2),
        "delay_steps": result.delay,
        "p50_ms": round(1000 * float(np.median(seconds)), 2),
        "p99_ms": round(1000 * float(np.quantile(seconds, 0.99)), 2),
    }


def arguments(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name of a model by train_forecast.py")
    parser.add_argument("--streams", type=int, default=32, help="of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="forecasts of each stream (default: %(default)s)")
    parser.add_argument("--false-alarms", type=float, default=0.01, help="share of ordinary steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the streams (default: %(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="results file to which the figures are appended (default: none)")
    return parser.parse_args(line)


def main(line: list[str] | None = None) -> int:
    """Return 0 if the figures were printed, 1 if the service does not answer or lacks the model."""
    flags = arguments(line)
    try:
        models = {model["name"]: model for model in Service(flags.url).models()}
    except urllib.error.URLError as error:
        print(f"no answer from {flags.url} ({error.reason}): start the service with make serve", file=sys.stderr)
        return 1
    if flags.model not in models or models[flags.model]["input"].get("features") != len(CHANNELS):
        print(f"{flags.url} has no model {flags.model!r} over {len(CHANNELS)} channels", file=sys.stderr)
        return 1
    record = evaluate(flags.url, flags.model, flags)
    records.report(flags.results, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
