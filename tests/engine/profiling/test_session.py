"""Traces that frontends request, one at a time, with a fake recorder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.engine.profiling import session
from service.engine.profiling.session import ProfilingSession
from service.errors import Overloaded, ServiceError, Unavailable
from service.ipc.channel import Channel, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import EngineStatus, LoadedModel, RecordTrace
from tests.engine.batching.harness import BatcherHarness


class FakeRecorder:
    """Is complete when the test sets `over`."""

    error: Exception | None = None
    late_seconds: float
    """Lateness of the heartbeat when the recorder started."""

    def __init__(self, place: int, device: str, batches: int, seconds: float) -> None:
        self.arguments = place, device, batches, seconds
        self.over = False
        self.replies = 0
        self.abandoned = False
        if self.error is not None:
            raise self.error

    def launching(self, *_: object) -> None:
        pass

    def ended(self, *_: object) -> None:
        pass

    def replied(self) -> None:
        self.replies += 1

    def stop(self) -> bytes:
        return b"[1]"

    def abandon(self) -> None:
        self.abandoned = True


class TracingHarness:
    """A profiling session with its collaborators, and the replies that it sent."""

    def __init__(self) -> None:
        self.recorders: list[FakeRecorder] = []
        self.heartbeat = Heartbeat()
        self.channels = [Channel(end) for end in pair()]
        batching = BatcherHarness()
        self.engine, self.batcher = batching.engine, batching.batcher
        status = EngineStatus([LoadedModel("words", "1", "cuda:1", [])], 3, "cuda:1")
        self.session = ProfilingSession(self.engine, self.batcher, status, self.heartbeat)
        self.replies: list[tuple[int, bytes]] = []
        self.refusals: list[tuple[int, ServiceError]] = []

    def record(self, *arguments: Any) -> FakeRecorder:
        made = FakeRecorder(*arguments)
        made.late_seconds = self.heartbeat.late_seconds()
        self.recorders.append(made)
        return made

    def request_trace(self, id: int, channel: int = 0) -> None:
        self.session.begin(
            (self.channels[channel], id),
            RecordTrace(batches=7, seconds=2.5),
            lambda events: self.replies.append((id, events)),
            lambda error: self.refusals.append((id, error)),
        )


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracingHarness]:
    made = TracingHarness()
    monkeypatch.setattr(session, "BatchRecorder", made.record)
    made.heartbeat.beat()
    yield made
    made.heartbeat.close()
    for channel in made.channels:
        channel.close()


def test_complete_trace_is_sent_and_observers_are_removed(harness: TracingHarness) -> None:
    assert not harness.session.on
    harness.request_trace(4)
    [recorder] = harness.recorders
    assert recorder.arguments == (3, "cuda:1", 7, 2.5)
    assert (harness.engine.observer, harness.batcher._observer) == (recorder.ended, recorder.launching)
    harness.session.step()
    assert harness.session.on and not harness.replies
    recorder.over = True
    harness.session.step()
    assert harness.replies == [(4, b"[1]")]
    assert recorder.replies == 2
    assert not harness.session.on and harness.engine.observer is harness.batcher._observer is None


def test_second_trace_is_refused_while_one_is_recorded(harness: TracingHarness) -> None:
    harness.request_trace(4)
    harness.request_trace(5, channel=1)
    [(id, error)] = harness.refusals
    assert id == 5 and isinstance(error, Overloaded)
    assert "a trace is being recorded" in error.message and error.retry_after == 1
    harness.recorders[0].over = True
    harness.session.step()
    harness.request_trace(6)
    assert len(harness.recorders) == 2


def test_heartbeat_covers_the_start_of_the_profiler(harness: TracingHarness) -> None:
    harness.request_trace(4)
    assert harness.recorders[0].late_seconds < -session.BLOCKED_SECONDS / 2
    assert harness.session.resumed > 0


def test_requester_may_cancel_its_trace(harness: TracingHarness) -> None:
    harness.request_trace(4)
    harness.session.cancel(harness.channels[0], 3)
    harness.session.cancel(harness.channels[1], 4)
    harness.session.forget(harness.channels[1])
    assert harness.session.on
    harness.session.cancel(harness.channels[0], 4)
    assert (
        not harness.session.on
        and harness.recorders[0].abandoned
        and harness.engine.observer is harness.batcher._observer is None
    )
    harness.request_trace(5)
    harness.session.forget(harness.channels[0])
    assert not harness.session.on and harness.recorders[1].abandoned
    assert not harness.replies and not harness.refusals


def test_trace_that_cannot_start_is_refused_with_its_reason(harness: TracingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRecorder, "error", OSError("no folder"))
    harness.request_trace(4)
    [(_, error)] = harness.refusals
    assert isinstance(error, Unavailable) and "no folder" in error.message
    assert not harness.session.on


def test_trace_that_cannot_be_exported_is_refused(harness: TracingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: FakeRecorder) -> bytes:
        raise RuntimeError("no room")

    monkeypatch.setattr(FakeRecorder, "stop", fail)
    harness.request_trace(4)
    harness.recorders[0].over = True
    harness.session.step()
    [(_, error)] = harness.refusals
    assert isinstance(error, Unavailable) and "no room" in error.message
    assert not harness.session.on
