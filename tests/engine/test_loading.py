"""Versions of an engine that come and go: what is refused, and what has to have ended before one goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from service.engine.execution.cuda_graph_runner import Between
from service.engine.execution.device_engine import Prepared
from service.engine.loading import CLOSING_SECONDS, LOOK_SECONDS, ModelLoader
from service.errors import InvalidModel, ModelError, NoRoom, ServiceError, SessionLost
from service.ipc.messages import CloseModel, ModelKey, ModelVersion
from service.log import Log
from tests.engine.batching.fakes import MODEL
from tests.engine.batching.harness import House
from tests.engine.test_loader_thread import readable

NEW = ModelVersion("words", "1", 7, "/models/words/1", "{}")
FRONT, OTHER_FRONT = "a channel", "another channel"


class Shelf:
    """An engine that says what was opened and closed, and a clock that the test turns."""

    def __init__(self, load: Callable[[ModelVersion, Between], Prepared] = lambda *_: Prepared(None)) -> None:  # type: ignore[arg-type]
        self.house = House()
        self.opened: list[ModelKey] = []
        self.closed: list[ModelKey] = []
        self.told: list[ServiceError | None] = []
        self.changes = 0
        self.models = ModelLoader(self, self.house.batcher, load, Log("engine-0"), lambda: self.house.now)
        self.models.changed = self._count

    def open(self, key: ModelKey, prepared: Prepared) -> None:
        self.opened.append(key)

    def close(self, key: ModelKey) -> None:
        self.closed.append(key)

    def serves(self, key: ModelKey) -> bool:
        return key not in self.closed

    def prepared(self) -> ServiceError | None:
        """What comes of NEW."""
        self.models.prepare(NEW, self.told.append)
        while not self.told:
            readable(self.models)
            self.models.settle()
        return self.told.pop()

    def leave(self, seconds: float, *channels: str) -> None:
        """MODEL is served no more, and these channels have not said so yet."""
        self.models.close(CloseModel(MODEL, seconds), set(channels), lambda: None)

    def wait(self, seconds: float = LOOK_SECONDS) -> None:
        self.house.now += seconds
        self.models.settle()

    def _count(self) -> None:
        self.changes += 1


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    yield Shelf()


def test_what_is_ready_is_served_and_all_are_told(shelf: Shelf) -> None:
    assert shelf.prepared() is None
    assert (shelf.opened, shelf.changes) == ([NEW.key], 1)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (ModelError("weights.safetensors is broken"), InvalidModel, "weights.safetensors is broken"),
        (ValueError("no such layer"), InvalidModel, "/models/words/1 cannot be served: ValueError: no such layer"),
        (MemoryError(), NoRoom, "there is no memory for words version 1 beside what is served"),
        (torch.OutOfMemoryError("2 GiB"), NoRoom, "there is no memory for words version 1"),
        (NoRoom("5 bytes are left"), NoRoom, "5 bytes are left"),
    ],
)
def test_what_cannot_be_made_ready_is_refused_with_the_reason(fault: Exception, kind: type[ServiceError], said: str) -> None:
    def fail(model_version: ModelVersion, between_batches: Between) -> Prepared:
        raise fault

    shelf = Shelf(fail)
    refusal = shelf.prepared()
    assert type(refusal) is kind
    assert said in str(refusal)
    assert (shelf.opened, shelf.changes) == ([], 0)


def test_a_version_goes_when_no_front_may_bring_anything_for_it(shelf: Shelf) -> None:
    shelf.models.release(FRONT, MODEL)
    shelf.leave(30.0, FRONT, OTHER_FRONT)
    shelf.wait()
    assert not shelf.closed
    shelf.models.release(OTHER_FRONT, MODEL)
    shelf.wait()
    assert (shelf.closed, shelf.changes) == ([MODEL], 1)


def test_a_front_that_has_gone_or_never_had_it_is_not_waited_for(shelf: Shelf) -> None:
    shelf.leave(30.0, FRONT)
    shelf.models.forget(FRONT)
    shelf.wait()
    assert shelf.closed == [MODEL]
    other = Shelf()
    other.leave(30.0, FRONT)
    other.wait(CLOSING_SECONDS)
    assert other.closed == [MODEL]


def test_a_version_stays_until_what_waits_for_it_was_answered(shelf: Shelf) -> None:
    shelf.house.call([1, 2])
    shelf.leave(0.0)
    shelf.wait()
    assert not shelf.closed
    shelf.house.batcher.step()
    shelf.house.batcher.step()
    shelf.wait()
    assert shelf.closed == [MODEL]


def test_a_version_stays_for_its_sessions_but_not_for_longer_than_it_was_said(shelf: Shelf) -> None:
    shelf.house.call([1, 2], session="s")
    shelf.house.batcher.step()
    shelf.leave(5.0)
    shelf.wait(4.0)
    assert not shelf.closed
    shelf.wait(1.5)
    assert shelf.closed == [MODEL]
    [told] = shelf.house.call([1], session="s").errors
    assert isinstance(told, SessionLost)


def test_what_is_ready_when_nobody_wants_it_any_more_is_not_served(shelf: Shelf) -> None:
    shelf.closed.append(NEW.key)
    shelf.models.close(CloseModel(NEW.key, 0.0), {FRONT}, lambda: None)
    assert shelf.prepared() is None
    assert (shelf.opened, shelf.changes) == ([], 0)


def test_what_was_never_served_is_gone_at_once(shelf: Shelf) -> None:
    gone: list[bool] = []
    shelf.closed.append(MODEL)
    shelf.models.close(CloseModel(MODEL, 30.0), {FRONT}, lambda: gone.append(True))
    assert gone == [True]
