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
    """Is complete when the test sets `over`. Starting or stopping raises the error that the test sets."""

    error: Exception | None = None
    made: list[FakeRecorder]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.over = self.abandoned = False
        self._raise()
        self.made.append(self)

    def launching(self, *_: object) -> None: ...

    def ended(self, *_: object) -> None: ...

    def replied(self) -> None: ...

    def stop(self) -> bytes:
        self._raise()
        return b"[1]"

    def abandon(self) -> None:
        self.abandoned = True

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class TracingHarness(BatcherHarness):
    """A profiling session with its collaborators, and the replies that it sent."""

    def __init__(self) -> None:
        super().__init__()
        self.heartbeat = Heartbeat()
        self.channels = [Channel(end) for end in pair()]
        status = EngineStatus([LoadedModel("words", "1", "cuda:1", [])], 3, "cuda:1")
        self.session = ProfilingSession(self.engine, self.batcher, status, self.heartbeat)
        self.replies: list[tuple[int, bytes]] = []
        self.refusals: list[tuple[int, ServiceError]] = []

    def request_trace(self, id: int, channel: int = 0) -> None:
        self.session.begin(
            (self.channels[channel], id),
            RecordTrace(batches=7, seconds=2.5),
            lambda events: self.replies.append((id, events)),
            lambda error: self.refusals.append((id, error)),
        )

    @property
    def watched(self) -> bool:
        assert (self.engine.observer is None) == (self.batcher._observer is None)
        return self.engine.observer is not None


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracingHarness]:
    made = TracingHarness()
    FakeRecorder.made = []
    monkeypatch.setattr(session, "BatchRecorder", FakeRecorder)
    yield made
    made.heartbeat.close()
    for channel in made.channels:
        channel.close()


def test_one_trace_at_a_time_is_recorded_and_sent(harness: TracingHarness) -> None:
    """The heartbeat covers the start of the profiler."""
    harness.request_trace(4)
    [recorder] = FakeRecorder.made
    assert recorder.arguments == (3, "cuda:1", 7, 2.5) and harness.watched
    assert harness.heartbeat.late_seconds() < -session.BLOCKED_SECONDS / 2 and harness.session.resumed > 0
    harness.request_trace(5, channel=1)
    [(id, error)] = harness.refusals
    assert id == 5 and isinstance(error, Overloaded) and error.retry_after == 1
    harness.session.step()
    assert harness.session.on and not harness.replies
    recorder.over = True
    harness.session.step()
    assert harness.replies == [(4, b"[1]")] and not harness.session.on and not harness.watched
    harness.request_trace(6)
    assert len(FakeRecorder.made) == 2


def test_requester_may_cancel_its_trace(harness: TracingHarness) -> None:
    harness.request_trace(4)
    harness.session.cancel(harness.channels[0], 3)
    harness.session.cancel(harness.channels[1], 4)
    harness.session.forget(harness.channels[1])
    assert harness.session.on
    harness.session.cancel(harness.channels[0], 4)
    assert not harness.session.on and not harness.watched
    harness.request_trace(5)
    harness.session.forget(harness.channels[0])
    assert not harness.session.on and [recorder.abandoned for recorder in FakeRecorder.made] == [True, True]
    assert not harness.replies and not harness.refusals


@pytest.mark.parametrize("starts", [False, True])
def test_trace_that_fails_is_refused_with_its_reason(
    harness: TracingHarness, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    if starts:
        harness.request_trace(4)
        FakeRecorder.made[0].over = True
    monkeypatch.setattr(FakeRecorder, "error", OSError("no room"))
    if starts:
        harness.session.step()
    else:
        harness.request_trace(4)
    [(_, error)] = harness.refusals
    assert isinstance(error, Unavailable) and "no room" in error.message
    assert not harness.session.on
