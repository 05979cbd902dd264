"""Only a model with an answer that differs from its first answer ends the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from service.engine.execution.device import DeviceLost
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import Array
from service.engine.known_answers import CHECK_SECONDS, KnownAnswers
from service.errors import OutOfMemory
from service.ipc.messages import FEATURES, ModelKey
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests import models
from tests.engine.batching.fakes import MODEL, OTHER
from tests.engine.batching.harness import FakeEngine

KEYS = [ModelKey(name, "1") for name in models.OF_EVERY_HEAD]


class Answering(FakeEngine):
    """Returns the given answers in sequence, and then always the last answer."""

    def __init__(self, *answers: list[float]) -> None:
        super().__init__()
        self.served = [MODEL]
        self._answers = list(answers)

    def known_answer(self, key: ModelKey) -> list[Array]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [np.array(answer, FEATURES)]


@pytest.mark.parametrize("answers", [([0.5, 2.0], [0.5001, 2.0]), ([float("nan")], [float("nan")])])
def test_equal_answers_are_fine(answers: tuple[list[float], list[float]]) -> None:
    known = KnownAnswers(Answering(*answers))
    for _ in range(3):
        known.check(MODEL)


@pytest.mark.parametrize("answers", [([0.5], [0.4]), ([0.5], [float("nan")]), ([0.5], [0.5, 0.5]), ([0.5], [float("inf")])])
def test_another_answer_ends_the_engine(answers: tuple[list[float], list[float]]) -> None:
    known = KnownAnswers(Answering(*answers))
    known.check(MODEL)
    with pytest.raises(DeviceLost, match="another answer"):
        known.check(MODEL)


def test_lack_of_memory_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Answering([0.5])
    known = KnownAnswers(engine)
    known.check(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "known_answer", _without_memory)
        known.check(MODEL)
    known.check(MODEL)


def _without_memory(_: ModelKey) -> list[Array]:
    raise OutOfMemory("the device has no memory for one sequence")


def test_each_model_is_due_once_in_a_while() -> None:
    now, engine = [0.0], FakeEngine()
    known = KnownAnswers(engine, lambda: now[0])
    assert known.next_model() is None, "the first requests do not wait for a check"
    now[0] += CHECK_SECONDS
    assert {known.next_model(), known.next_model()} == {MODEL, OTHER} and known.next_model() is None
    now[0] += CHECK_SECONDS - 1
    assert known.next_model() is None
    now[0] += 1
    engine.close(OTHER)
    assert known.next_model() == MODEL and known.next_model() is None


def test_version_that_is_loaded_again_has_a_new_answer() -> None:
    now, engine = [0.0], Answering([0.5], [0.9])
    known = KnownAnswers(engine, lambda: now[0])
    known.check(MODEL)
    engine.served = [again := MODEL._replace(generation=MODEL.generation + 1)]
    now[0] += CHECK_SECONDS
    assert known.next_model() == again
    known.check(again)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKey, Encoder]:
    root = tmp_path_factory.mktemp("models")
    specs = {key: models.OF_EVERY_HEAD[key.name](root) for key in KEYS}
    return {key: _encoder(root, key, specs[key]) for key in KEYS}


def _encoder(root: Path, key: ModelKey, spec: ModelSpec, factor: float = 1.0) -> Encoder:
    arrays = store.read_arrays(root / key.name / "1", spec)
    return Encoder(spec, {name: factor * array for name, array in arrays.items()}, torch.device("cpu"))


def engine_of(encoders: dict[ModelKey, Encoder], metrics: Metrics) -> DeviceEngine:
    return DeviceEngine(encoders, metrics, max_batch_sequences=4, max_batch_tokens=64)


@pytest.mark.parametrize("key", KEYS)
def test_model_gives_its_known_answer_again(encoders: dict[ModelKey, Encoder], key: ModelKey) -> None:
    metrics = Metrics()
    engine = engine_of({key: encoders[key]}, metrics)
    before = metrics.batch_sequences.values
    first, again = engine.known_answer(key), engine.known_answer(key)
    assert first and all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert metrics.batch_sequences.values == before, "it is not counted"


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    key = ModelKey("words", "1")
    spec = models.words(tmp_path)
    sound, damaged = (engine_of({key: _encoder(tmp_path, key, spec, factor)}, Metrics()) for factor in (1.0, 0.9))
    known = KnownAnswers(sound)
    known.check(key)
    known._engine = damaged
    with pytest.raises(DeviceLost):
        known.check(key)
