"""An engine's messages about the versions that it tries. The test plays the supervisor and a frontend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.engine.trials import Trials
from service.ipc.channel import Channel, pair
from service.ipc.messages import Message, ModelKey, TrialBegan, TrialEnded

WORDS, OTHER = ModelKey("words", "1"), ModelKey("other", "1")


class Listener:
    """A process that receives the messages of the engine."""

    def __init__(self) -> None:
        near, far = pair()
        self.channel, self._end = Channel(near), Channel(far)

    def received(self) -> list[Message]:
        return [frame.message for frame in self._end.receive()]

    def close(self) -> None:
        self.channel.close()
        self._end.close()


@pytest.fixture
def supervisor() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def frontend() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def test_load_and_first_batch_are_announced(supervisor: Listener) -> None:
    trials = Trials(supervisor.channel)
    with trials.load(WORDS):
        assert supervisor.received() == [TrialBegan(WORDS)]
    assert supervisor.received() == [TrialEnded(WORDS, ran=False)]
    trials.begin_batch(WORDS)
    trials.begin_batch(WORDS)
    assert supervisor.received() == [TrialBegan(WORDS)]
    trials.end_batches(lambda _: True)
    assert not supervisor.received(), "its batch still runs"
    trials.end_batches(lambda _: False)
    assert supervisor.received() == [TrialEnded(WORDS, ran=True)]
    trials.begin_batch(WORDS)
    assert not supervisor.received(), "only the first batch is a trial"


def test_load_that_raises_is_survived(supervisor: Listener) -> None:
    with pytest.raises(ValueError, match="broken"), Trials(supervisor.channel).load(WORDS):
        raise ValueError("broken")
    assert supervisor.received() == [TrialBegan(WORDS), TrialEnded(WORDS, ran=False)]


def test_new_frontend_learns_what_the_others_know(supervisor: Listener, frontend: Listener) -> None:
    trials = Trials(supervisor.channel)
    trials.begin_batch(WORDS)
    trials.end_batches(lambda _: False)
    trials.begin_batch(OTHER)
    trials.attach(frontend.channel)
    assert frontend.received() == [TrialBegan(OTHER), TrialEnded(WORDS, ran=True)]
    trials.end_batches(lambda _: False)
    assert frontend.received() == [TrialEnded(OTHER, ran=True)]
    trials.detach(frontend.channel)
    trials.begin_load(WORDS)
    assert not frontend.received()


def test_version_that_is_loaded_again_is_tried_again(supervisor: Listener) -> None:
    trials = Trials(supervisor.channel)
    trials.begin_batch(WORDS)
    trials.end_batches(lambda _: False)
    trials.forget(WORDS)
    supervisor.received()
    trials.begin_batch(WORDS)
    assert supervisor.received() == [TrialBegan(WORDS)]
