"""`python -m loadtest.bench_engine`: one engine without its doors: where the time of a single request goes, and how many it answers.

A turn starts when its chunks are laid end to end and ends when each has its answer on the host. Throughput has the engine take turns of so
many rows one after the other, as they come when there is always somebody waiting. Then requests arrive that wait for nothing, at rates from
a tenth of what the engine can do to ten times as much (`open_engine`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.bench import questions
from kernels.bench.report import Setting, slug
from loadtest import made_up, report, servers
from loadtest.open_engine import HEAVY, LONG, MIXED, REAL, Driver, Level, measured
from service.engine.batch import Batch, Chunk
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import InFlightBatch
from service.ipc.messages import FEATURES, IDS, ModelKey, Returns
from service.local import build_engine
from service.metrics import Metrics
from service.modeling.spec import EmbeddingLayer, LSTMLayer, ModelSpec, SequenceInput
from service.settings import Settings

QUESTIONS = ("question-type-cnn", "question-type-lstm", "question-type-sru")
SENSOR, WIDE, DEEP = "lstm-256-floats", "lstm-512-ids", "lstm-4x1024-ids"
MODELS = (SENSOR, WIDE, *QUESTIONS)
STEPS = 64
"""Of a made-up sequence."""
FEW, MANY = (64, 4096), (512, 32768)
"""Rows and tokens that a turn may have at most: the settings' defaults, and eight times as many."""
VARIANTS = 8
"""Different turns, run in turn."""
DEVICE_BOUND = 0.9
"""Share of the time in which the device works, from which on it is what limits."""
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2)
OVERLOADS = (1.0, 2.0, 10.0)
"""Of its capacity, at which an engine is loaded."""
BESIDE = 0.7
"""Where batching by whole sequences is compared."""
DEADLINES = {"cuda": 0.1, "cpu": 1.0}
"""Seconds that a request may take where the engine is overloaded."""
STAGES = ("lay", "ask", "device", "answer", "total")


@dataclass(frozen=True, slots=True)
class Single:
    """One row, turn after turn: microseconds in each stage, median and 10th and 90th percentile; kernels: what the device needs alone."""

    model: str
    steps: int
    kernels_us: float
    stages_us: dict[str, tuple[float, float, float]]
    batches: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Turns of so many rows, one after the other. device_share: of the time, in which the kernels of all turns run, as timed at warm-up."""

    model: str
    rows: int
    tokens: float
    sequences_per_second: float
    turn_us: float
    device_share: float

    @property
    def limit(self) -> str:
        return "device" if self.device_share >= DEVICE_BOUND else "host"


def main(arguments: Sequence[str] | None = None) -> int:
    said = _parser().parse_args(arguments)
    engine = _engine(said.device, said.models, *FEW)
    device = torch.device(engine.loaded()[0].device)
    setting = Setting.of(device)
    singles = [single(engine, model, said.batches) for model in said.models]
    print(f"one engine on {setting}\n\none row, us: median (p10-p90)\n")
    print("\n".join(_single_table(singles)))
    larger = _engine(said.device, said.models, *MANY) if said.rows > FEW[0] else engine
    levels = [
        throughput(engine if rows <= FEW[0] else larger, model, rows, said.seconds)
        for model in said.models
        for rows in itertools.takewhile(lambda rows: rows <= said.rows, (1 << power for power in itertools.count()))
    ]
    print("\nturns one after the other\n")
    print("\n".join(_throughput_table(levels)) + "\n")
    opened = list(_opened(engine, said.models, said.open_seconds)) if said.open_seconds else []
    if said.open_seconds:
        opened += _overloaded(said.device, said.open_seconds)
        print("requests that wait for nothing\n")
        print("\n".join(_opened_table(opened)) + "\n")
    found: list[Single | Throughput | Level] = [*singles, *levels, *opened]
    report.write(said.out / f"engine-{slug(setting.device)}.jsonl", [asdict(one) | asdict(setting) for one in found])
    return 0


def _engine(device: str, models: Sequence[str], rows: int, tokens: int) -> DeviceEngine:
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            _place(model, Path(scratch))
        settings = Settings(models=Path(scratch), device=device, max_batch_sequences=rows, max_batch_tokens=tokens)
        return build_engine(settings, Metrics())


def _opened(engine: DeviceEngine, models: Sequence[str], seconds: float) -> Iterator[Level]:
    """Real and mixed lengths at rising rates, beside whole sequences in turns that none joins, at the same rates."""
    for model in set(models) & {WIDE}:
        for mixture in (REAL, MIXED):
            capacity = Driver(engine, model, mixture, "continuous").capacity(seconds)
            yield from measured(engine, model, mixture, "continuous", capacity, SHARES, seconds)
            yield from measured(engine, model, mixture, "static", capacity, (BESIDE,), seconds)
            own = Driver(engine, model, mixture, "static").capacity(seconds)
            shares = [round(share * own / capacity, 4) for share in (BESIDE, 0.9)]
            for batching in ("static", "continuous"):
                yield from measured(engine, model, mixture, batching, capacity, shares, seconds)


def _overloaded(device: str, seconds: float) -> Iterator[Level]:
    """Far more than an engine can do, with a deadline, of a model that keeps it busy and not its host."""
    engine = _engine(device, [DEEP if device.startswith("cuda") else WIDE], *FEW)
    [loaded] = engine.loaded()
    deadline = DEADLINES[engine.device.type]
    capacity = Driver(engine, loaded.name, HEAVY, "continuous").capacity(max(seconds, 10 * deadline))
    seconds = max(seconds, 10 * deadline)
    yield from measured(engine, loaded.name, HEAVY, "continuous", capacity, OVERLOADS, seconds, deadline)


def single(engine: DeviceEngine, model: str, count: int) -> Single:
    """One row a turn, each answered before the next is laid."""
    batches, times = _turns(engine, model, rows=1), list[dict[str, float]]()

    kernels: list[float] = []

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        kernels.append(1e6 * in_flight.predicted)
        moments = (in_flight.began, in_flight.staged, in_flight.launched, ended, time.monotonic())
        spans = [1e6 * (after - before) for before, after in itertools.pairwise(moments)]
        times.append(dict(zip(STAGES, (*spans, sum(spans)), strict=True)))

    engine.watch(watch)
    steps = [_answered(engine, next(batches)).tokens for _ in range(count)]
    engine.watch(None)
    quantiles = {stage: np.percentile([one[stage] for one in times[count // 10 :]], (50, 10, 90)) for stage in STAGES}
    stages = {stage: tuple(round(float(value), 2) for value in found) for stage, found in quantiles.items()}
    return Single(model, round(statistics.median(steps)), round(statistics.median(kernels), 2), stages, count)  # type: ignore[arg-type]


def throughput(engine: DeviceEngine, model: str, rows: int, seconds: float) -> Throughput:
    """As many turns as the engine takes in that time."""
    batches = _turns(engine, model, rows)
    tokens = answered = launched = 0
    on_device = 0.0

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        nonlocal on_device
        on_device += in_flight.launched - in_flight.staged if in_flight.place is None else in_flight.predicted

    for _ in range(VARIANTS):
        _answered(engine, next(batches))
    engine.watch(watch)
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds or answered < launched * rows:
        if engine.accepts_batch and now < began + seconds:
            batch = next(batches)
            engine.launch(batch)
            launched, tokens = launched + 1, tokens + batch.tokens
        answered += len(engine.finished())
    took = time.monotonic() - began
    engine.watch(None)
    return Throughput(
        model, rows, tokens / launched, round(answered / took, 1), round(1e6 * took / launched, 2), round(on_device / took, 4)
    )


def _answered(engine: DeviceEngine, batch: Batch) -> Batch:
    engine.launch(batch)
    while not engine.finished():
        pass
    return batch


def _turns(engine: DeviceEngine, model: str, rows: int) -> Iterator[Batch]:
    """Made-up turns, over and over: questions by their real lengths, others of STEPS steps."""
    spec = engine.spec(ModelKey(model, "1"))
    made = []
    for seed in range(VARIANTS):
        chance = np.random.default_rng(seed)
        lengths = questions.lengths(rows, seed) if model in QUESTIONS else [STEPS] * rows
        if model in QUESTIONS and rows == 1:
            lengths = questions.lengths(VARIANTS)[seed : seed + 1]
        made.append(Batch(ModelKey(model, "1"), [_chunk(spec, steps, chance) for steps in lengths]))
    return itertools.cycle(made)


def _chunk(spec: ModelSpec, steps: int, chance: np.random.Generator) -> Chunk:
    if spec.input.features is not None:
        data = chance.normal(size=(steps, spec.input.features)).astype(FEATURES)
    else:
        data = chance.integers(spec.input.vocabulary or 1, size=steps).astype(IDS)
    return Chunk(data.tobytes(), steps, Returns(), None)


def _place(model: str, root: Path) -> None:
    """An embedded model, or an LSTM of made-up weights."""
    if model == SENSOR:
        floats = SequenceInput(kind="features", features=256, max_steps=1024)
        made_up.write(root, SENSOR, floats, LSTMLayer(kind="lstm", hidden=256))
    elif model == WIDE:
        ids = SequenceInput(kind="ids", vocabulary=20_000, max_steps=LONG)
        made_up.write(root, WIDE, ids, EmbeddingLayer(kind="embedding", width=512), LSTMLayer(kind="lstm", hidden=512))
    elif model == DEEP:
        ids = SequenceInput(kind="ids", vocabulary=1_000, max_steps=512)
        made_up.write(
            root, DEEP, ids, EmbeddingLayer(kind="embedding", width=256), LSTMLayer(kind="lstm", hidden=1024, depth=4)
        )
    else:
        (root / model).symlink_to(servers.MODELS / model)


def _single_table(found: Sequence[Single]) -> Iterator[str]:
    yield from report.table(
        [["model", "steps", "kernels", *STAGES]]
        + [
            [
                one.model,
                str(one.steps),
                f"{one.kernels_us:.1f}",
                *("{:.1f} ({:.1f}-{:.1f})".format(*one.stages_us[s]) for s in STAGES),
            ]
            for one in found
        ]
    )


def _throughput_table(found: Sequence[Throughput]) -> Iterator[str]:
    lines = [["model", "rows", "tokens", "sequences/s", "us a turn", "device", "limit"]]
    for one in found:
        rate, share = f"{one.sequences_per_second:.0f}", f"{one.device_share:.2f}"
        lines.append([one.model, str(one.rows), f"{one.tokens:.0f}", rate, f"{one.turn_us:.1f}", share, one.limit])
    yield from report.table(lines)


def _opened_table(found: Sequence[Level]) -> Iterator[str]:
    lines = [
        [
            "model",
            "lengths",
            "batching",
            "share",
            "offered/s",
            "in time/s",
            "refused",
            "dropped",
            "p50 ms",
            "p99 ms",
            "short p99 ms",
        ]
    ]
    for one in found:
        figures = f"{one.share:.2f}", f"{one.offered:.0f}", f"{one.answered:.0f}", f"{one.refused:.3f}", f"{one.dropped:.4f}"
        times = (f"{value:.3f}" for value in (one.p50_ms, one.p99_ms, one.short_p99_ms))
        lines.append([one.model, one.mixture, one.batching, *figures, *times])
    yield from report.table(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_engine", description="One engine without its doors.")
    parser.add_argument("--device", default="auto", help="cpu or cuda:N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="all unless given")
    parser.add_argument("--rows", type=int, default=MANY[0], help="the most of a turn, %(default)s unless given")
    parser.add_argument("--turns", type=int, default=2000, help="of one row")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each level of throughput")
    parser.add_argument(
        "--open-seconds", type=float, default=3.0, help="of each level of requests that wait for nothing; 0 for none"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of what is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
