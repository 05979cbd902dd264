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
from service.ipc.messages.inference import FEATURES
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics
from service.modeling import store
from service.modeling.encoder import Encoder
from tests import models
from tests.clock import Clock
from tests.engine.batching.harness import MODEL, OTHER, FakeEngine


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
    def without_memory(_: ModelKey) -> list[Array]:
        raise OutOfMemory("the device has no memory for one sequence")

    engine = Answering([0.5])
    known = KnownAnswers(engine)
    known.check(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "known_answer", without_memory)
        known.check(MODEL)
    known.check(MODEL)


def test_each_model_is_due_once_in_a_while() -> None:
    clock, engine = Clock(), FakeEngine()
    known = KnownAnswers(engine, clock)
    assert known.next_model() is None, "the first requests do not wait for a check"
    clock.now += CHECK_SECONDS
    assert {known.next_model(), known.next_model()} == {MODEL, OTHER} and known.next_model() is None
    clock.now += CHECK_SECONDS - 1
    assert known.next_model() is None
    clock.now += 1
    engine.close(OTHER)
    assert known.next_model() == MODEL and known.next_model() is None


def test_version_that_is_loaded_again_has_a_new_answer() -> None:
    clock, engine = Clock(), Answering([0.5], [0.9])
    known = KnownAnswers(engine, clock)
    known.check(MODEL)
    engine.served = [again := MODEL._replace(generation=MODEL.generation + 1)]
    clock.now += CHECK_SECONDS
    assert known.next_model() == again
    known.check(again)


@pytest.mark.parametrize("name", models.OF_EVERY_HEAD)
def test_damaged_weights_are_found(tmp_path: Path, name: str) -> None:
    """A model with other weights gives another answer, and the same answer again otherwise. It is not counted."""
    key, spec = ModelKey(name, "1"), models.OF_EVERY_HEAD[name](tmp_path)
    arrays, metrics = store.read_arrays(tmp_path / name / "1", spec), Metrics()

    def engine(factor: float) -> DeviceEngine:
        encoder = Encoder(spec, {name: factor * array for name, array in arrays.items()}, torch.device("cpu"))
        return DeviceEngine({key: encoder}, metrics, max_batch_sequences=4, max_batch_tokens=64)

    known = KnownAnswers(engine(1.0))
    known.check(key)
    known.check(key)
    assert not metrics.batch_sequences.values
    known._engine = engine(0.5)
    with pytest.raises(DeviceLost):
        known.check(key)
