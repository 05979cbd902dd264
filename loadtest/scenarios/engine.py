"""One engine without frontends: where the time of a single request goes, and how many requests the engine answers.

Single rows run in sequence. Then batches of a fixed number of rows run back to back, as under constant load; a batch is one block of
requests.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.bench import questions
from kernels.bench.report import device_name, slug
from kernels.bench.tables import write
from loadtest import report, servers, synthetic_models
from service.engine.batch import Batch, rows_block
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import InFlightBatch
from service.ipc.messages.inference import FEATURES, IDS
from service.ipc.messages.models import ModelKey
from service.local import build_engine
from service.metrics import Metrics
from service.modeling.spec import ModelSpec, SequenceInput
from service.modeling.spec.layers import EmbeddingLayer, Layer, LSTMLayer
from service.settings import Settings

SUMMARY = "one engine without frontends: stages of a request, batch sizes"
QUESTIONS = ("question-type-cnn", "question-type-lstm", "question-type-sru")
SENSOR, WIDE = "lstm-256-floats", "lstm-512-ids"
MODELS = (SENSOR, WIDE, *QUESTIONS)
SYNTHETIC: dict[str, tuple[SequenceInput, tuple[Layer, ...]]] = {
    SENSOR: (SequenceInput(kind="features", features=256, max_steps=1024), (LSTMLayer(kind="lstm", hidden=256),)),
    WIDE: (
        SequenceInput(kind="ids", vocabulary=20_000, max_steps=4096),
        (EmbeddingLayer(kind="embedding", width=512), LSTMLayer(kind="lstm", hidden=512)),
    ),
}
"""Inputs and layers of the models with synthetic weights."""
STEPS = 64
"""Time steps of a synthetic sequence."""
DEFAULT_LIMITS, LARGE_LIMITS = (64, 4096), (512, 32768)
"""Max batch sequences and max batch tokens: the defaults of the settings, and eight times as many."""
VARIANTS = 8
"""Distinct batches, run in a cycle."""
PACKAGES = ("torch", "numpy", "numba")
STAGES = ("stage", "launch", "device", "collect", "total")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu or cuda:N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="models to measure")
    parser.add_argument("--rows", type="count", default=LARGE_LIMITS[0], help="largest batch")
    parser.add_argument("--batches", type="count", default=2000, help="batches of one row")
    parser.add_argument("--seconds", type="amount", default=1.0, help="duration of each batch size")


def run(options: argparse.Namespace) -> int:
    engine = _engine(options.device, options.models, *DEFAULT_LIMITS)
    machine = device_name(engine.device)
    singles = [single_row(engine, model, options.batches) for model in options.models]
    print(f"one engine on {machine}\n\none row, us: median (p10-p90)\n\n{_single_row_table(singles)}")
    small, _ = DEFAULT_LIMITS
    larger = _engine(options.device, options.models, *LARGE_LIMITS) if options.rows > small else engine
    sizes = [1 << power for power in range(options.rows.bit_length())]
    throughputs = [
        throughput(engine if rows <= small else larger, model, rows, options.seconds)
        for model, rows in itertools.product(options.models, sizes)
    ]
    lines = [list(map(str, each.values())) for each in throughputs]
    print(f"\nbatches back to back\n\n{report.table([list(throughputs[0]), *lines])}\n")
    environment = report.environment(machine, PACKAGES)
    write(options.out / f"engine-{slug(machine)}.jsonl", [record | environment for record in (*singles, *throughputs)])
    return 0


def _engine(device: str, models: Sequence[str], rows: int, tokens: int) -> DeviceEngine:
    """Return an engine with embedded models, and models with synthetic weights."""
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            if model in SYNTHETIC:
                inputs, layers = SYNTHETIC[model]
                synthetic_models.write(Path(scratch), model, inputs, *layers)
            else:
                (Path(scratch) / model).symlink_to(servers.MODELS / model)
        settings = Settings(models=Path(scratch), device=device, max_batch_sequences=rows, max_batch_tokens=tokens)
        return build_engine(settings, Metrics())


def single_row(engine: DeviceEngine, model: str, count: int) -> dict[str, Any]:
    """Run batches of one row. Each is answered before the next is staged.

    Returns microseconds in each stage (median, 10th and 90th percentile), and kernels_us: the time of the kernels alone.
    """
    batches, times, kernels = _batches(engine, model, rows=1), list[list[float]](), list[float]()

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        kernels.append(1e6 * in_flight.predicted)
        moments = (in_flight.began, in_flight.staged, in_flight.launched, ended, time.monotonic())
        times.append([*(1e6 * np.diff(moments)), 1e6 * (moments[-1] - moments[0])])

    engine.watch(watch)
    steps = [_answered(engine, next(batches)).tokens for _ in range(count)]
    engine.watch(None)
    stages = np.percentile(times[count // 10 :], (50, 10, 90), axis=0).T.round(2).tolist()
    return {
        "model": model,
        "steps": round(statistics.median(steps)),
        "kernels_us": round(statistics.median(kernels), 2),
        "stages_us": dict(zip(STAGES, stages, strict=True)),
        "batches": count,
    }


def throughput(engine: DeviceEngine, model: str, rows: int, seconds: float) -> dict[str, Any]:
    """Run as many batches of `rows` rows, back to back, as the engine accepts in this time.

    device_share is the share of the time in which kernels run, by their duration at warm-up.
    """
    batches = _batches(engine, model, rows)
    tokens = answered = launched = 0
    on_device = 0.0

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        nonlocal on_device
        on_device += in_flight.launched - in_flight.staged if in_flight.collector is None else in_flight.predicted

    for _ in range(VARIANTS):
        _answered(engine, next(batches))
    engine.watch(watch)
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds or answered < launched * rows:
        if engine.accepts_batch and now < began + seconds:
            batch = next(batches)
            engine.launch(batch)
            launched, tokens = launched + 1, tokens + batch.tokens
        answered += sum(ended.batch.rows for ended in engine.finished())
    duration = time.monotonic() - began
    engine.watch(None)
    return {
        "model": model,
        "rows": rows,
        "tokens": round(tokens / launched, 1),
        "sequences_per_second": round(answered / duration, 1),
        "batch_us": round(1e6 * duration / launched, 2),
        "device_share": round(on_device / duration, 4),
    }


def _answered(engine: DeviceEngine, batch: Batch) -> Batch:
    engine.launch(batch)
    while not engine.finished():
        pass
    return batch


def _batches(engine: DeviceEngine, model: str, rows: int) -> Iterator[Batch]:
    """Cycle through seeded batches: questions have their real lengths, other sequences have STEPS steps."""
    key, batches = ModelKey(model, "1"), []
    spec = engine.spec(key)
    for seed in range(VARIANTS):
        chance = np.random.default_rng(seed)
        lengths = questions.lengths(rows, seed) if model in QUESTIONS else [STEPS] * rows
        if model in QUESTIONS and rows == 1:
            lengths = questions.lengths(VARIANTS)[seed : seed + 1]
        batches.append(Batch(key, [rows_block(key, lengths, _values(spec, sum(lengths), chance))]))
    return itertools.cycle(batches)


def _values(spec: ModelSpec, steps: int, chance: np.random.Generator) -> bytes:
    if spec.input.features is not None:
        return chance.normal(size=(steps, spec.input.features)).astype(FEATURES).tobytes()
    return chance.integers(spec.input.vocabulary or 1, size=steps).astype(IDS).tobytes()


def _single_row_table(singles: Sequence[dict[str, Any]]) -> str:
    lines = [["model", "steps", "kernels", *STAGES]]
    for single in singles:
        stages = ("{:.1f} ({:.1f}-{:.1f})".format(*values) for values in single["stages_us"].values())
        lines.append([single["model"], str(single["steps"]), f"{single['kernels_us']:.1f}", *stages])
    return report.table(lines)
