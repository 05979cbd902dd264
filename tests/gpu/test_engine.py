"""Batches on a GPU: with and without graphs, two in flight, without allocations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from service.engine.batch import Batch, Chunk
from service.engine.batching.state_slots import DISCARD_SLOT, FIRST_SLOT, ZERO_SLOT
from service.engine.execution import cuda_graph_runner
from service.engine.execution.cuda_graph_runner import CudaGraphRunner
from service.engine.execution.device import DeviceMemory, OutputCollector, use_device
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.graph_capture import GraphPool
from service.engine.execution.in_flight import ChunkResult
from service.errors import OutOfMemory
from service.ipc.messages import FEATURES, IDS, ModelKey, Returns
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
LIMITS: dict[str, Any] = {"max_batch_sequences": 16, "max_batch_tokens": 256}
WITHOUT_GRAPH = {"reader", "halver"}
"""Models without graphs: the device waits for the host to find the best span of a row, or the output lengths of a strided convolution."""
LABELLER = {"kind": "sru", "hidden": 6, "depth": 2, "bidirectional": True}
HALVES = 2e-2
PLAIN, VECTOR, STEPS = Returns(), Returns(embedding=True), Returns(embedding=True, sequence=True)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]:
    """Return a model of every head and a deeper model over features, all in float16."""
    root = tmp_path_factory.mktemp("models")
    made = [make(root) for make in models.OF_EVERY_HEAD.values()] + [models.sensors(root, hidden=32, max_steps=300)]
    labels = {"kind": "tag", "labels": models.LABELS}
    made.append(models.made_up(root, "labeller", models.TEXT, models.EMBEDDING, LABELLER, head=labels))
    counter = {"kind": "sru", "hidden": 6, "depth": 2}
    made.append(models.made_up(root, "counter", models.IDS, models.EMBEDDING, counter, head={"kind": "embed", "pool": "mean"}))
    results = {}
    for spec in made:
        arrays = store.read_arrays(root / spec.name / "1", spec)
        half = spec.model_copy(update={"precision": "float16"})
        results[ModelKey(spec.name, "1")] = half, {name: array.half() for name, array in arrays.items()}
    return results


def encoders(specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]], device: torch.device) -> dict[ModelKey, Encoder]:
    return {key: Encoder(spec, arrays, device) for key, (spec, arrays) in specs.items()}


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="module")
def on_gpu(specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]], metrics: Metrics) -> Iterator[DeviceEngine]:
    before = torch.cuda.current_stream()
    use_device(CUDA)
    yield DeviceEngine(encoders(specs, CUDA), metrics, **LIMITS)
    torch.cuda.set_stream(before)


@pytest.fixture(scope="module")
def long_row_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngine]:
    """A wide QRNN. For a few long rows, the library computes its product."""
    root = tmp_path_factory.mktemp("long")
    qrnn = {"kind": "qrnn", "hidden": 320, "window": 2}
    series = {"kind": "features", "features": 3, "max_steps": 1000}
    spec = models.made_up(root, "long", series, qrnn, head={"kind": "regress", "pool": "last", "outputs": 2})
    arrays = {name: array.half() for name, array in store.read_arrays(root / "long" / "1", spec).items()}
    half = spec.model_copy(update={"precision": "float16"})
    before = torch.cuda.current_stream()
    use_device(CUDA)
    yield DeviceEngine(
        {ModelKey("long", "1"): Encoder(half, arrays, CUDA)}, Metrics(), max_batch_sequences=8, max_batch_tokens=1000
    )
    torch.cuda.set_stream(before)


def test_long_row_has_the_same_result_in_every_bucket(long_row_engine: DeviceEngine) -> None:
    spec = long_row_engine.spec(ModelKey("long", "1"))
    single = batch(spec, [800], seed=1)
    [alone] = run(long_row_engine, single)
    [among, _] = run(long_row_engine, Batch(single.model, [*single.chunks, *batch(spec, [130], seed=2).chunks]))
    assert_alike([alone], [among])


@pytest.fixture(scope="module")
def on_cpu(specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]) -> DeviceEngine:
    return DeviceEngine(encoders(specs, CPU), Metrics(), **LIMITS)


@pytest.fixture(params=[*models.OF_EVERY_HEAD, "sensors", "labeller", "counter"])
def key(request: pytest.FixtureRequest) -> ModelKey:
    return ModelKey(request.param, "1")


def chunk(spec: ModelSpec, steps: int, chance: np.random.Generator, returns: Returns) -> Chunk:
    if spec.input.features is not None:
        data = chance.normal(size=(steps, spec.input.features)).astype(FEATURES)
    else:
        data = chance.integers(spec.input.vocabulary or 1, size=steps).astype(IDS)
    return Chunk(data.tobytes(), steps, returns, None)


def batch(spec: ModelSpec, lengths: list[int], seed: int, returns: Returns = PLAIN) -> Batch:
    chance = np.random.default_rng(seed)
    return Batch(ModelKey(spec.name, "1"), [chunk(spec, steps, chance, returns) for steps in lengths])


def mixed(spec: ModelSpec, seed: int, returns: Returns = PLAIN) -> Batch:
    """Return a batch of a random size within the limits."""
    chance = np.random.default_rng(seed)
    rows = int(chance.integers(1, LIMITS["max_batch_sequences"] + 1))
    most = min(spec.input.max_steps, LIMITS["max_batch_tokens"] // rows)
    return batch(spec, [int(steps) for steps in chance.integers(min(4, most), most + 1, size=rows)], seed, returns)


def run(engine: DeviceEngine, one: Batch) -> list[ChunkResult]:
    engine.launch(one)
    return [result for _, result in collected(engine, one.rows)]


def collected(engine: DeviceEngine, count: int) -> list[tuple[Chunk, ChunkResult]]:
    results: list[tuple[Chunk, ChunkResult]] = []
    until = time.monotonic() + 10
    while len(results) < count and time.monotonic() < until:
        results += [
            (part, result) for part, result in engine.finished() if isinstance(part, Chunk) and isinstance(result, ChunkResult)
        ]
    assert len(results) == count
    return results


def assert_alike(results: list[ChunkResult], expected: list[ChunkResult]) -> None:
    for result, expected_result in zip(results, expected, strict=True):
        assert result.steps == expected_result.steps
        for name in ("scores", "embedding", "sequence"):
            array, expected_array = getattr(result, name), getattr(expected_result, name)
            assert (array is None) == (expected_array is None), name
            if array is not None:
                assert_allclose(array, expected_array, atol=HALVES, err_msg=name)


def by(metrics: Metrics, key: ModelKey, how: str) -> float:
    return metrics.batches.values.get((*key.labels, how), [0.0])[0]


def test_batch_runs_by_graph_unless_the_host_must_wait(
    on_gpu: DeviceEngine, metrics: Metrics, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]], key: ModelKey
) -> None:
    how = "launches" if key.name in WITHOUT_GRAPH else "graph"
    before = by(metrics, key, how)
    run(on_gpu, mixed(specs[key][0], seed=1))
    assert by(metrics, key, how) == before + 1
    before = by(metrics, key, "launches")
    run(on_gpu, mixed(specs[key][0], seed=1, returns=STEPS))
    assert by(metrics, key, "launches") == before + 1, "a sequence output has no graph"


@pytest.mark.parametrize("returns", [PLAIN, VECTOR, STEPS], ids=["plain", "vector", "steps"])
@pytest.mark.parametrize("seed", range(4))
def test_results_match_the_cpu(
    on_gpu: DeviceEngine,
    on_cpu: DeviceEngine,
    specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]],
    key: ModelKey,
    returns: Returns,
    seed: int,
) -> None:
    single = mixed(specs[key][0], seed, returns)
    assert_alike(run(on_gpu, single), run(on_cpu, single))


def test_every_batch_size_matches_the_cpu(
    on_gpu: DeviceEngine, on_cpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]
) -> None:
    spec = specs[ModelKey("words", "1")][0]
    for lengths in ([1], [64], [1] * 16, [16] * 16, [64, 64, 64, 64], [64, 1, 1, 64], [3] * 9, [64]):
        single = batch(spec, lengths, seed=len(lengths))
        assert_alike(run(on_gpu, single), run(on_cpu, single))


def test_sequence_longer_than_a_batch_runs_alone(
    on_gpu: DeviceEngine, on_cpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]
) -> None:
    single = batch(specs[ModelKey("sensors", "1")][0], [300], seed=5)
    assert_alike(run(on_gpu, single), run(on_cpu, single))


def test_batches_in_flight_end_in_launch_order(
    on_gpu: DeviceEngine, on_cpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]
) -> None:
    names = ["sensors", "words", "tagger", "reader", "words", "embedder"]
    batches = [mixed(specs[ModelKey(name, "1")][0], seed, VECTOR) for seed, name in enumerate(names)]
    for launched in batches:
        on_gpu.launch(launched)
    results = collected(on_gpu, sum(launched.rows for launched in batches))
    assert [chunk for chunk, _ in results] == [chunk for launched in batches for chunk in launched.chunks]
    assert_alike([result for _, result in results], [result for launched in batches for result in run(on_cpu, launched)])


def test_engine_accepts_a_batch_when_the_device_is_free(
    on_gpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]
) -> None:
    assert on_gpu.accepts_batch and on_gpu.running is None
    single = batch(specs[ModelKey("sensors", "1")][0], [300], seed=1)
    on_gpu.launch(single)
    assert on_gpu.running is not None and on_gpu.running[1] > 0
    collected(on_gpu, 1)
    assert on_gpu.accepts_batch and on_gpu.running is None and on_gpu.remaining_seconds == 0.0


@pytest.mark.parametrize(
    "name, how", [("sensors", "graph"), ("speller", "graph"), ("counter", "graph"), ("forecaster", "launches")]
)
def test_chunks_match_whole_sequences(
    on_gpu: DeviceEngine,
    on_cpu: DeviceEngine,
    metrics: Metrics,
    specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]],
    name: str,
    how: str,
) -> None:
    key = ModelKey(name, "1")
    assert on_gpu.streams(key)
    whole = mixed(specs[key][0], seed=3, returns=VECTOR)
    first, second, third = (
        Batch(key, [piece(chunk, number, FIRST_SLOT + row) for row, chunk in enumerate(whole.chunks)]) for number in range(3)
    )
    run(on_gpu, first)
    run(on_gpu, second)
    before = by(metrics, key, how)
    last = run(on_gpu, third)
    assert by(metrics, key, how) == before + 1
    assert_alike([result._replace(steps=0) for result in last], [result._replace(steps=0) for result in run(on_cpu, whole)])


@pytest.mark.parametrize("name", ["sensors", "speller", "counter", "forecaster"])
def test_restored_state_continues_in_another_slot(
    on_gpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]], name: str
) -> None:
    key = ModelKey(name, "1")
    whole = mixed(specs[key][0], seed=4, returns=VECTOR)
    other_slots = FIRST_SLOT + LIMITS["max_batch_sequences"]
    begun = [
        Batch(key, [piece(chunk, number, FIRST_SLOT + row) for row, chunk in enumerate(whole.chunks)]) for number in (0, 1)
    ]
    for chunk_batch in begun:
        run(on_gpu, chunk_batch)
    reserved = DeviceMemory.of(CUDA).reserved_bytes
    for row in range(whole.rows):
        on_gpu.restore(key, other_slots + row, on_gpu.save(key, FIRST_SLOT + row))
    assert DeviceMemory.of(CUDA).reserved_bytes == reserved
    stayed, moved = (
        run(on_gpu, Batch(key, [piece(chunk, 2, begin + row) for row, chunk in enumerate(whole.chunks)]))
        for begin in (FIRST_SLOT, other_slots)
    )
    for in_place, in_other_slot in zip(stayed, moved, strict=True):
        for part in ("scores", "embedding"):
            expected, array = getattr(in_place, part), getattr(in_other_slot, part)
            assert (expected is None and array is None) or (expected == array).all(), part


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("returns", [PLAIN, VECTOR, STEPS], ids=["graph", "graph and embedding", "launches"])
@pytest.mark.parametrize("name", ["sensors", "counter", "forecaster"])
def test_chunk_with_a_state_that_is_not_finite_is_marked(
    on_gpu: DeviceEngine,
    specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]],
    name: str,
    returns: Returns,
    value: float,
) -> None:
    """Two batches are in flight: each has its own result. A chunk that writes no state is not marked for the states of others."""
    key, rows = ModelKey(name, "1"), 4
    chunks = batch(specs[key][0], [6] * rows, seed=5, returns=returns).chunks
    run(on_gpu, Batch(key, [piece(chunk, 0, FIRST_SLOT + row) for row, chunk in enumerate(chunks)]))
    state = on_gpu.save(key, FIRST_SLOT + 1)
    on_gpu.restore(key, FIRST_SLOT + 1, {part: torch.full_like(tensor, value) for part, tensor in state.items()})
    second = Batch(key, [piece(chunk, 1, FIRST_SLOT + row) for row, chunk in enumerate(chunks)])
    good = Batch(key, [piece(chunks[0], 1, FIRST_SLOT), chunks[1], piece(chunks[2], 0, FIRST_SLOT + 5)])
    on_gpu.launch(second)
    on_gpu.launch(good)
    results = collected(on_gpu, second.rows + good.rows)
    assert [result.finite for _, result in results] == [True, False, True, True, True, True, True]


def piece(chunk: Chunk, number: int, slot: int) -> Chunk:
    """Return chunk `number` of the three chunks of a sequence. Its state is in `slot` between the chunks."""
    cuts = (0, chunk.steps // 3, chunk.steps // 2 + 1, chunk.steps)
    begin, end, step = cuts[number], cuts[number + 1], len(chunk.data) // chunk.steps
    read_slot, write_slot = ZERO_SLOT if number == 0 else slot, DISCARD_SLOT if number == 2 else slot
    return Chunk(chunk.data[begin * step : end * step], end - begin, chunk.returns, None, read_slot, write_slot)


def test_warm_engine_allocates_nothing(
    on_gpu: DeviceEngine, specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]]
) -> None:
    by_graph = [key for key in specs if key.name not in WITHOUT_GRAPH]
    batches = [mixed(specs[key][0], seed, VECTOR if seed % 3 else PLAIN) for seed in range(40) for key in by_graph]
    before = DeviceMemory.of(CUDA)
    for launched in batches:
        run(on_gpu, launched)
    assert DeviceMemory.of(CUDA) == before
    for seed in range(40):
        for key in specs:
            run(on_gpu, mixed(specs[key][0], seed, STEPS))
    after = DeviceMemory.of(CUDA)
    assert (after.mallocs, after.reserved_bytes) == (before.mallocs, before.reserved_bytes)


def test_memory_of_a_long_row_is_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(CUDA)
    spec = models.sensors(tmp_path, hidden=520, max_steps=20_000)
    encoder = Encoder(spec, store.read_arrays(tmp_path / spec.name / "1", spec), CUDA)
    runner = CudaGraphRunner(encoder, [OutputCollector(0, 1 << 20)], GraphPool(CUDA), **LIMITS, slots=1)
    assert runner.fallback_reason, "no cluster has room for it in float32, and its steps are launched one by one"
    began = time.monotonic()
    known = runner.largest_bytes()
    assert time.monotonic() - began < 4 * cuda_graph_runner.MAX_TRIAL_SECONDS
    monkeypatch.setattr(cuda_graph_runner, "MAX_TRIAL_SECONDS", 60.0)
    assert known == pytest.approx(runner.largest_bytes(), rel=0.05)


def test_batch_without_memory_fails_and_the_next_runs(
    on_gpu: DeviceEngine,
    on_cpu: DeviceEngine,
    specs: dict[ModelKey, tuple[ModelSpec, dict[str, torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = ModelKey("words", "1")
    single = mixed(specs[key][0], seed=1, returns=STEPS)
    with monkeypatch.context() as planted:
        planted.setattr(Encoder, "__call__", lambda *_, **__: torch.empty(1 << 45, dtype=torch.uint8, device=CUDA))
        with pytest.raises(OutOfMemory, match="has no memory for"):
            on_gpu.launch(single)
    assert on_gpu.finished() == []
    assert_alike(run(on_gpu, single), run(on_cpu, single))
