"""`seqserve bench`: load a running server at several levels and report rates, latencies and time by stage."""

from __future__ import annotations

import itertools
import json
import sys
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest import discovery, load, report, tracing, traffic
from loadtest.callers import Target
from loadtest.load import Figures
from loadtest.report import BenchLevel

REQUESTS = 1000
"""Distinct requests that are prepared before the clock starts, and sent in a cycle."""
WARM_UP_SECONDS = 1.0
StartLevel = Callable[[load.Watch], Coroutine[Any, Any, Figures]]
STAGES = ("parse", "queue", "stage_in", "compute", "stage_out", "encode", "total")
ROWS, CHANNEL = "rows", "channel"
METRICS = {"seqserve_stage_seconds": "", "seqserve_batch_sequences": ROWS, "seqserve_channel_seconds": CHANNEL}
"""Metrics that are read, and their key in StageCounts; the stages have a label."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: `callers` are the levels of a closed loop, `rates` (requests a second) the levels of an open loop."""

    url: str
    model: str | None
    callers: Sequence[int]
    rates: Sequence[float]
    arrivals: str
    seconds: float
    inputs: int
    seed: int


def run(plan: Plan, models: Path, out: Path | None, trace: Path | None = None) -> int:
    """Measure every level. Returns 0 when every request was answered, 1 otherwise. `trace` gets batches of the last level."""
    model = discovery.find(plan.url, plan.model)
    if trace is not None:
        tracing.prepare(plan.url)
    source = discovery.inputs(models, model, plan.seed)
    target = Target.of(plan.url, "/infer")
    requests = request_cycle(target, source, plan.inputs)
    print(
        f"{model['name']} version {model['version']} on {plan.url}, inputs a request: {plan.inputs} ({source}), seed {plan.seed}"
    )
    loop = f"open loop, {plan.arrivals} arrivals" if plan.rates else "closed loop"
    print(f"{loop}, {plan.seconds:g} s a level after a warm-up of {WARM_UP_SECONDS:g} s\n", flush=True)
    uvloop.run(load.closed(target, requests, 1, WARM_UP_SECONDS, lambda _: None))
    *starts, last = _starts(plan, target, requests)
    levels = [_level(plan, model, *start) for start in starts]
    with nullcontext() if trace is None else tracing.recorded(plan.url, trace, plan.seconds):
        levels.append(_level(plan, model, *last))
    print("\n".join(report.levels(levels, "rate" if plan.rates else "callers")))
    if out is not None:
        out.write_text("".join(f"{json.dumps(report.record(level, model))}\n" for level in levels))
    return 1 if any(level.figures.failed for level in levels) else 0


def request_cycle(target: Target, source: traffic.Traffic, inputs: int) -> Iterator[bytes]:
    """Return prepared requests of `inputs` sequences each, repeated forever."""
    return itertools.cycle([target.request(json.dumps(source.body(inputs)).encode()) for _ in range(REQUESTS)])


def _starts(plan: Plan, target: Target, requests: Iterator[bytes]) -> Iterator[tuple[str, StartLevel]]:
    """Yield the name and the start of each level: the rates, or the numbers of callers when there are no rates."""
    for rate in plan.rates:
        gaps = traffic.ARRIVALS[plan.arrivals](rate, plan.seed)
        yield f"{rate:g}/s", partial(load.opened, target, requests, gaps, plan.seconds)
    for callers in [] if plan.rates else plan.callers:
        yield str(callers), partial(load.closed, target, requests, callers, plan.seconds)


def _level(plan: Plan, model: dict[str, Any], name: str, start: StartLevel) -> BenchLevel:
    def watch(figures: Figures) -> None:
        print(report.progress(name, figures, plan.seconds), file=sys.stderr, flush=True)

    before = StageCounts.read(plan.url, model)
    figures = uvloop.run(start(watch))
    after = StageCounts.read(plan.url, model)
    return BenchLevel(name, figures, after.stages(before), after.rows(before))


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Sums and counts from /metrics: a model's time by stage and its sequences in batches, and the channel time of all models."""

    sums: dict[str, float]
    counts: dict[str, float]

    @classmethod
    def read(cls, url: str, model: dict[str, Any]) -> StageCounts:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            text = response.read().decode()
        read = cls({}, {})
        labels = {"model": model["name"], "version": model["version"]}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name in METRICS and (labels.items() <= sample.labels.items() or METRICS[family.name] == CHANNEL):
                    key = sample.labels.get("stage", METRICS[family.name])
                    if sample.name.endswith("_sum"):
                        read.sums[key] = sample.value
                    elif sample.name.endswith("_count"):
                        read.counts[key] = sample.value
        return read

    def stages(self, before: StageCounts) -> dict[str, float]:
        """Return mean milliseconds by stage since `before`."""
        return {stage: 1000 * self._mean(before, stage) for stage in STAGES}

    def rows(self, before: StageCounts) -> float:
        """Return the mean number of sequences in a batch since `before`."""
        return self._mean(before, ROWS)

    def channel(self, before: StageCounts) -> float:
        """Return the mean milliseconds from a frontend to the engine since `before`."""
        return 1000 * self._mean(before, CHANNEL)

    def _mean(self, before: StageCounts, key: str) -> float:
        count = self.counts.get(key, 0.0) - before.counts.get(key, 0.0)
        return (self.sums[key] - before.sums.get(key, 0.0)) / count if count else 0.0
