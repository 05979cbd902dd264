"""One device: turns in, encodings out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from service.engine.batch import Batch, Chunk
from service.engine.execution import model_runner
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import ChunkResult
from service.ipc.messages import FEATURES, IDS, ModelKey, Returns
from service.metrics import Counter, Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models
from tests.kernels import inputs

WORDS, SENSORS = ModelKey("words", "1"), ModelKey("sensors", "1")
HEADS = [ModelKey(name, "1") for name in models.OF_EVERY_HEAD]
TAGGER, HALVER, EMBEDDER = ModelKey("tagger", "1"), ModelKey("halver", "1"), ModelKey("embedder", "1")
LENGTHS = [7, 1, 13, 4]
LONGER = [7, 3, 13, 4]
"""As long as every model needs."""
ROUNDING = 1e-5
ALL = Returns(embedding=True, sequence=True)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKey, Encoder]:
    root = tmp_path_factory.mktemp("models")
    specs = {key: models.OF_EVERY_HEAD[key.name](root) for key in HEADS} | {SENSORS: models.sensors(root, max_steps=50)}
    return {
        key: Encoder(spec, store.read_arrays(root / key.name / key.version, spec), torch.device("cpu"), 1 << 20)
        for key, spec in specs.items()
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def engine(encoders: dict[ModelKey, Encoder], metrics: Metrics) -> DeviceEngine:
    return DeviceEngine(encoders, metrics, max_batch_sequences=8, max_batch_tokens=40)


def made_up(key: ModelKey, steps: int, seed: int) -> NDArray[np.generic]:
    chance = np.random.default_rng(seed)
    features = {"sensors": 3, "forecaster": 3, "halver": 2}
    if key.name in features:
        return chance.normal(size=(steps, features[key.name])).astype(FEATURES)
    return chance.integers(len(models.WORDS), size=steps).astype(IDS)


def chunk(key: ModelKey, steps: int, seed: int = 0, returns: Returns = ALL) -> Chunk:
    return Chunk(made_up(key, steps, seed).tobytes(), steps, returns, None)


def run(engine: DeviceEngine, key: ModelKey, chunks: list[Chunk]) -> list[ChunkResult]:
    engine.launch(Batch(key, chunks))
    done = engine.finished()
    assert [finished for finished, _ in done] == chunks
    return [encoded for _, encoded in done]


def assert_alike(mine: ChunkResult, other: ChunkResult) -> None:
    """What one has the other has too, with the same values."""
    assert mine.steps == other.steps
    for name in ("scores", "picks", "embedding", "sequence"):
        one, two = getattr(mine, name), getattr(other, name)
        assert (one is None) == (two is None), name
        if one is not None:
            assert_allclose(one, two, atol=ROUNDING)


@pytest.mark.parametrize("key", [*HEADS, SENSORS])
def test_a_row_is_answered_the_same_alone_and_in_a_batch(engine: DeviceEngine, key: ModelKey) -> None:
    chunks = [chunk(key, steps, seed) for seed, steps in enumerate(LONGER)]
    for one, mine in zip(chunks, run(engine, key, chunks), strict=True):
        [alone] = run(engine, key, [one])
        assert_alike(mine, alone)


@pytest.mark.parametrize("key", [*HEADS, SENSORS])
def test_an_answer_is_what_the_encoder_gives(engine: DeviceEngine, encoders: dict[ModelKey, Encoder], key: ModelKey) -> None:
    answers = run(engine, key, [chunk(key, steps, seed) for seed, steps in enumerate(LONGER)])
    for seed, (steps, mine) in enumerate(zip(LONGER, answers, strict=True)):
        data = torch.from_numpy(made_up(key, steps, seed))
        given = encoders[key](inputs.ragged(data, [steps]), sequence=True)
        verdict = given.verdict
        scores, picks, embedding, sequence = (
            None if array is None else array.numpy()
            for array in (verdict.scores, verdict.picks, verdict.embedding, given.sequence)
        )
        assert_alike(mine, ChunkResult(scores, picks, embedding, sequence, steps=int(given.offsets[-1])))


def test_words_and_sensors_have_scores_embedding_and_sequence_and_pick_nothing(engine: DeviceEngine) -> None:
    for key, width in ((WORDS, 10), (SENSORS, 8)):
        [mine] = run(engine, key, [chunk(key, 7)])
        assert mine.picks is None and mine.steps == 7
        assert mine.scores is not None and mine.scores.shape == (1, len(models.LABELS))
        assert mine.embedding is not None and mine.embedding.shape == (1, width)
        assert mine.sequence is not None and mine.sequence.shape == (7, width)


def test_a_head_of_steps_gives_each_chunk_the_lines_of_its_own_steps(engine: DeviceEngine) -> None:
    for steps, mine in zip(LENGTHS, run(engine, TAGGER, [chunk(TAGGER, steps) for steps in LENGTHS]), strict=True):
        assert mine.scores is not None and mine.picks is not None and mine.embedding is None
        assert mine.scores.shape == mine.picks.shape == (steps, 1)
        assert mine.scores.dtype == np.dtype(FEATURES) and mine.picks.dtype == np.dtype(IDS)


def test_a_strided_model_gives_each_chunk_the_steps_that_came_out_of_it(engine: DeviceEngine) -> None:
    for steps, mine in zip(LONGER, run(engine, HALVER, [chunk(HALVER, steps) for steps in LONGER]), strict=True):
        assert mine.steps == (steps - 1) // 2
        assert mine.sequence is not None and mine.sequence.shape == (mine.steps, 5)
        assert mine.scores is None and mine.picks is None and mine.embedding is None


def test_a_model_without_steps_gives_none_whoever_asks(engine: DeviceEngine) -> None:
    for mine in run(engine, EMBEDDER, [chunk(EMBEDDER, steps) for steps in LONGER]):
        assert mine.sequence is None
        assert mine.embedding is not None and mine.embedding.shape == (1, 8)


def test_what_one_chunk_asks_for_no_other_gets(engine: DeviceEngine) -> None:
    options = [Returns(), Returns(embedding=True), Returns(sequence=True), Returns(embedding=True, sequence=True)]
    chunks = [chunk(WORDS, steps, returns=returns) for steps, returns in zip(LENGTHS, options, strict=True)]
    for steps, wish, mine in zip(LENGTHS, options, run(engine, WORDS, chunks), strict=True):
        assert mine.scores is not None and mine.scores.shape == (1, len(models.LABELS))
        assert (mine.embedding is not None) == wish.embedding
        assert (mine.sequence is not None) == wish.sequence
        assert mine.embedding is None or mine.embedding.shape == (1, 10)
        assert mine.sequence is None or mine.sequence.shape == (steps, 10)


def test_answers_are_float32_and_stay_as_they_are_when_the_next_turn_runs(engine: DeviceEngine) -> None:
    [first] = run(engine, WORDS, [chunk(WORDS, 7, seed=1)])
    assert first.scores is not None and first.embedding is not None and first.sequence is not None
    held = (first.scores, first.embedding, first.sequence)
    copies = [array.copy() for array in held]
    run(engine, WORDS, [chunk(WORDS, 9, seed=2), chunk(WORDS, 3, seed=3)])
    assert all(array.dtype == np.float32 for array in held)
    assert all(np.array_equal(array, copy) for array, copy in zip(held, copies, strict=True))


def test_finished_says_each_chunk_once(engine: DeviceEngine) -> None:
    first, second = chunk(WORDS, 2), chunk(SENSORS, 3)
    engine.launch(Batch(WORDS, [first]))
    engine.launch(Batch(SENSORS, [second]))
    assert [done for done, _ in engine.finished()] == [first, second]
    assert engine.finished() == []


def test_of_a_turn_that_raises_nothing_is_finished_and_the_next_one_runs(engine: DeviceEngine) -> None:
    good, broken = chunk(WORDS, 2), Chunk(b"\0", 3, Returns(), None)
    with pytest.raises(ValueError, match="different"):
        engine.launch(Batch(WORDS, [good, broken]))
    assert engine.finished() == []
    assert len(run(engine, WORDS, [good])) == 1


def test_an_id_out_of_the_vocabulary_raises_and_the_next_turn_runs(engine: DeviceEngine) -> None:
    beyond = Chunk(np.array([1, len(models.WORDS)], IDS).tobytes(), 2, Returns(), None)
    with pytest.raises(IndexError):
        engine.launch(Batch(WORDS, [beyond]))
    assert engine.finished() == []
    assert len(run(engine, WORDS, [chunk(WORDS, 2)])) == 1


def test_a_sequence_longer_than_a_turn_runs_alone(engine: DeviceEngine, encoders: dict[ModelKey, Encoder]) -> None:
    steps = encoders[SENSORS].spec.input.max_steps
    assert steps > 40
    [mine] = run(engine, SENSORS, [chunk(SENSORS, steps)])
    assert mine.sequence is not None and len(mine.sequence) == steps


def test_only_what_is_loaded_is_served(engine: DeviceEngine) -> None:
    assert engine.serves(WORDS) and engine.serves(SENSORS)
    assert not engine.serves(ModelKey("words", "2"))


def test_a_model_is_made_ready_beside_others_and_then_served_until_it_is_closed(
    engine: DeviceEngine, encoders: dict[ModelKey, Encoder], metrics: Metrics
) -> None:
    newer = ModelKey(*WORDS.labels, 7)
    prepared = engine.prepared(lambda: encoders[WORDS], lambda work: work())
    assert not engine.serves(newer)
    before = engine.weight_bytes
    engine.open(newer, prepared)
    assert engine.weight_bytes == before + encoders[WORDS].weight_bytes()
    assert (engine.newest("words", "1"), engine.newest("words", "2")) == (newer, None)
    [mine], [other] = run(engine, newer, [chunk(newer, 7)]), run(engine, WORDS, [chunk(WORDS, 7)])
    assert_alike(mine, other)
    engine.close(newer)
    assert not engine.serves(newer) and engine.serves(WORDS)
    assert metrics.weight_bytes.values[WORDS.labels] == [encoders[WORDS].weight_bytes()], "the older one is still served"
    engine.close(WORDS)
    assert WORDS.labels not in metrics.weight_bytes.values


def test_what_cannot_be_made_ready_changes_nothing(engine: DeviceEngine) -> None:
    def fail() -> Encoder:
        raise ValueError("broken")

    before = engine.loaded()
    with pytest.raises(ValueError, match="broken"):
        engine.prepared(fail, lambda work: work())
    assert engine.loaded() == before


def test_what_is_loaded_says_device_backends_and_bytes(engine: DeviceEngine, encoders: dict[ModelKey, Encoder]) -> None:
    loaded = {one.name: one for one in engine.loaded()}
    assert list(loaded) == [key.name for key in encoders]
    words, sensors = loaded["words"], loaded["sensors"]
    assert (words.name, words.version, words.device) == ("words", "1", "cpu")
    assert words.weight_bytes == encoders[WORDS].weight_bytes() > 0
    assert [line.partition(": ")[0] for line in words.backends] == ["layers.0", "layers.1"]
    assert sensors.backends == ["layers.0: framework"]


def test_a_longer_turn_is_predicted_to_take_longer(engine: DeviceEngine) -> None:
    short, long = Batch(WORDS, [chunk(WORDS, 1)]), Batch(WORDS, [chunk(WORDS, 20)] * 8)
    assert 0 < engine.predicted_seconds(short) < engine.predicted_seconds(long)


def test_a_turn_is_counted(engine: DeviceEngine, metrics: Metrics) -> None:
    run(engine, WORDS, [chunk(WORDS, steps) for steps in LENGTHS])
    assert count(metrics.tokens) == sum(LENGTHS)
    assert count(metrics.padding_avoided) == max(LENGTHS) * len(LENGTHS) - sum(LENGTHS)
    assert metrics.batch_sequences.values[WORDS.labels][-1] == len(LENGTHS)
    assert metrics.batch_tokens.values[WORDS.labels][-1] == sum(LENGTHS)
    assert {stage for *_, stage in metrics.stage_seconds.values} == {"stage_in", "compute", "stage_out"}


def count(counter: Counter) -> float:
    return counter.values[WORDS.labels][0]


@pytest.mark.parametrize(
    "device, longer", [("cpu", []), ("cuda:0", [(8, 8), (8, 16), (8, 32), (8, 50)])], ids=["on a CPU", "on a GPU"]
)
def test_where_kernels_are_compiled_for_sizes_every_size_of_a_turn_is_tried_before(
    device: str, longer: list[tuple[int, int]]
) -> None:
    tried: list[tuple[int, int]] = []

    def trial(rows: int, steps: int) -> float:
        tried.append((rows, steps))
        return 1.0

    limits = SimpleNamespace(input=SimpleNamespace(max_steps=50))
    encoder: Any = SimpleNamespace(device=torch.device(device), spec=limits, trial=trial)
    model_runner._measured(encoder, rows=8, steps=4, tokens=500)
    timed = [size for size in ((1, 4), (1, 16), (8, 4)) for _ in range(model_runner.TRIALS)]
    assert tried == [(1, 4), (2, 4), (4, 4), (8, 4), *longer, *timed], "what is timed, last"
