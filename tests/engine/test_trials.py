"""An engine's messages about the versions that it tries. The test plays the supervisor and a frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from service.engine.trials import TrialReports
from service.ipc.channel import Channel, pair
from service.ipc.messages.inference import TrialBegan, TrialEnded
from service.ipc.messages.message import Message
from service.ipc.messages.models import ModelKey

WORDS, OTHER = ModelKey("words", "1"), ModelKey("other", "1")


Ends = tuple[Channel, Callable[[], list[Message]]]


@pytest.fixture
def ends() -> Iterator[list[Ends]]:
    """Channels to two processes, and what each receives."""
    pairs = [[Channel(end) for end in pair()] for _ in range(2)]
    yield [(near, lambda far=far: [frame.message for frame in far.receive()]) for near, far in pairs]  # type: ignore[misc]
    for channel in chain(*pairs):
        channel.close()


def test_load_and_first_batch_are_announced(ends: list[Ends]) -> None:
    (supervisor, received), _ = ends
    trials = TrialReports(supervisor)
    with trials.load(WORDS):
        assert received() == [TrialBegan(WORDS)]
    assert received() == [TrialEnded(WORDS, ran=False)]
    trials.begin_batch(WORDS)
    trials.begin_batch(WORDS)
    assert received() == [TrialBegan(WORDS)]
    trials.end_batches(lambda _: True)
    assert not received(), "its batch still runs"
    trials.end_batches(lambda _: False)
    assert received() == [TrialEnded(WORDS, ran=True)]
    trials.begin_batch(WORDS)
    assert not received(), "only the first batch is a trial"


def test_load_that_raises_is_survived(ends: list[Ends]) -> None:
    (supervisor, received), _ = ends
    with pytest.raises(ValueError, match="broken"), TrialReports(supervisor).load(WORDS):
        raise ValueError("broken")
    assert received() == [TrialBegan(WORDS), TrialEnded(WORDS, ran=False)]


def test_new_frontend_learns_what_the_others_know(ends: list[Ends]) -> None:
    (supervisor, _), (frontend, known) = ends
    trials = TrialReports(supervisor)
    trials.begin_batch(WORDS)
    trials.end_batches(lambda _: False)
    trials.begin_batch(OTHER)
    trials.attach(frontend)
    assert known() == [TrialBegan(OTHER), TrialEnded(WORDS, ran=True)]
    trials.end_batches(lambda _: False)
    assert known() == [TrialEnded(OTHER, ran=True)]
    trials.detach(frontend)
    trials.begin_load(WORDS)
    assert not known()


def test_version_that_is_loaded_again_is_tried_again(ends: list[Ends]) -> None:
    (supervisor, received), _ = ends
    trials = TrialReports(supervisor)
    trials.begin_batch(WORDS)
    trials.end_batches(lambda _: False)
    trials.forget(WORDS)
    received()
    trials.begin_batch(WORDS)
    assert received() == [TrialBegan(WORDS)]
