"""One trace at a time, of an engine that the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.engine.batching import batcher
from service.engine.batching.batcher import Batcher
from service.engine.execution.device_engine import Watcher
from service.engine.profiling import session
from service.engine.profiling.session import ProfilingSession
from service.errors import Overloaded, ServiceError, Unavailable
from service.ipc.channel import Channel, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import EngineStatus, LoadedModel, RecordTrace


class FakeRecorder:
    """Is over when the test says so."""

    fault: Exception | None = None
    late_seconds: float
    """What the pulse said while it began."""

    def __init__(self, place: int, device: str, batches: int, seconds: float) -> None:
        self.asked = place, device, batches, seconds
        self.over = False
        self.answered = 0
        self.abandoned = False
        if self.fault is not None:
            raise self.fault

    def take(self, *_: object) -> None:
        pass

    end = take

    def answer(self) -> None:
        self.answered += 1

    def stop(self) -> bytes:
        return b"[1]"

    def abandon(self) -> None:
        self.abandoned = True


class Played(Batcher):
    """An engine and its batcher in one: who watches them is kept."""

    def __init__(self) -> None:
        self.watchers: dict[str, Any] = {}

    def watch(self, watcher: batcher.Watcher | Watcher | None) -> None:
        self.watchers["both"] = watcher


class House:
    """What tracing is given, and what comes of it."""

    def __init__(self) -> None:
        self.made: list[FakeRecorder] = []
        self.heartbeat = Heartbeat()
        self.channels = [Channel(end) for end in pair()]
        self.played = Played()
        self.tracing = ProfilingSession(
            self.played, self.played, EngineStatus([LoadedModel("words", "1", "cuda:1", [], 0)], 3, "cuda:1"), self.heartbeat
        )
        self.replies: list[tuple[int, bytes]] = []
        self.refusals: list[tuple[int, ServiceError]] = []

    def record(self, *asked: Any) -> FakeRecorder:
        made = FakeRecorder(*asked)
        made.late_seconds = self.heartbeat.late_seconds()
        self.made.append(made)
        return made

    def ask(self, id: int, channel: int = 0) -> None:
        self.tracing.begin(
            (self.channels[channel], id),
            RecordTrace(batches=7, seconds=2.5),
            lambda events: self.replies.append((id, events)),
            lambda error: self.refusals.append((id, error)),
        )


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House()
    monkeypatch.setattr(session, "Recorder", made.record)
    made.heartbeat.beat()
    yield made
    made.heartbeat.close()
    for channel in made.channels:
        channel.close()


def test_it_leaves_when_it_is_whole_and_nothing_is_watched_then(house: House) -> None:
    assert not house.tracing.on
    house.ask(4)
    [recorder] = house.made
    assert recorder.asked == (3, "cuda:1", 7, 2.5)
    assert house.played.watchers["both"] == recorder.take
    house.tracing.step()
    assert house.tracing.on and not house.replies
    recorder.over = True
    house.tracing.step()
    assert house.replies == [(4, b"[1]")]
    assert recorder.answered == 2
    assert not house.tracing.on and house.played.watchers["both"] is None


def test_a_second_one_is_refused_until_the_first_has_left(house: House) -> None:
    house.ask(4)
    house.ask(5, channel=1)
    [(id, error)] = house.refusals
    assert id == 5 and isinstance(error, Overloaded)
    assert "a trace is being recorded" in error.message and error.retry_after == 1
    house.made[0].over = True
    house.tracing.step()
    house.ask(6)
    assert len(house.made) == 2


def test_a_long_standstill_is_announced_before_the_profiler_begins(house: House) -> None:
    house.ask(4)
    assert house.made[0].late_seconds < -session.STANDSTILL_SECONDS / 2
    assert house.tracing.resumed > 0


def test_who_asked_may_give_it_up(house: House) -> None:
    house.ask(4)
    house.tracing.cancel(house.channels[0], 3)
    house.tracing.cancel(house.channels[1], 4)
    house.tracing.forget(house.channels[1])
    assert house.tracing.on
    house.tracing.cancel(house.channels[0], 4)
    assert not house.tracing.on and house.made[0].abandoned and house.played.watchers["both"] is None
    house.ask(5)
    house.tracing.forget(house.channels[0])
    assert not house.tracing.on and house.made[1].abandoned
    assert not house.replies and not house.refusals


def test_what_cannot_be_recorded_is_refused_with_its_reason(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecorder, "fault", OSError("no folder"))
    house.ask(4)
    [(_, error)] = house.refusals
    assert isinstance(error, Unavailable) and "no folder" in error.message
    assert not house.tracing.on


def test_what_cannot_be_written_is_refused_with_its_reason(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: FakeRecorder) -> bytes:
        raise RuntimeError("no room")

    monkeypatch.setattr(FakeRecorder, "stop", fail)
    house.ask(4)
    house.made[0].over = True
    house.tracing.step()
    [(_, error)] = house.refusals
    assert isinstance(error, Unavailable) and "no room" in error.message
    assert not house.tracing.on
