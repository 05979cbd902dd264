"""`seqserve bench --realtime N`: live streams that send a chunk in every period, and how many of them a server sustains.

Each stream is a WebSocket with its own session, and sends at its own moments, whatever is answered. Latency counts from these moments.
"""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kernels.bench.tables import three_digits
from loadtest import discovery, report, servers
from loadtest.bench import Plan
from loadtest.discovery import NO_ACCESS, CannotMeasure, fetch
from loadtest.generator import websocket
from loadtest.generator.job import QUANTILES
from loadtest.generator.loops import UNANSWERED
from loadtest.generator.readers import stream
from loadtest.requests import CPU, ENGINE, FRONTENDS, Requests
from loadtest.scenarios.rounds import RATE, headings
from loadtest.traffic import Traffic
from service.client_access import ClientAccess

WARM_UP_SECONDS = 2.0
TRACKS = 8
"""Different sequences of chunks; each is sent by every eighth stream of a generator."""
SPARE_SECONDS = 1.0
"""Chunks of a track beyond the measured time, for a generator that ends late."""
BEHIND_MS, BEHIND_PERIODS, BEHIND_SHARE = 5.0, 0.1, 0.001
"""A generator is late that sends more than this share of its chunks later than these milliseconds and periods after their moments."""
CHUNKS_OF_A_GENERATOR = 10_000
"""Chunks a second for which another generator process is started."""
CLOSE = 1.05
"""The search ends when a number of streams is sustained, and no number that is this many times larger."""
COLUMNS = ("streams", RATE, *QUANTILES, "late", "lost", CPU, FRONTENDS, ENGINE, "cpu_percent_a_stream", "sent_late_ms")


def requests(
    url: str, model: dict[str, Any], steps: int, period: float, seconds: float, access: ClientAccess = NO_ACCESS, seed: int = 0
) -> Requests:
    """Return the messages of TRACKS streams for so many seconds, and the answers that sessions without other load get to them."""
    chunks = math.ceil((seconds + SPARE_SECONDS) / period) + 2
    traffic, dtype = Traffic(model, seed=seed), "<f4" if model["input"]["kind"] == "features" else "<i4"

    def answers(track: Sequence[Any]) -> list[list[float]]:
        body = {"model": model["name"], "version": model["version"], "session": f"bench-{uuid.uuid4().hex}"}
        bodies = (body | {"inputs": [chunk], "end": number == chunks} for number, chunk in enumerate(track, 1))
        return [stream(fetch(f"{url}/infer", access, json.dumps(each).encode())) for each in bodies]

    tracks = [[traffic.input(steps) for _ in range(chunks)] for _ in range(TRACKS)]
    with ThreadPoolExecutor(TRACKS) as pool:
        expected = list(chain.from_iterable(pool.map(answers, tracks)))
    values = (np.array(chunk, dtype).tobytes() for chunk in chain.from_iterable(tracks))
    frames = [websocket.frame(websocket.BINARY_FRAME, each) for each in values]
    path = f"/stream?model={model['name']}&version={model['version']}"
    return Requests("websocket", path, frames, "stream", expected, chunks=chunks)


def run(plan: Plan, out: Path | None) -> int:
    """Measure the streams, or find the most that the server sustains. Returns 1 when it does not sustain any number that was measured."""
    model = discovery.find(plan.url, plan.model, plan.access, streams=True)
    seconds = WARM_UP_SECONDS + plan.seconds
    sent = requests(plan.url, model, plan.steps, plan.period_ms / 1000, seconds, plan.access, plan.seed)
    known = {"model": model["name"], "version": model["version"], "device": model["device"], "date": str(date.today())}
    known |= {"steps": plan.steps, "period_ms": plan.period_ms, "seconds": plan.seconds}
    print(", ".join(f"{name} {value}" for name, value in known.items()) + f", on {plan.url}\n", flush=True)
    count, records = plan.realtime or 1, list[dict[str, Any]]()

    def sustains(count: int) -> bool:
        records.append(known | measure(plan, sent, count))
        p99: float = records[-1].get("p99_ms", math.inf)
        print(f"  {count} streams: p99 {p99:.1f} ms, {records[-1]['lost']} lost", file=sys.stderr, flush=True)
        return p99 < plan.period_ms and not records[-1]["lost"]

    try:
        most = largest(sustains, count) if plan.find else count * sustains(count)
    finally:  # a late generator ends a search, and its steps are shown
        shown = [[three_digits(record[name]) if name in record else report.NOTHING for name in COLUMNS] for record in records]
        print(report.table([headings(COLUMNS), *shown]) if shown else "")
        for record in records:
            for reason, count in record["failures"].items():
                print(f"{record['streams']} streams: {count} chunks failed with {reason}")
        if out is not None:
            out.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    if plan.find:
        print(f"\n{most} streams are the most with a p99 below {plan.period_ms:g} ms and no lost chunk")
    return 0 if most else 1


def measure(plan: Plan, requests: Requests, count: int) -> dict[str, Any]:
    """Return the record of one number of streams. Raises CannotMeasure for a late generator."""
    period = plan.period_ms / 1000
    generators = plan.generators or math.ceil(min((os.cpu_count() or 1) / 2, count / period / CHUNKS_OF_A_GENERATOR))
    load: dict[str, Any] = {"callers": count, "period": period, "seconds": plan.seconds, "warm_up": WARM_UP_SECONDS}
    load |= {"seed": plan.seed, "ca": str(plan.access.ca or "")}
    load["headers"] = [f"{name}: {value}" for name, value in plan.access.headers.items()]
    result, costs = requests.measure(servers.found(plan.url), generators, **load)
    delays, latencies = np.frombuffer(result.delays), np.frombuffer(result.latencies)
    limit_ms = max(BEHIND_MS, BEHIND_PERIODS * plan.period_ms)
    behind, most_ms = int((1000 * delays > limit_ms).sum()), 1000 * float(delays.max(initial=0))
    busy = result.cpu_seconds / generators / result.seconds
    if behind > BEHIND_SHARE * len(delays):
        raise CannotMeasure(
            f"the load generator was late with {count} streams: it sent {behind:,} of {len(delays):,} chunks more than {limit_ms:g} ms "
            f"after their moments, at most {most_ms:.0f} ms, in {generators} processes that were busy for {busy:.0%} of the time: give it "
            "more processes with --generators, separate processors, or fewer streams"
        )
    if FRONTENDS in costs:
        costs["cpu_percent_a_stream"] = costs[CPU] * result.rate / count / 1e4
    else:
        del costs[CPU]  # it is no process of this machine
    late, lost = int((latencies > period).sum()), result.due - len(latencies)
    figures = {"streams": count, RATE: result.rate} | result.milliseconds() | costs
    figures |= {"due": result.due, "late": late, "lost": lost, "sent_late_ms": most_ms, "generators": generators}
    record: dict[str, Any] = {name: round(value, 4) for name, value in figures.items() if not math.isnan(value)}
    return record | {"failures": result.failures or ({UNANSWERED: lost} if lost else {})}


def largest(sustains: Callable[[int], bool], count: int) -> int:
    """Return about the largest number for which `sustains` is true, or 0: doubling, then bisection."""
    most, failing = 0, math.inf
    while failing - most > max(1, (CLOSE - 1) * most):
        if sustains(count):
            most = count
        else:
            failing = count
        count = 2 * most if failing == math.inf else int(most + failing) // 2
    return most
