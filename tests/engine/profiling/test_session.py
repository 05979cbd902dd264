"""Traces that frontends request, one at a time, with a recorder that the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from service.engine.profiling import session
from service.engine.profiling.session import ProfilingSession
from service.errors import Overloaded, Unavailable
from service.ipc.channel import Channel
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import EngineStatus, RecordTrace
from tests.engine.batching.harness import BatcherHarness

FIRST, SECOND = Mock(spec=Channel), Mock(spec=Channel)


class Harness(BatcherHarness):
    """A profiling session with its recorder, and its replies and refusals by id."""

    def __init__(self) -> None:
        super().__init__()
        self.heartbeat = Heartbeat()
        self.session = ProfilingSession(self.engine, self.batcher, EngineStatus([], 3, "cuda:1"), self.heartbeat)
        self.recorder = Mock(over=False, stop=Mock(return_value=b"[1]"))
        self.start = Mock(return_value=self.recorder)
        self.replies: dict[int, Any] = {}

    def request_trace(self, id: int, channel: Channel = FIRST) -> None:
        def reply(value: Any) -> None:
            self.replies[id] = value

        self.session.begin((channel, id), RecordTrace(batches=7, seconds=2.5), reply, reply)

    @property
    def watched(self) -> bool:
        assert (self.engine.observer is None) == (self.batcher._observer is None) == (not self.session.on)
        return self.session.on


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    made = Harness()
    monkeypatch.setattr(session, "BatchRecorder", made.start)
    yield made
    made.heartbeat.close()


def test_one_trace_at_a_time_is_recorded_and_sent(harness: Harness) -> None:
    """The heartbeat covers the start of the profiler."""
    harness.request_trace(4)
    harness.start.assert_called_once_with(3, "cuda:1", 7, 2.5)
    assert harness.heartbeat.late_seconds() < -session.BLOCKED_SECONDS / 2 and harness.session.resumed > 0
    harness.request_trace(5, SECOND)
    assert isinstance(harness.replies[5], Overloaded) and harness.replies[5].retry_after == 1
    harness.session.step()
    assert harness.watched and 4 not in harness.replies
    harness.recorder.over = True
    harness.session.step()
    assert harness.replies[4] == b"[1]" and not harness.watched


def test_requester_may_cancel_its_trace(harness: Harness) -> None:
    harness.request_trace(4)
    harness.session.cancel(FIRST, 3)
    harness.session.cancel(SECOND, 4)
    harness.session.forget(SECOND)
    assert harness.watched
    harness.session.cancel(FIRST, 4)
    assert not harness.watched and harness.recorder.abandon.call_count == 1
    harness.request_trace(5)
    harness.session.forget(FIRST)
    assert not harness.watched and harness.recorder.abandon.call_count == 2 and not harness.replies


@pytest.mark.parametrize("starts", [False, True])
def test_trace_that_fails_is_refused_with_its_reason(harness: Harness, starts: bool) -> None:
    (harness.recorder.stop if starts else harness.start).side_effect = OSError("no room")
    harness.recorder.over = True
    harness.request_trace(4)
    harness.session.step()
    assert isinstance(harness.replies[4], Unavailable) and "no room" in harness.replies[4].message
    assert not harness.watched
