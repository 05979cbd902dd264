"""`seqserve bench`: load on a running server, level after level, with what each level gave and where the time went."""

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
from loadtest.discovery import NoServer
from loadtest.load import Figures
from loadtest.report import Level

REQUESTS = 1000
"""So many different requests are made before the clock starts, and sent in turn."""
WARM_UP_SECONDS = 1.0
Load = Callable[[load.Watch], Coroutine[Any, Any, Figures]]
"""One level, to be begun with somebody who hears of it."""
STAGES = ("parse", "queue", "stage_in", "compute", "stage_out", "encode", "total")
ROWS, CHANNEL = "rows", "channel"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask of whom: `callers` are levels of a closed loop, `rates` (requests a second) levels of an open one."""

    url: str
    model: str | None
    callers: Sequence[int]
    rates: Sequence[float]
    arrivals: str
    seconds: float
    inputs: int
    seed: int


def run(plan: Plan, models: Path, out: Path | None, trace: Path | None = None) -> int:
    """The exit status: 0 when every request was answered, 1 when some were not. `trace` gets turns of the last level."""
    model = described(plan.url, plan.model)
    if trace is not None:
        tracing.prepare(plan.url)
    source = discovery.inputs(models, model, plan.seed)
    target = Target.of(plan.url, "/infer")
    requests = prepared(target, source, plan.inputs)
    print(f"{model['name']} version {model['version']} on {plan.url}, {plan.inputs} of {source} a request, seed {plan.seed}")
    loop = f"open loop, {plan.arrivals} arrivals" if plan.rates else "closed loop"
    print(f"{loop}, {plan.seconds:g} s a level after {WARM_UP_SECONDS:g} s of warming up\n", flush=True)
    uvloop.run(load.closed(target, requests, 1, WARM_UP_SECONDS, lambda _: None))
    *loads, last = _loads(plan, target, requests)
    levels = [_level(plan, model, *one) for one in loads]
    with nullcontext() if trace is None else tracing.recorded(plan.url, trace, plan.seconds):
        levels.append(_level(plan, model, *last))
    print("\n".join(report.levels(levels, "rate" if plan.rates else "callers")))
    if out is not None:
        out.write_text("".join(f"{json.dumps(report.record(one, model))}\n" for one in levels))
    return 1 if any(level.figures.failed for level in levels) else 0


def described(url: str, name: str | None) -> dict[str, Any]:
    """The named model, or the first, in its newest version, as the server describes it; raises NoServer."""
    served = discovery.served(url)
    for model in served.values():
        if name is None or name in (model["name"], *model["aliases"]):
            return model
    raise NoServer(f"{url} serves no model {name}: it serves {', '.join(served)}")


def prepared(target: Target, source: traffic.Traffic, inputs: int) -> Iterator[bytes]:
    """Requests, over and over."""
    return itertools.cycle([target.request(json.dumps(source.body(inputs)).encode()) for _ in range(REQUESTS)])


def _loads(plan: Plan, target: Target, requests: Iterator[bytes]) -> Iterator[tuple[str, Load]]:
    """Every level by its name: rates, if there are any, else callers."""
    for rate in plan.rates:
        gaps = traffic.ARRIVALS[plan.arrivals](rate, plan.seed)
        yield f"{rate:g}/s", partial(load.opened, target, requests, gaps, plan.seconds)
    for callers in [] if plan.rates else plan.callers:
        yield str(callers), partial(load.closed, target, requests, callers, plan.seconds)


def _level(plan: Plan, model: dict[str, Any], name: str, begin: Load) -> Level:
    def watch(figures: Figures) -> None:
        print(report.progress(name, figures, plan.seconds), file=sys.stderr, flush=True)

    before = Counts.read(plan.url, model)
    figures = uvloop.run(begin(watch))
    after = Counts.read(plan.url, model)
    return Level(name, figures, after.stages(before), after.rows(before))


@dataclass(frozen=True, slots=True)
class Counts:
    """A model's sums and counts, as /metrics has them, by stage and of the rows in turns; the way to an engine is that of all models."""

    sums: dict[str, float]
    counts: dict[str, float]

    @classmethod
    def read(cls, url: str, model: dict[str, Any]) -> Counts:
        found = cls({}, {})
        named = {"seqserve_stage_seconds": "", "seqserve_batch_sequences": ROWS, "seqserve_channel_seconds": CHANNEL}
        labels = {"model": model["name"], "version": model["version"]}
        for family in text_string_to_metric_families(_get(f"{url}/metrics").decode()):
            for sample in family.samples:
                if family.name in named and (labels.items() <= sample.labels.items() or named[family.name] == CHANNEL):
                    key = sample.labels.get("stage", named[family.name])
                    if sample.name.endswith("_sum"):
                        found.sums[key] = sample.value
                    elif sample.name.endswith("_count"):
                        found.counts[key] = sample.value
        return found

    def stages(self, before: Counts) -> dict[str, float]:
        """Mean milliseconds."""
        return {stage: 1000 * self._mean(before, stage) for stage in STAGES}

    def rows(self, before: Counts) -> float:
        return self._mean(before, ROWS)

    def channel(self, before: Counts) -> float:
        """Milliseconds from a front to the engine."""
        return 1000 * self._mean(before, CHANNEL)

    def _mean(self, before: Counts, key: str) -> float:
        count = self.counts.get(key, 0.0) - before.counts.get(key, 0.0)
        return (self.sums[key] - before.sums.get(key, 0.0)) / count if count else 0.0


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body
