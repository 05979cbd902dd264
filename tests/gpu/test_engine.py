"""Batches of every layer, pool and head on a GPU: the results of a CPU, with and without graphs, two in flight, without allocations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from service.engine.batch import Batch, rows_block
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_slots import DISCARD_SLOT, FIRST_SLOT, ZERO_SLOT
from service.engine.execution import cuda_graph_runner
from service.engine.execution.cuda_graph_runner import CudaGraphRunner
from service.engine.execution.device import OutputCollector, memory_counts, use_device
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.graph_capture import GraphPool
from service.engine.execution.in_flight import BlockResult, FinishedBatch
from service.errors import ModelError, OutOfMemory
from service.ipc.messages.inference import FEATURES, IDS, Returns
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
LIMITS: dict[str, Any] = {"max_batch_sequences": 16, "max_batch_tokens": 256}
HALVES = 2e-2
PLAIN, VECTOR, STEPS = Returns(), Returns(embedding=True), Returns(embedding=True, sequence=True)
Table = dict[str, Any]
Arrays = dict[str, torch.Tensor]
SERIES: Table = {"kind": "features", "features": 3, "max_steps": 99}
LABELS = ["a", "b"]
CLASSIFY = {
    "kind": "classify",
    "pool": ["last", "max", "mean"],
    "labels": LABELS,
    "dense": [{"width": 4, "activation": "relu"}],
}
ATTENTION = {"kind": "embed", "pool": ["attention", "first", "last_step", "sum"], "attention_width": 3}
LAYERS: dict[str, tuple[Table, ...]] = {
    "rnn": ({"kind": "rnn", "hidden": 5, "depth": 2, "bidirectional": True, "activation": "relu", "merge": "mean"},),
    "backward": ({"kind": "lstm", "hidden": 64, "direction": "backward"},),
    "merged": ({"kind": "lstm", "hidden": 64, "bidirectional": True, "merge": "sum"},),
    "lstm": ({"kind": "lstm", "hidden": 5, "projection": 3, "peepholes": True, "clip": 2.0, "learned_start": True},),
    "normed": ({"kind": "gru", "hidden": 5, "layer_norm": True, "gate_activation": "hard_sigmoid"},),
    "conv": ({"kind": "conv", "filters": 6, "width": 3, "groups": 3, "pads": (2, 0), "activation": "elu", "epsilon": 1e-3},),
    "strided": ({"kind": "conv", "filters": 6, "width": 3, "stride": 2, "padding": "same_upper"},),
    "pool": ({"kind": "pool", "reduce": "mean", "width": 2, "stride": 2}, {"kind": "dense", "width": 4, "activation": "gelu"}),
    "steps": ({"kind": "layer_norm"}, {"kind": "batch_norm"}, {"kind": "dense", "width": 9, "activation": "silu"}),
}
SRU = {"kind": "sru", "hidden": 6, "depth": 2}
OTHERS: dict[str, tuple[Table, tuple[Table, ...], Table]] = {
    **{name: (SERIES, layers, CLASSIFY) for name, layers in LAYERS.items()},
    "attention": (SERIES, ({"kind": "activation", "activation": "none"},), ATTENTION),
    "labels": (SERIES, ({"kind": "layer_norm"},), {"kind": "classify", "pool": "max", "labels": LABELS, "multi_label": True}),
    "bag": ({"kind": "ids", "vocabulary": 9, "max_steps": 99}, (models.EMBEDDING,), {"kind": "embed", "pool": "mean"}),
    "labeller": (models.TEXT, (models.EMBEDDING, SRU | {"bidirectional": True}), {"kind": "tag", "labels": models.LABELS}),
    "counter": (models.IDS, (models.EMBEDDING, SRU), {"kind": "embed", "pool": "mean"}),
}
"""Inputs, layers and heads of model.toml."""
WITHOUT_GRAPH = {"reader", "halver", "rnn", "lstm", "normed", "strided", "pool"}
"""Models without graphs: the device waits for the host to find the best span of a row, to run steps that no kernel runs, or to count the
steps after a stride."""
NAMES = (*models.OF_EVERY_HEAD, "sensors", *OTHERS)
STREAMED = ("sensors", "speller", "counter", "forecaster")


class Engines(NamedTuple):
    """Engines with the same models in float16, and the metrics of the engine on the GPU."""

    gpu: DeviceEngine
    cpu: DeviceEngine
    metrics: Metrics

    def batches(self, name: str, by: str) -> float:
        self.gpu.count_ended()
        return self.metrics.batches.values.get((*ModelKey(name, "1").labels, by), [0.0])[0]

    def mixed(self, name: str, seed: int, returns: Returns = PLAIN) -> Batch:
        """Return a batch of a random size within the limits."""
        chance, spec = np.random.default_rng(seed), self.cpu.spec(ModelKey(name, "1"))
        rows = int(chance.integers(1, LIMITS["max_batch_sequences"] + 1))
        most = min(spec.input.max_steps, LIMITS["max_batch_tokens"] // rows)
        return batch(spec, [int(steps) for steps in chance.integers(min(4, most), most + 1, size=rows)], seed, returns)

    def sized(self, name: str, lengths: Sequence[int], seed: int = 5, returns: Returns = PLAIN) -> Batch:
        return batch(self.cpu.spec(ModelKey(name, "1")), lengths, seed, returns)

    def check(self, single: Batch) -> None:
        """Compare a batch on the GPU with the same batch on the CPU."""
        results, expected = run(self.gpu, single), run(self.cpu, single)
        assert [result.steps for result in results] == [result.steps for result in expected]
        assert_alike(results, expected)


def specs(root: Path) -> Iterator[ModelSpec]:
    """Yield the models of NAMES in float16."""
    written = [make(root) for make in models.OF_EVERY_HEAD.values()] + [models.sensors(root, hidden=32, max_steps=300)]
    for spec in written:
        yield spec.model_copy(update={"precision": "float16"})
    for name, (input, layers, head) in OTHERS.items():
        yield spec_of(name, input, *layers, head=head)


def spec_of(name: str, input: Table, *layers: Table, head: Table) -> ModelSpec:
    tables = {"name": name, "precision": "float16", "input": input, "layers": layers, "head": head}
    return ModelSpec.model_validate(tables)


def halves(spec: ModelSpec) -> Arrays:
    """Return random weights. Variances are positive."""
    arrays = models.weights(spec, seed=len(spec.name)).items()
    return {name: (array.abs() + 0.5 if name.endswith("norm") else array).half() for name, array in arrays}


@pytest.fixture(scope="module")
def on_device() -> Iterator[None]:
    before = torch.cuda.current_stream()
    use_device(CUDA)
    yield
    torch.cuda.set_stream(before)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, on_device: None) -> Engines:
    found, metrics = {ModelKey(spec.name, "1"): spec for spec in specs(tmp_path_factory.mktemp("models"))}, Metrics()
    gpu, cpu = ({key: Encoder(spec, halves(spec), device) for key, spec in found.items()} for device in (CUDA, CPU))
    return Engines(DeviceEngine(gpu, metrics, **LIMITS), DeviceEngine(cpu, Metrics(), **LIMITS), metrics)


def batch(spec: ModelSpec, lengths: Sequence[int], seed: int, returns: Returns = PLAIN) -> Batch:
    chance = np.random.default_rng(seed)

    def data(steps: int) -> bytes:
        if spec.input.features is not None:
            return chance.normal(size=(steps, spec.input.features)).astype(FEATURES).tobytes()
        return chance.integers(spec.input.vocabulary or 1, size=steps).astype(IDS).tobytes()

    key = ModelKey(spec.name, "1")
    return Batch(key, [rows_block(key, [steps], data(steps), returns) for steps in lengths])


def run(engine: DeviceEngine, one: Batch) -> list[BlockResult]:
    engine.launch(one)
    [ended] = collected(engine, 1)
    return ended.results


def collected(engine: DeviceEngine, count: int) -> list[FinishedBatch]:
    ended: list[FinishedBatch] = []
    until = time.monotonic() + 60
    while len(ended) < count and time.monotonic() < until:
        ended += engine.finished()
    assert len(ended) == count
    return ended


def assert_alike(results: list[BlockResult], expected: list[BlockResult], tolerance: float = HALVES) -> None:
    for result, expected_result in zip(results, expected, strict=True):
        for name in ("scores", "embedding", "sequence"):
            array, expected_array = getattr(result, name), getattr(expected_result, name)
            assert (array is None) == (expected_array is None), name
            if array is not None:
                assert_allclose(array, expected_array, atol=tolerance, rtol=0, err_msg=name)


Piece = tuple[QueuedBlock, int, int]
"""A block of one row, and the slots that it reads and writes."""


def piece(block: QueuedBlock, number: int, slot: int) -> Piece:
    """Return chunk `number` of the three chunks of a sequence. Its state is in `slot` between the chunks."""
    cuts = (0, block.steps // 3, block.steps // 2 + 1, block.steps)
    begin, end, step = cuts[number], cuts[number + 1], len(block.columns.values) // block.steps
    chunk = rows_block(block.model, [end - begin], block.columns.values[begin * step : end * step], block.returns)
    return chunk, ZERO_SLOT if number == 0 else slot, DISCARD_SLOT if number == 2 else slot


def batch_of(found: Sequence[Piece]) -> Batch:
    blocks, read, write = zip(*found, strict=True)
    return Batch(blocks[0].model, blocks, read_slots=np.array(read, np.int32), write_slots=np.array(write, np.int32))


def pieces(whole: Batch, number: int, first: int = FIRST_SLOT) -> Batch:
    return batch_of([piece(block, number, first + row) for row, block in enumerate(whole.blocks)])


@pytest.mark.parametrize("name", NAMES)
def test_results_match_the_cpu(engines: Engines, name: str) -> None:
    """A batch runs by a graph unless the host must wait. A sequence output has no graph."""
    for seed, returns in product(range(3), (PLAIN, VECTOR, STEPS)):
        before = engines.batches(name, "graph")
        engines.check(engines.mixed(name, seed, returns))
        by_graph = engines.batches(name, "graph") - before
        assert by_graph == (name not in WITHOUT_GRAPH and returns is not STEPS)


def test_every_batch_size_matches_the_cpu(engines: Engines) -> None:
    """A sequence that is longer than a batch runs alone."""
    for lengths in ([1], [64], [1] * 16, [16] * 16, [64, 64, 64, 64], [64, 1, 1, 64], [3] * 9):
        engines.check(engines.sized("words", lengths))
    engines.check(engines.sized("sensors", [300]))


def test_long_row_has_the_same_result_in_every_bucket(on_device: None) -> None:
    """For a few long rows of a wide QRNN, the library computes its product."""
    qrnn, head = {"kind": "qrnn", "hidden": 320, "window": 2}, {"kind": "regress", "pool": "last", "outputs": 2}
    spec = spec_of("long", SERIES | {"max_steps": 1000}, qrnn, head=head)
    encoder = Encoder(spec, halves(spec), CUDA)
    engine = DeviceEngine({ModelKey("long", "1"): encoder}, Metrics(), max_batch_sequences=8, max_batch_tokens=1000)
    single = batch(spec, [800], seed=1)
    among = Batch(single.model, [*single.blocks, *batch(spec, [130], seed=2).blocks])
    assert_alike(run(engine, single), run(engine, among)[:1])


def test_batches_in_flight_end_in_launch_order(engines: Engines) -> None:
    assert engines.gpu.accepts_batch and engines.gpu.running is None
    names = ["sensors", "words", "tagger", "reader", "words", "embedder"]
    batches = [engines.mixed(name, seed, VECTOR) for seed, name in enumerate(names)]
    for launched in batches:
        engines.gpu.launch(launched)
    assert engines.gpu.running is not None and engines.gpu.running[1] > 0
    for ended, launched in zip(collected(engines.gpu, len(batches)), batches, strict=True):
        assert ended.batch is launched
        assert_alike(ended.results, run(engines.cpu, launched))
    assert engines.gpu.accepts_batch and engines.gpu.running is None and engines.gpu.remaining_seconds == 0.0


@pytest.mark.parametrize("name", STREAMED)
def test_chunks_match_whole_sequences(engines: Engines, name: str) -> None:
    """A state that was saved and restored continues in another slot, with the same bits. Saving allocates no memory."""
    key, whole = ModelKey(name, "1"), engines.mixed(name, 3, VECTOR)
    other_slots = FIRST_SLOT + LIMITS["max_batch_sequences"]
    assert engines.gpu.streams(key)
    for number in (0, 1):
        run(engines.gpu, pieces(whole, number))
    reserved = memory_counts(CUDA)[2]
    for row in range(whole.rows):
        engines.gpu.restore(key, other_slots + row, engines.gpu.save(key, FIRST_SLOT + row))
    assert memory_counts(CUDA)[2] == reserved
    how = "launches" if name == "forecaster" else "graph"
    before = engines.batches(name, how)
    stayed, moved = (run(engines.gpu, pieces(whole, 2, first)) for first in (FIRST_SLOT, other_slots))
    assert engines.batches(name, how) == before + 2
    assert_alike(stayed, run(engines.cpu, whole))
    assert_alike(moved, stayed, tolerance=0)


@pytest.mark.parametrize("name", ["sensors", "counter", "forecaster"])
@pytest.mark.parametrize("returns", [PLAIN, VECTOR, STEPS], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_chunk_with_a_state_that_is_not_finite_is_marked(engines: Engines, name: str, returns: Returns, value: float) -> None:
    """Two batches are in flight: each has its own result. A chunk that writes no state is not marked for the states of others."""
    key, whole = ModelKey(name, "1"), engines.sized(name, [6] * 4, returns=returns)
    run(engines.gpu, pieces(whole, 0))
    state = engines.gpu.save(key, FIRST_SLOT + 1)
    engines.gpu.restore(key, FIRST_SLOT + 1, {part: torch.full_like(tensor, value) for part, tensor in state.items()})
    blocks = whole.blocks
    alone = blocks[1], ZERO_SLOT, DISCARD_SLOT
    engines.gpu.launch(pieces(whole, 1))
    engines.gpu.launch(batch_of([piece(blocks[0], 1, FIRST_SLOT), alone, piece(blocks[2], 0, FIRST_SLOT + 5)]))
    bad, good = collected(engines.gpu, 2)
    assert bad.finite is not None and bad.finite.tolist() == [True, False, True, True]
    assert good.finite is None


@pytest.mark.parametrize("head", [CLASSIFY | {"pool": "last", "dense": []}, {"kind": "tag", "labels": LABELS}], ids=str)
@pytest.mark.parametrize("layer", [{"kind": "lstm", "peepholes": True}, {"kind": "gru"}], ids=str)
def test_next_steps_run_in_a_resident_kernel(on_device: None, layer: Table, head: Table) -> None:
    """Whole sequences, saved states and long chunks end the kernel. The next step starts it again from the states in their slots."""
    spec = spec_of("next", SERIES, layer | {"hidden": 64, "depth": 2}, head=head)
    key, metrics = ModelKey(spec.name, "1"), Metrics()
    encoders = ({key: Encoder(spec, halves(spec), device)} for device in (CUDA, CPU))
    gpu, cpu = (DeviceEngine(encoder, metrics, resident=True, **LIMITS) for encoder in encoders)
    whole, chunk = batch(spec, [3, 3], seed=1), batch(spec, [60], seed=2)
    between: list[Callable[[], Any]] = [lambda: run(gpu, whole), lambda: gpu.restore(key, 9, gpu.save(key, FIRST_SLOT)), list]
    engines = Engines(gpu, cpu, metrics)
    for number in range(3):
        one = pieces(whole, number)
        assert_alike(run(gpu, one), run(cpu, one))
        between[number]()
    assert engines.batches(spec.name, "resident") == 3
    one = batch_of([(chunk.blocks[0], FIRST_SLOT, FIRST_SLOT + 1)])
    assert_alike(run(gpu, one), run(cpu, one))
    assert engines.batches(spec.name, "resident") == 3
    steps = batch_of([piece(block, 1, FIRST_SLOT + row) for row, block in enumerate(whole.blocks)])
    nan = {name: torch.full_like(state, math.nan) for name, state in gpu.save(key, FIRST_SLOT).items()}
    gpu.restore(key, FIRST_SLOT, nan)
    gpu.launch(steps)
    [ended] = collected(gpu, 1)
    assert ended.finite is not None and ended.finite.tolist() == [False, True]
    assert engines.batches(spec.name, "resident") == 4
    gpu.end_resident()


def test_warm_engine_allocates_nothing(engines: Engines) -> None:
    names = (*models.OF_EVERY_HEAD, "sensors", "labeller", "counter")
    by_graph = [name for name in names if name not in WITHOUT_GRAPH]
    batches = [engines.mixed(name, seed, VECTOR if seed % 3 else PLAIN) for seed in range(40) for name in by_graph]
    before = memory_counts(CUDA)
    for launched in batches:
        run(engines.gpu, launched)
    assert memory_counts(CUDA) == before
    for seed, name in product(range(40), names):
        run(engines.gpu, engines.mixed(name, seed, STEPS))
    assert memory_counts(CUDA)[::2] == before[::2], "calls of cudaMalloc, and the bytes held"


def test_memory_of_a_long_row_is_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None) -> None:
    spec = models.sensors(tmp_path, hidden=521, max_steps=20_000)
    encoder = Encoder(spec, store.read_arrays(tmp_path / spec.name / "1", spec), CUDA)
    runner = CudaGraphRunner(encoder, [OutputCollector(0, 1 << 20)], GraphPool(CUDA), **LIMITS, slots=1)
    assert runner.fallback_reason, "no kernel runs it in float32, and its steps are launched one by one"
    known = runner.largest_bytes()
    monkeypatch.setattr(cuda_graph_runner, "MAX_TRIAL_SECONDS", 60.0)
    assert known == pytest.approx(runner.largest_bytes(), rel=0.05)


def test_batch_without_memory_fails_and_the_next_runs(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    single = engines.mixed("words", 1, STEPS)
    with monkeypatch.context() as planted:
        planted.setattr(Encoder, "__call__", lambda *_, **__: torch.empty(1 << 45, dtype=torch.uint8, device=CUDA))
        with pytest.raises(OutOfMemory, match="has no memory for"):
            engines.gpu.launch(single)
    assert engines.gpu.finished() == []
    engines.check(single)


@pytest.mark.parametrize("name", ["speller", "counter", "forecaster", "tagger"])
def test_int8_model_runs_in_float16(tmp_path: Path, on_device: None, name: str) -> None:
    """An LSTM, an SRU, a QRNN with a convolution, and a GRU have the results of the float16 model of their weights."""
    [spec] = [spec for spec in specs(tmp_path / "all") if spec.name == name]
    folder, int8_spec = tmp_path / name / "1", spec.model_copy(update={"precision": "int8"})
    described = store.write(folder, int8_spec, models.weights(spec), card="made up")
    arrays = store.read_arrays(folder, described)
    int8 = Encoder(described, arrays, CUDA)
    float16 = Encoder(spec, {tensor: array.half() for tensor, array in arrays.items()}, CUDA)
    assert int8.backends() == float16.backends()
    assert int8.weight_bytes() == float16.weight_bytes()
    models_of = ({ModelKey(name, "1"): encoder} for encoder in (int8, float16))
    first, second = (run(DeviceEngine(one, Metrics(), **LIMITS), batch(spec, [9, 5, 14, 7], 0, STEPS)) for one in models_of)
    assert_alike(first, second, tolerance=0)


def test_int8_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    spec = models.sensors(tmp_path, hidden=4).model_copy(update={"precision": "int8"})
    arrays = models.weights(spec) | {"head.bias": torch.tensor([1.0, 1e5, 0.0])}
    with pytest.raises(ModelError, match=r"head\.bias has values above the range of float16"):
        Encoder(spec, arrays, CUDA)
