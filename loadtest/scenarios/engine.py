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
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kernels.bench import questions
from kernels.bench.report import device_name, slug
from kernels.bench.tables import write
from loadtest import report, servers, synthetic_models
from service.engine.batch import Batch
from service.engine.batching.request_block import RequestBlock
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import InFlightBatch
from service.ipc.blocks import Columns
from service.ipc.messages import FEATURES, IDS, ModelKey
from service.local import build_engine
from service.metrics import Metrics
from service.modeling.spec import EmbeddingLayer, Layer, LSTMLayer, ModelSpec, SequenceInput
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
NO_DEADLINE = 1e9
PACKAGES = ("torch", "numpy", "numba")
STAGES = ("stage", "launch", "device", "collect", "total")


@dataclass(frozen=True, slots=True)
class SingleRow:
    """Batches of one row: microseconds in each stage (median, 10th and 90th percentile); kernels_us: the time of the kernels alone."""

    model: str
    steps: int
    kernels_us: float
    stages_us: dict[str, tuple[float, float, float]]
    batches: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Batches of `rows` rows, back to back. device_share: share of the time in which kernels run, by their duration at warm-up."""

    model: str
    rows: int
    tokens: float
    sequences_per_second: float
    batch_us: float
    device_share: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu or cuda:N")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="models to measure")
    parser.add_argument("--rows", type=int, default=LARGE_LIMITS[0], help="largest batch")
    parser.add_argument("--batches", type=int, default=2000, help="batches of one row")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each batch size")


def run(options: argparse.Namespace) -> int:
    engine = _engine(options.device, options.models, *DEFAULT_LIMITS)
    machine = device_name(engine.device)
    singles = [single_row(engine, model, options.batches) for model in options.models]
    print(f"one engine on {machine}\n\none row, us: median (p10-p90)\n")
    print(_single_row_table(singles))
    small, _ = DEFAULT_LIMITS
    larger = _engine(options.device, options.models, *LARGE_LIMITS) if options.rows > small else engine
    sizes = list(itertools.takewhile(lambda rows: rows <= options.rows, (1 << power for power in itertools.count())))
    throughputs = [
        throughput(engine if rows <= small else larger, model, rows, options.seconds)
        for model, rows in itertools.product(options.models, sizes)
    ]
    print("\nbatches back to back\n")
    print(_throughput_table(throughputs) + "\n")
    environment = report.environment(machine, PACKAGES)
    records = [asdict(single) | environment for single in singles]
    records += [asdict(each) | environment for each in throughputs]
    write(options.out / f"engine-{slug(machine)}.jsonl", records)
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


def single_row(engine: DeviceEngine, model: str, count: int) -> SingleRow:
    """Run batches of one row. Each is answered before the next is staged."""
    batches, times, kernels = _batches(engine, model, rows=1), list[dict[str, float]](), list[float]()

    def watch(in_flight: InFlightBatch, ended: float) -> None:
        kernels.append(1e6 * in_flight.predicted)
        moments = (in_flight.began, in_flight.staged, in_flight.launched, ended, time.monotonic())
        spans = [1e6 * (after - before) for before, after in itertools.pairwise(moments)]
        times.append(dict(zip(STAGES, (*spans, sum(spans)), strict=True)))

    engine.watch(watch)
    steps = [_answered(engine, next(batches)).tokens for _ in range(count)]
    engine.watch(None)
    stages = {}
    for stage in STAGES:
        median, low, high = np.percentile([spans[stage] for spans in times[count // 10 :]], (50, 10, 90)).round(2).tolist()
        stages[stage] = (median, low, high)
    return SingleRow(model, round(statistics.median(steps)), round(statistics.median(kernels), 2), stages, count)


def throughput(engine: DeviceEngine, model: str, rows: int, seconds: float) -> Throughput:
    """Run as many batches as the engine accepts in this time."""
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
        answered += sum(block.sequences for block, _ in engine.finished() if isinstance(block, RequestBlock))
    duration = time.monotonic() - began
    engine.watch(None)
    rate, batch_us = round(answered / duration, 1), round(1e6 * duration / launched, 2)
    return Throughput(model, rows, tokens / launched, rate, batch_us, round(on_device / duration, 4))


def _answered(engine: DeviceEngine, batch: Batch) -> Batch:
    engine.launch(batch)
    while not engine.finished():
        pass
    return batch


def _batches(engine: DeviceEngine, model: str, rows: int) -> Iterator[Batch]:
    """Cycle through seeded batches: questions have their real lengths, other sequences have STEPS steps."""
    spec = engine.spec(ModelKey(model, "1"))
    batches = []
    for seed in range(VARIANTS):
        chance = np.random.default_rng(seed)
        lengths = questions.lengths(rows, seed) if model in QUESTIONS else [STEPS] * rows
        if model in QUESTIONS and rows == 1:
            lengths = questions.lengths(VARIANTS)[seed : seed + 1]
        block = _request_block(ModelKey(model, "1"), lengths, _values(spec, sum(lengths), chance))
        batches.append(Batch(block.model, [], blocks=[block]))
    return itertools.cycle(batches)


def _request_block(model: ModelKey, lengths: Sequence[int], values: bytes) -> RequestBlock:
    """Return a block of requests with one sequence each."""
    count = len(lengths)
    columns = Columns(
        array("Q", range(1, count + 1)).tobytes(),
        array("d", [NO_DEADLINE] * count).tobytes(),
        array("i", [1] * count).tobytes(),
        array("i", lengths).tobytes(),
        values,
    )
    return RequestBlock(model, columns, steps=sum(lengths), shortest=min(lengths), longest=max(lengths), deadline=NO_DEADLINE)


def _values(spec: ModelSpec, steps: int, chance: np.random.Generator) -> bytes:
    if spec.input.features is not None:
        return chance.normal(size=(steps, spec.input.features)).astype(FEATURES).tobytes()
    return chance.integers(spec.input.vocabulary or 1, size=steps).astype(IDS).tobytes()


def _single_row_table(singles: Sequence[SingleRow]) -> str:
    lines = [["model", "steps", "kernels", *STAGES]]
    for single in singles:
        stages = ("{:.1f} ({:.1f}-{:.1f})".format(*single.stages_us[stage]) for stage in STAGES)
        lines.append([single.model, str(single.steps), f"{single.kernels_us:.1f}", *stages])
    return report.table(lines)


def _throughput_table(throughputs: Sequence[Throughput]) -> str:
    lines = [["model", "rows", "tokens", "sequences/s", "us a batch", "device"]]
    for each in throughputs:
        figures = (f"{each.tokens:.0f}", f"{each.sequences_per_second:.0f}", f"{each.batch_us:.1f}", f"{each.device_share:.2f}")
        lines.append([each.model, str(each.rows), *figures])
    return report.table(lines)
