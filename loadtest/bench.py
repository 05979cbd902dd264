"""`seqserve bench`: load a running server at several levels and report rates, latencies and time by stage.

Unless the caller names the levels, a closed loop finds the largest rate, and the levels are an open loop at shares of it. A level that
the load generator limits is measured again with more generator processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from loadtest import discovery, report, tracing, traffic
from loadtest.generator.job import Job
from loadtest.generator.process import divided, run_in_processes
from loadtest.report import Level
from loadtest.target import JSON, Target
from service.client_access import ClientAccess

REQUESTS = 1000
"""Distinct requests that are prepared before the clock starts, and sent in a cycle."""
WARM_UP_SECONDS = 1.0
"""Load before each level. Its requests count for the stages, but not for the rate and the latency."""
GRACE_SECONDS = 10.0
"""Time for the requests that are open at the end. A server that has recorded a trace answers no request while it writes the trace."""
START_SECONDS = 1.0
"""Time for the start of a generator process."""
SEARCH_CALLERS, SEARCH_SECONDS = 128, 2.0
"""Callers of the closed loop that finds the largest rate."""
SEARCH_SEQUENCES = 512
"""Requests with several inputs have fewer callers: the queue of an engine holds 1,024 sequences unless a setting says more."""
SHARES = (0.25, 0.5, 0.7, 0.9)
"""The levels, as shares of the largest rate."""
CONNECTIONS = 256
"""Connections of an open loop. A request that is due while all of them are busy waits, and its latency grows meanwhile."""
STAGES = ("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode")
"""The stages in order. They add up to the total."""
TOTAL, ROWS = "total", "rows"
METRICS = {"seqserve_stage_seconds": "", "seqserve_batch_sequences": ROWS}
"""Metrics that are read, and their key in stage_counts; the stages have a label."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: `callers` are the levels of a closed loop, `rates` (requests a second) the levels of an open loop.

    Without both, the levels are SHARES of the largest rate. generators: the number of generator processes, None for as many as necessary.
    realtime, steps, period_ms, find: live streams instead of levels; see realtime.py.
    """

    url: str
    model: str | None
    callers: Sequence[int]
    rates: Sequence[float]
    arrivals: str
    seconds: float
    inputs: int
    seed: int
    generators: int | None
    realtime: int | None
    steps: int
    period_ms: float
    find: bool
    access: ClientAccess = discovery.NO_ACCESS

    @property
    def levels(self) -> list[Level]:
        """Return the levels that the caller has named."""
        return [*map(_closed, self.callers), *[Level(f"{rate:g}/s", CONNECTIONS, rate) for rate in self.rates]]

    @property
    def search(self) -> Level:
        """Return the closed loop that finds the largest rate."""
        return _closed(max(1, min(SEARCH_CALLERS, SEARCH_SEQUENCES // self.inputs)))


def run(plan: Plan, models: Path, out: Path | None, trace: Path | None = None) -> int:
    """Measure every level. Returns 0 when every request was answered, 1 otherwise. `trace` gets batches of the last level."""
    model = discovery.find(plan.url, plan.model, plan.access)
    if trace is not None:
        tracing.prepare(plan.url, plan.access)
    source = discovery.inputs(models, model, plan.seed)
    print(
        f"{model['name']} version {model['version']} on {plan.url}, inputs a request: {plan.inputs} ({source}), seed {plan.seed}"
    )
    print(f"{_loop(plan)}, {plan.seconds:g} s a level after a warm-up of {WARM_UP_SECONDS:g} s\n", flush=True)
    bench = _Bench(plan, model, source)
    records: list[dict[str, Any]] = []
    levels = plan.levels
    if not levels:
        records.append(bench.measure(plan.search, min(plan.seconds, SEARCH_SECONDS)))
        levels = shares_of(records[0]["answers_per_second"])
    for level in levels:
        is_traced = trace is not None and level is levels[-1]
        seconds = START_SECONDS + WARM_UP_SECONDS + plan.seconds
        with tracing.recorded(plan.url, plan.access, trace, seconds) if is_traced and trace else nullcontext():
            records.append(bench.measure(level, plan.seconds))
    print("\n".join(report.levels(records)))
    if out is not None:
        out.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return 1 if any(record["failures"] for record in records) else 0


def shares_of(largest: float) -> list[Level]:
    """Return the levels of an open loop below the largest rate, none if that is 0."""
    return [Level(f"{share:.0%}, {share * largest:.0f}/s", CONNECTIONS, share * largest) for share in SHARES if largest]


def _closed(callers: int) -> Level:
    return Level("1 caller" if callers == 1 else f"{callers} callers", callers)


def _loop(plan: Plan) -> str:
    """Describe the levels."""
    if plan.callers:
        return "closed loop"
    opened = f"open loop, {plan.arrivals} arrivals"
    return opened if plan.rates else f"the largest rate in a closed loop, then shares of it in an {opened}"


class _Bench:
    """Measures levels of load on one model of a server."""

    def __init__(self, plan: Plan, model: dict[str, Any], source: traffic.Traffic) -> None:
        target = Target.of(plan.url, "/infer")
        headers = [JSON, *(f"{name}: {value}" for name, value in plan.access.headers.items())]
        requests = [target.request(json.dumps(source.body(plan.inputs)).encode(), *headers) for _ in range(REQUESTS)]
        self._plan = plan
        self._model = model
        self._generators = plan.generators or 1
        """Generators of the next level: as many as the previous levels needed."""
        self._job = Job.http(target, requests, seed=plan.seed, arrivals=plan.arrivals, ca=str(plan.access.ca or ""))
        self._job.warm_up, self._job.grace = WARM_UP_SECONDS, GRACE_SECONDS

    def measure(self, level: Level, seconds: float) -> dict[str, Any]:
        """Measure a level, again with more generators as long as they are the limit. Returns its record."""
        most = min(level.callers, self._plan.generators or os.cpu_count() or 1)
        record = self._measure_once(level, seconds)
        while record["limited_by_generators"] and self._generators < most:
            self._generators = min(2 * self._generators, most)
            again = f"measured again with {self._generators} generator processes"
            print(f"{level.name}: the load generator was the limit, {again}", flush=True)
            record = self._measure_once(level, seconds)
        return record

    def _measure_once(self, level: Level, seconds: float) -> dict[str, Any]:
        load = {"seconds": seconds, "callers": level.callers, "rate": level.rate}
        jobs = divided(structs.replace(self._job, **load), self._generators)
        before = stage_counts(self._plan.url, self._model, self._plan.access)
        result = run_in_processes(jobs)
        counts = stage_counts(self._plan.url, self._model, self._plan.access) - before
        means = {key: counts[key, "sum"] / max(1, counts[key, "count"]) for key in (*STAGES, TOTAL, ROWS)}
        stages = {stage: 1000 * means[stage] for stage in STAGES}
        record = report.record(level, len(jobs), result, self._model, stages, 1000 * means[TOTAL], means[ROWS])
        print(report.progress(record), file=sys.stderr, flush=True)
        return record


def stage_counts(url: str, model: dict[str, Any], access: ClientAccess) -> Counter[tuple[str, str]]:
    """Return the "sum" and the "count" of each stage, and of ROWS, of one model since the server started."""
    counts = Counter[tuple[str, str]]()
    labels = {"model": model["name"], "version": model["version"]}
    for family in text_string_to_metric_families(discovery.fetch(f"{url}/metrics", access).decode()):
        for sample in family.samples:
            if family.name in METRICS and labels.items() <= sample.labels.items():
                key = sample.labels.get("stage", METRICS[family.name])
                counts[key, sample.name.rpartition("_")[2]] = sample.value  # type: ignore[assignment] # of seconds too
    return counts
