"""Replicas over one store: random stories, and sessions that begin anew, end or are imported while something fails, in a fixed order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from service.engine.batching.taken_sessions import Waiting
from service.errors import Overloaded, ServiceError, SessionLost
from service.ipc.messages.store import SessionTaken, TakeOutcome
from tests.engine.batching.harness import BatcherHarness, FakeClient
from tests.store.story import Replica, Story

STORIES, GENTLE, EVENTS = 10, 3, 400


def tell(seed: int, events: int, folder: Path, *, gentle: bool = False, connected: bool = False) -> Counter[str]:
    """Return how often each event happened in one story."""
    story = Story(folder, random.Random(seed), gentle, connected)
    for _ in range(events):
        story.any_event()
    story.finish()
    return story.counts


def test_stories_end_well(tmp_path: Path) -> None:
    counts = sum((tell(seed, EVENTS, tmp_path / str(seed)) for seed in range(STORIES)), start=Counter[str]())
    faults = ("away", "session_lost", "session_unreachable", "lost replies", "lost results", "store process crashes")
    for event in ("answers", "taken", "held", "ended", "ends", *faults):
        assert counts[event], f"{event} never happened: {counts}"


def test_stories_of_connected_replicas_end_well(tmp_path: Path) -> None:
    counts = sum((tell(seed, EVENTS, tmp_path / str(seed), connected=True) for seed in range(STORIES)), start=Counter[str]())
    assert counts["crashes"] and counts["engine crashes"] and counts["store process crashes"] and counts["taken"]


@pytest.mark.parametrize("seed", range(GENTLE))
def test_orderly_changes_of_replicas_lose_nothing(seed: int, tmp_path: Path) -> None:
    counts = tell(seed, EVENTS, tmp_path, gentle=True)
    assert counts["ends"] and counts["taken"] and not counts["session_lost"]


class Calm(random.Random):
    """Lets no result get lost."""

    def random(self) -> float:
        return 0.99


@pytest.fixture
def story(tmp_path: Path) -> Story:
    story = Story(tmp_path, Calm(1), connected=True)
    wait(story, *story.replicas)
    return story


def wait(story: Story, *replicas: Replica) -> None:
    """Let these replicas renew their leases until the leases of the others end."""
    for _ in range(15):
        story.now += 0.4
        for replica in replicas:
            replica.renew()


def settle(story: Story, *replicas: Replica) -> None:
    for _ in range(12):
        story.now += 0.05
        for replica in replicas or story.replicas:
            replica.everything()


def send(
    story: Story, replica: Replica, ids: Sequence[int], *, starts: bool | None = None, at: int | None = None
) -> FakeClient:
    replica.set_clock()
    return replica.harness.call(ids, session="a", starts=starts, at=at)


def ask(story: Story, replica: Replica, ids: Sequence[int], *, at: int | None = None) -> float | ServiceError:
    """Send a chunk. Returns the sum of its session, or the error."""
    client = send(story, replica, ids, at=at)
    settle(story, *(other for other in story.replicas if other.running))
    return client.sums[0] if client.answers else client.errors[0]


def begin(story: Story, replica: Replica) -> None:
    """Begin a session whose sum is 12, and save it."""
    send(story, replica, [5], starts=True)
    settle(story)
    assert ask(story, replica, [7]) == 12.0


def test_refused_restart_keeps_the_session_of_another_replica(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = story.replicas
    begin(story, first)
    with monkeypatch.context() as full:
        full.setattr(second.harness.batcher.sessions._table, "_limit", 0)
        restart = send(story, second, [1], starts=True)
        settle(story)
    assert [error.code for error in restart.errors] == ["too_many_sessions"]
    assert ask(story, third, [9]) == 21.0


@pytest.mark.parametrize("replica", [0, 1])
def test_cancelled_restart_keeps_the_session(story: Story, replica: int) -> None:
    """The client leaves when the store has granted the restart."""
    begin(story, story.replicas[0])
    place = story.replicas[replica]
    restart = send(story, place, [1], starts=True)
    for _ in range(20):
        for each in story.replicas:
            each.read_notes()
            each.take_again()
            each.pass_change()
            granted = [message for message, _ in each.answers if isinstance(message, SessionTaken)]
            if [message.outcome for message in granted] == [TakeOutcome.NEW]:
                place.harness.disconnect(restart)
            each.pass_answer()
    assert not restart.answers
    assert ask(story, story.replicas[2], [9]) == 21.0


def test_copy_of_a_stopped_replica_replaces_nothing(story: Story) -> None:
    """It runs again, and a client cancels a restart there."""
    first, second, third = story.replicas
    begin(story, first)
    first.running = False
    wait(story, second, third)
    assert ask(story, second, [9], at=2) == 21.0
    first.running = True
    restart = send(story, first, [1], starts=True)
    first.pass_change()
    first.harness.disconnect(restart)
    settle(story)
    assert ask(story, third, [9]) == 30.0


def test_end_is_reported_although_its_first_report_was_lost(story: Story) -> None:
    first, second, third = story.replicas
    send(story, first, [5], starts=True)
    settle(story)
    story.crash(0)
    wait(story, second, third)
    lost = send(story, second, [7])
    second.pass_change()
    second.crash_store_process()
    second.harness.disconnect(lost)
    wait(story, second, third)
    assert isinstance(ask(story, third, [7]), SessionLost)
    assert ask(story, third, [7]) == 7.0


def test_restart_of_an_uncertain_session_makes_it_certain(story: Story) -> None:
    first, second, third = story.replicas
    begin(story, first)
    story.crash(0)
    wait(story, second, third)
    assert isinstance(ask(story, second, [9]), SessionLost)
    send(story, second, [1], starts=True)
    settle(story)
    assert ask(story, second, [2]) == 3.0


def test_imported_session_is_saved(story: Story) -> None:
    first, second, third = story.replicas
    begin(story, first)
    state = first.harness.batcher.sessions.export_state("a")
    first.harness.batcher.sessions.end("a")
    settle(story)

    def put() -> None:
        first.harness.import_state("a", state)

    def refuse(error: ServiceError) -> None:
        raise error

    assert first.stored.hold("a", Waiting(put, refuse, lambda: False, begins=True))
    settle(story)
    story.crash(0)
    wait(story, second, third)
    assert ask(story, second, [9], at=2) == 21.0


@pytest.mark.parametrize("cancelled", [True, False])
def test_end_of_a_replica_waits_for_a_restart(story: Story, cancelled: bool) -> None:
    first, second, _ = story.replicas
    begin(story, first)
    restart = send(story, first, [1], starts=True)
    assert first.stored.release_some(8) == 1
    if cancelled:
        first.harness.disconnect(restart)
    settle(story)
    for _ in range(3):
        left = first.stored.release_some(8)
        settle(story)
    assert left == 0
    assert ask(story, second, [9]) == (21.0 if cancelled else 10.0)


def test_requests_that_wait_for_the_store_are_limited() -> None:
    harness = BatcherHarness(checkpoint_chunks=1, max_waiting=300)
    clients = [harness.call([1], session=f"session {number}") for number in range(301)]
    assert not any(client.replies for client in clients[:-1])
    [error] = clients[-1].errors
    assert isinstance(error, Overloaded) and "300 requests wait for the session store" in error.message
