"""The engine of one device, on a CPU: batches in, results out."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from service.engine.batch import Batch, rows_block
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution import model_runner, served_models
from service.engine.execution.device import allow_tf32
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BatchArrays, BlockResult, InFlightBatch
from service.ipc.blocks import COUNT
from service.ipc.messages.inference import FEATURES, IDS, Returns
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models
from tests.kernels import inputs
from tests.kernels.families import cpu_backends

WORDS, SENSORS = ModelKey("words", "1"), ModelKey("sensors", "1")
HEADS = [ModelKey(name, "1") for name in models.OF_EVERY_HEAD]
LENGTHS = [7, 1, 13, 4]
LONGER = [7, 3, 13, 4]
"""Long enough for every model."""
ROUNDING = 1e-5
ALL = Returns(embedding=True, sequence=True)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKey, Encoder]:
    root = tmp_path_factory.mktemp("models")
    specs = {key: models.OF_EVERY_HEAD[key.name](root) for key in HEADS} | {SENSORS: models.sensors(root, max_steps=50)}
    return {
        key: Encoder(spec, store.read_arrays(root / key.name / key.version, spec), torch.device("cpu"))
        for key, spec in specs.items()
    }


@pytest.fixture
def engine(encoders: dict[ModelKey, Encoder]) -> DeviceEngine:
    served = {key: encoders[key] for key in (WORDS, SENSORS)}
    return DeviceEngine(served, Metrics(), max_batch_sequences=8, max_batch_tokens=40)


@pytest.mark.parametrize(("kept_bytes", "slots"), [(0, 2), (999, 9), (10_000, 20)])
def test_states_in_slots_take_limited_memory(
    encoders: dict[ModelKey, Encoder], monkeypatch: pytest.MonkeyPatch, kept_bytes: int, slots: int
) -> None:
    """Unless the fewest slots take more."""
    monkeypatch.setattr(Encoder, "state_bytes", lambda _: 100)
    monkeypatch.setattr(served_models, "SLOTS_BYTES", kept_bytes)
    engine = DeviceEngine({SENSORS: encoders[SENSORS]}, Metrics(), max_batch_sequences=8, max_batch_tokens=40, slots=(2, 20))
    assert engine.slots(SENSORS) == (slots, served_models.SPARE_FACTOR * 8)


def random_input(key: ModelKey, steps: int, seed: int) -> NDArray[np.generic]:
    chance = np.random.default_rng(seed)
    features = {"sensors": 3, "forecaster": 3, "halver": 2}
    if key.name in features:
        return chance.normal(size=(steps, features[key.name])).astype(FEATURES)
    return chance.integers(len(models.WORDS), size=steps).astype(IDS)


def block(key: ModelKey, steps: int, seed: int = 0, returns: Returns = ALL) -> QueuedBlock:
    return rows_block(key, [steps], random_input(key, steps, seed).tobytes(), returns)


def run(engine: DeviceEngine, key: ModelKey, blocks: list[QueuedBlock]) -> list[BlockResult]:
    batch = Batch(key, blocks)
    engine.launch(batch)
    [ended] = engine.finished()
    assert ended.batch is batch and ended.finite is None and len(ended.results) == len(blocks)
    return ended.results


def assert_alike(result: BlockResult, other: BlockResult) -> None:
    """Check that two results have the same arrays with the same values."""
    assert result.steps == other.steps
    for name in ("scores", "picks", "embedding", "sequence"):
        expected, array = getattr(other, name), getattr(result, name)
        assert (array is None) == (expected is None), name
        if array is not None and expected is not None:
            assert_allclose(array, expected, atol=ROUNDING)


@pytest.mark.parametrize("key", [*HEADS, SENSORS])
def test_result_in_a_batch_is_the_output_of_the_encoder_alone(encoders: dict[ModelKey, Encoder], key: ModelKey) -> None:
    engine = DeviceEngine({key: encoders[key]}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)
    answers = run(engine, key, [block(key, steps, seed) for seed, steps in enumerate(LONGER)])
    for seed, (steps, result) in enumerate(zip(LONGER, answers, strict=True)):
        data = torch.from_numpy(random_input(key, steps, seed))
        encoding = encoders[key](inputs.ragged(data, [steps]), sequence=True)
        head = encoding.head_output
        scores, picks, embedding, sequence = (
            None if array is None else array.numpy() for array in (head.scores, head.picks, head.embedding, encoding.sequence)
        )
        assert_alike(result, BlockResult(scores, picks, embedding, sequence, np.diff(encoding.offsets).astype(COUNT).tobytes()))


@pytest.mark.parametrize("key", [*HEADS, SENSORS])
def test_block_of_many_rows_has_the_results_of_its_rows(encoders: dict[ModelKey, Encoder], key: ModelKey) -> None:
    engine = DeviceEngine({key: encoders[key]}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)
    alone = [block(key, steps, seed) for seed, steps in enumerate(LONGER)]
    together = rows_block(key, LONGER[1:], b"".join([each.columns.values for each in alone[1:]]), ALL)
    first, *expected = run(engine, key, alone)
    other, result = run(engine, key, [alone[0], together])
    scores, picks, embedding, sequence = (
        None if parts[0] is None else np.concatenate(parts) for parts in zip(*[each[:4] for each in expected], strict=True)
    )
    assert_alike(other, first)
    assert_alike(result, BlockResult(scores, picks, embedding, sequence, b"".join([each.steps for each in expected])))


def test_each_block_gets_only_the_arrays_it_returns(engine: DeviceEngine) -> None:
    options = [Returns(), Returns(embedding=True), Returns(sequence=True), Returns(embedding=True, sequence=True)]
    blocks = [block(WORDS, steps, returns=returns) for steps, returns in zip(LENGTHS, options, strict=True)]
    for steps, returns, result in zip(LENGTHS, options, run(engine, WORDS, blocks), strict=True):
        assert result.scores is not None and result.scores.shape == (1, len(models.LABELS))
        assert (result.embedding is not None) == returns.embedding
        assert (result.sequence is not None) == returns.sequence
        assert result.embedding is None or result.embedding.shape == (1, 10)
        assert result.sequence is None or result.sequence.shape == (steps, 10)


def test_results_are_float32_and_survive_the_next_batch(engine: DeviceEngine) -> None:
    [first] = run(engine, WORDS, [block(WORDS, 7, seed=1)])
    assert first.scores is not None and first.embedding is not None and first.sequence is not None
    held = (first.scores, first.embedding, first.sequence)
    copies = [array.copy() for array in held]
    run(engine, WORDS, [block(WORDS, 9, seed=2), block(WORDS, 3, seed=3)])
    assert all(array.dtype == np.float32 for array in held)
    assert all(np.array_equal(array, copy) for array, copy in zip(held, copies, strict=True))


@pytest.mark.parametrize(
    ("ids", "steps", "error"), [(b"\0", 3, ValueError), (np.array([1, len(models.WORDS)], IDS).tobytes(), 2, IndexError)]
)
def test_failed_batch_finishes_nothing_and_the_next_runs(
    engine: DeviceEngine, ids: bytes, steps: int, error: type[Exception]
) -> None:
    """Its bytes do not match its length, or an id is beyond the vocabulary."""
    good, broken = block(WORDS, 2), rows_block(WORDS, [steps], ids)
    with pytest.raises(error):
        engine.launch(Batch(WORDS, [good, broken]))
    assert engine.finished() == []
    assert len(run(engine, WORDS, [good])) == 1
    longer_than_a_batch = block(SENSORS, 50)
    [result] = run(engine, SENSORS, [longer_than_a_batch])
    assert result.sequence is not None and len(result.sequence) == 50


def test_prepared_model_is_served_until_it_is_closed(engine: DeviceEngine, encoders: dict[ModelKey, Encoder]) -> None:
    def fail() -> Encoder:
        raise ValueError("broken")

    newer, loaded = ModelKey(*WORDS.labels, 7), engine.loaded()
    with pytest.raises(ValueError, match="broken"):
        engine.prepare(fail, lambda work: work())
    assert engine.loaded() == loaded
    prepared = engine.prepare(lambda: encoders[WORDS], lambda work: work())
    assert not engine.serves(newer)
    before = engine.weight_bytes
    engine.open(newer, prepared)
    assert engine.weight_bytes == before + encoders[WORDS].weight_bytes()
    assert (engine.newest("words", "1"), engine.newest("words", "2")) == (newer, None)
    [result], [other] = run(engine, newer, [block(newer, 7)]), run(engine, WORDS, [block(WORDS, 7)])
    assert_alike(result, other)
    metrics = engine._metrics
    engine.close(newer)
    assert not engine.serves(newer) and engine.serves(WORDS)
    assert metrics.weight_bytes.values[WORDS.labels] == [encoders[WORDS].weight_bytes()], "the older version is still served"
    engine.close(WORDS)
    assert WORDS.labels not in metrics.weight_bytes.values
    engine.count_ended()
    assert WORDS.labels not in metrics.tokens.values


@pytest.mark.parametrize("key", [WORDS, SENSORS])
def test_closed_model_is_freed_without_the_garbage_collector(tmp_path: Path, key: ModelKey) -> None:
    """The collector skips the models, which exist when the heap is frozen."""
    spec = models.sensors(tmp_path) if key == SENSORS else models.OF_EVERY_HEAD[key.name](tmp_path)
    arrays = store.read_arrays(tmp_path / key.name / key.version, spec)
    gc.disable()
    try:
        engine = DeviceEngine({}, Metrics(), max_batch_sequences=8, max_batch_tokens=40)
        engine.open(key, engine.prepare(lambda: Encoder(spec, arrays, torch.device("cpu")), lambda work: work()))
        run(engine, key, [block(key, 7)])
        parameters = weakref.ref(engine._served[key].runner.encoder)
        engine.close(key)
        assert parameters() is None
    finally:
        gc.enable()


def test_loaded_reports_device_and_backends(engine: DeviceEngine) -> None:
    loaded = {model.name: model for model in engine.loaded()}
    assert list(loaded) == ["words", "sensors"]
    words, sensors = loaded["words"], loaded["sensors"]
    assert (words.name, words.version, words.device) == ("words", "1", "cpu")
    assert [line.partition(": ")[0] for line in words.backends] == ["layers.0", "layers.1"]
    assert sensors.backends == [f"layers.0: {cpu_backends('lstm')[0]}"]


def test_batches_that_end_early_leave_no_predicted_time(engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner.ModelRunner, "predicted_seconds", lambda *_: 100.0)
    for _ in range(10):
        run(engine, SENSORS, [block(SENSORS, 3)])
        assert engine.remaining_seconds == 0.0
    engine.launch(Batch(SENSORS, [block(SENSORS, 3)]))
    assert 0.0 < engine.remaining_seconds <= 100.0
    engine.finished()


def test_batch_is_counted_in_the_metrics(engine: DeviceEngine) -> None:
    metrics = engine._metrics
    run(engine, WORDS, [block(WORDS, steps) for steps in LENGTHS])
    engine.count_ended()
    assert metrics.tokens.values[WORDS.labels] == [sum(LENGTHS)]
    assert metrics.padding_avoided.values[WORDS.labels] == [max(LENGTHS) * len(LENGTHS) - sum(LENGTHS)]
    assert metrics.batch_sequences.values[WORDS.labels][-1] == len(LENGTHS)
    assert metrics.batch_tokens.values[WORDS.labels][-1] == sum(LENGTHS)
    counts = {stage: sum(values[:-1]) for (*_, stage), values in metrics.stage_seconds.values.items()}
    assert counts == dict.fromkeys(("stage_in", "device_wait", "compute", "stage_out"), len(LENGTHS)), "once per sequence"


def test_stages_of_a_batch_follow_without_a_gap(engine: DeviceEngine) -> None:
    """The batch was staged while the device still ran the previous one."""
    now = time.monotonic()
    batch = Batch(WORDS, [block(WORDS, 3), block(WORDS, 4)], formed=now - 1.0)
    arrays, on_a_gpu = BatchArrays(None, None, None, None, None, False), SimpleNamespace()
    engine._last_ended = now - 0.5
    busy_seconds = engine.busy_seconds
    in_flight = InFlightBatch(batch, np.empty(0, np.int32), arrays, 0.1, now - 0.9, now - 0.8, now - 0.7, on_a_gpu)  # type: ignore[arg-type] # nothing is read
    engine._count(in_flight, now - 0.25, now, 0.0)
    means = {stage: values[-1] / 2 for (*_, stage), values in engine._metrics.stage_seconds.values.items()}
    assert list(means) == ["stage_in", "device_wait", "compute", "stage_out"]
    assert [means[stage] for stage in ("stage_in", "device_wait", "compute")] == pytest.approx([0.2, 0.3, 0.25])
    assert means["stage_out"] >= 0.25
    assert engine.busy_seconds - busy_seconds == pytest.approx(0.25)


@pytest.mark.parametrize(
    "device, longer", [("cpu", []), ("cuda:0", [(8, 8), (8, 16), (8, 32), (8, 50)])], ids=["on a CPU", "on a GPU"]
)
def test_warm_up_runs_every_size_before_it_measures(device: str, longer: list[tuple[int, int]]) -> None:
    ran: list[tuple[int, int]] = []

    def time_batch(rows: int, steps: int) -> float:
        ran.append((rows, steps))
        return 1.0

    limits = SimpleNamespace(input=SimpleNamespace(max_steps=50))
    encoder: Any = SimpleNamespace(device=torch.device(device), spec=limits, time_batch=time_batch)
    cost = model_runner._measure_cost(encoder, rows=8, steps=4, tokens=500)
    assert cost.per_step > 0, "although longer rows took no longer"
    timed = [size for size in ((1, 4), (1, 16), (8, 4)) for _ in range(model_runner.TRIALS)]
    assert ran == [(1, 4), (2, 4), (4, 4), (8, 4), *longer, *timed], "measurements come last"


@pytest.mark.parametrize(
    ("device", "allowed", "precision"), [("cuda:0", False, "highest"), ("cuda:0", True, "high"), ("cpu", True, None)]
)
def test_tf32_of_a_gpu_is_what_the_setting_says(
    device: str, allowed: bool, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes in true float32."""
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not allowed)
    allow_tf32(torch.device(device), allowed)
    assert precisions == ([] if precision is None else [precision])
    assert torch.backends.cudnn.allow_tf32 == (allowed == (device != "cpu"))
