"""The named cases of docs/decisions/moving-sessions.md, one message at a time. test_story.py mixes them at random."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from service.ipc import messages
from service.ipc.messages import Message
from tests.engine.batching.harness import FakeClient
from tests.mover.story import Replica, Story

A, B, C = 0, 1, 2
NAME = "a"


def work(story: Story) -> None:
    """Let every replica work as far as it can without messages of others."""
    for _ in range(20):
        for replica in story.replicas:
            replica.pass_local()
            replica.step()


def deliver(story: Story, kind: type[Message], receiver: int) -> None:
    """Deliver the oldest message of a kind to a replica, and let the replicas work."""
    found = [
        index
        for index, packet in enumerate(story.network)
        if type(packet.message) is kind and packet.receiver == story.replicas[receiver].id
    ]
    assert found, f"no {kind.__name__} is on its way to {receiver}: {story.network}"
    story.deliver(found[0])
    work(story)


def lose_all(story: Story) -> None:
    story.network.clear()


def settle(story: Story) -> None:
    """Deliver everything, in its order."""
    for _ in range(60):
        story.deliver(0)
        work(story)
        story.time_passes(0.001)


def held_by(place: int) -> Story:
    """Return a story whose session has one chunk, with the sum 1, at a replica."""
    story = Story()
    story.chunk(NAME, place, [1], says_steps=False)
    settle(story)
    assert story.replicas[place].serves(NAME)
    return story


def ask(replica: Replica, *values: int, starts: bool | None = False, at: int | None = None) -> FakeClient:
    """Send a chunk by a second client."""
    return replica.harness.call(values, session=NAME, starts=starts, at=at)


def ask_and_settle(story: Story, place: int, *values: int) -> FakeClient:
    """Send a chunk to a replica, and let all its consequences happen."""
    client = ask(story.replicas[place], *values)
    work(story)
    settle(story)
    return client


def code(client: FakeClient) -> str:
    [error] = client.errors
    return error.code


def taken(story: Story, taker: int, giver: int) -> FakeClient:
    """Send a chunk to the taker, up to the moment at which the state is on its way. Return its client."""
    client = ask(story.replicas[taker], 2)
    work(story)
    deliver(story, messages.TakeSession, giver)
    return client


def test_chunk_fetches_its_session_in_one_round_trip() -> None:
    story = held_by(B)
    client = taken(story, A, B)
    deliver(story, messages.SessionGiven, A)
    assert client.sums == [3.0], "nothing but the reply of the owner was needed"
    assert story.replicas[A].serves(NAME) and not story.replicas[B].serves(NAME)


def test_giver_does_not_serve_while_the_state_is_on_its_way() -> None:
    story = held_by(B)
    first = taken(story, A, B)
    second = ask(story.replicas[B], 3)
    work(story)
    deliver(story, messages.AskTicket, A)
    deliver(story, messages.TicketReport, B)  # the claim is pending
    assert not second.replies and not story.replicas[B].serves(NAME)
    settle(story)
    assert first.sums == [3.0] and second.sums == [6.0]


def test_giver_serves_again_when_its_reply_was_lost() -> None:
    story = held_by(B)
    first = taken(story, A, B)
    lose_all(story)
    story.time_passes(2.5)
    work(story)
    settle(story)
    assert code(first) == "session_unreachable"
    second = ask_and_settle(story, B, 3)
    assert second.sums == [4.0]


def test_late_state_counts_for_nothing() -> None:
    story = held_by(B)
    taken(story, A, B)
    [late] = [packet for packet in story.network if type(packet.message) is messages.SessionGiven]
    lose_all(story)
    story.time_passes(2.5)
    settle(story)
    second = ask_and_settle(story, B, 3)
    assert second.sums == [4.0]
    story.network.append(late)
    settle(story)
    assert story.replicas[B].serves(NAME) and not story.replicas[A].serves(NAME)


def test_lost_confirmation_is_asked_for() -> None:
    story = held_by(B)
    taken(story, A, B)
    deliver(story, messages.SessionGiven, A)
    lose_all(story)
    story.time_passes(1.5)
    settle(story)
    assert not story.replicas[B].transfers._moves.departures
    client = ask_and_settle(story, B, 3)
    assert client.sums == [6.0]


def test_stopped_taker_leaves_the_session_to_nobody_until_it_continues() -> None:
    story = held_by(B)
    first = taken(story, A, B)
    story.toggle_pause(A)
    second = ask(story.replicas[B], 3)
    work(story)
    assert code(second) == "session_unreachable"
    assert not any(replica.serves(NAME) for replica in story.replicas)
    story.toggle_pause(A)
    settle(story)
    assert first.sums == [3.0]


def test_taker_that_ends_before_it_confirms_loses_the_session() -> None:
    """It may have answered chunks. Only a client without such an answer continues from the state at the giver."""
    story = held_by(B)
    first = taken(story, A, B)
    deliver(story, messages.SessionGiven, A)
    assert first.sums == [3.0]
    lose_all(story)
    story.crash(A)
    for replica in story.replicas:
        story.learn_all(replica)
    story.time_passes(1.5)
    settle(story)
    client = ask(story.replicas[B], 3, at=2)
    work(story)
    settle(story)
    assert code(client) == "session_lost" and client.errors[0].steps == 1
    again = ask(story.replicas[B], 2, at=1)
    work(story)
    settle(story)
    assert again.sums == [3.0]
    assert ask(story.replicas[B], 3).errors == []


def test_unsettled_state_is_lost_for_a_chunk_without_steps() -> None:
    story = held_by(B)
    taken(story, A, B)
    deliver(story, messages.SessionGiven, A)
    lose_all(story)
    story.crash(A)
    for replica in story.replicas:
        story.learn_all(replica)
    story.time_passes(1.5)
    settle(story)
    client = ask_and_settle(story, B, 3)
    assert code(client) == "session_lost"
    begun = ask(story.replicas[B], 3, starts=None)
    work(story)
    settle(story)
    assert begun.sums == [3.0], "the client knows of the loss and begins again"


def test_two_replicas_do_not_begin_one_session() -> None:
    story = Story()
    clients = [ask(story.replicas[place], 1 + place, starts=None) for place in (A, B)]
    work(story)
    assert len([packet for packet in story.network if type(packet.message) is messages.TakeSession]) == 4
    settle(story)
    assert sorted(client.sums for client in clients) in ([[1.0], [3.0]], [[2.0], [3.0]]), "one begins, the other continues"


def test_answer_from_before_a_move_does_not_count() -> None:
    """The session moves to a replica that has just said that it does not hold it."""
    story = held_by(C)
    client = ask(story.replicas[A], 2)
    work(story)
    deliver(story, messages.TakeSession, B)
    deliver(story, messages.SessionAbsent, A)
    mover = ask(story.replicas[B], 3)
    work(story)
    [index] = [
        index
        for index, packet in enumerate(story.network)
        if type(packet.message) is messages.TakeSession
        and packet.receiver == story.replicas[C].id
        and packet.sender == story.replicas[B].id
    ]
    story.deliver(index)
    work(story)
    deliver(story, messages.SessionGiven, B)
    deliver(story, messages.TicketReport, C)
    assert mover.sums == [4.0]
    deliver(story, messages.TakeSession, C)  # of A
    deliver(story, messages.SessionAbsent, A)
    settle(story)
    assert client.sums == [6.0]


def test_answers_from_before_a_crash_do_not_count() -> None:
    """As above, but the replica that knew of the move ends."""
    story = held_by(C)
    client = ask(story.replicas[A], 2)
    work(story)
    deliver(story, messages.TakeSession, B)
    deliver(story, messages.SessionAbsent, A)
    ask(story.replicas[B], 3)
    work(story)
    [index] = [
        index
        for index, packet in enumerate(story.network)
        if packet.receiver == story.replicas[C].id and packet.sender == story.replicas[B].id
    ]
    story.deliver(index)
    work(story)
    deliver(story, messages.SessionGiven, B)
    story.network = [packet for packet in story.network if packet.sender == story.replicas[B].id]
    story.crash(C)
    for replica in story.replicas:
        story.learn_all(replica)
    work(story)
    settle(story)
    assert client.sums == [6.0]


def test_unreachable_replica_refuses_the_chunk_of_a_session_that_it_may_hold() -> None:
    story = held_by(B)
    story.toggle_pause(B)
    client = ask(story.replicas[A], 2, starts=None)
    work(story)
    story.time_passes(1.5)
    settle(story)
    assert code(client) == "session_unreachable" and client.errors[0].retry_after == 1


@pytest.mark.parametrize(("at", "answered"), [(1, True), (0, False), (2, False)])
def test_chunk_that_names_other_steps_is_refused(at: int, answered: bool) -> None:
    story = held_by(B)
    client = ask(story.replicas[A], 2, at=at)
    work(story)
    settle(story)
    if answered:
        assert client.sums == [3.0]
    else:
        assert code(client) == "session_conflict" and client.errors[0].steps == 1


def test_offered_sessions_are_taken() -> None:
    story = held_by(B)
    giver, taker = story.replicas[B], story.replicas[A]
    giver._to_peer(taker.id, messages.OfferSessions([NAME], giver.id), b"")
    settle(story)
    assert taker.serves(NAME) and not giver.serves(NAME)
    giver._to_peer(taker.id, messages.OfferSessions([NAME], giver.id), b"")
    settle(story)
    assert taker.serves(NAME), "a repeated offer changes nothing"


def test_chunk_waits_for_an_offer_that_comes_to_nothing() -> None:
    """The question goes only to the giver of an offer. A waiting chunk must not begin the session because the giver does not hold it."""
    story = held_by(C)
    giver, taker = story.replicas[B], story.replicas[A]
    giver._to_peer(taker.id, messages.OfferSessions([NAME], giver.id), b"")
    deliver(story, messages.OfferSessions, A)
    client = ask(taker, 2, starts=None)
    work(story)
    settle(story)
    assert client.sums == [3.0]


def test_end_of_a_session_is_reported_once_by_any_replica() -> None:
    story = held_by(B)
    story.time_passes(100.0)
    settle(story)
    client = ask(story.replicas[A], 2, starts=None)
    work(story)
    settle(story)
    assert code(client) == "session_expired"
    again = ask(story.replicas[C], 2, starts=None)
    work(story)
    settle(story)
    assert again.sums == [2.0]


def test_session_stays_where_it_is_if_the_taker_has_no_room() -> None:
    story = held_by(B)
    for number in range(8):
        story.replicas[A].harness.call([1], session=f"other-{number}", starts=True)
        settle(story)
    client = ask(story.replicas[A], 2)
    work(story)
    settle(story)
    assert code(client) == "too_many_sessions"
    again = ask(story.replicas[B], 2)
    work(story)
    settle(story)
    assert again.sums == [3.0]


def test_session_stays_where_it_is_if_the_taker_has_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    story = held_by(B)
    other = SimpleNamespace(sha256={"weights.safetensors": "def"}, states={"sum": 2})
    monkeypatch.setattr(story.replicas[A].harness.engine, "spec", lambda _: other)
    client = ask(story.replicas[A], 2)
    work(story)
    settle(story)
    assert code(client) == "session_conflict"
    assert story.replicas[B].serves(NAME)


def test_chunk_in_flight_is_finished_before_its_session_leaves() -> None:
    story = held_by(B)
    first = ask(story.replicas[B], 3)
    second = ask(story.replicas[A], 2)
    story.replicas[A].pass_local()
    [index] = [index for index, packet in enumerate(story.network) if packet.receiver == story.replicas[B].id]
    story.deliver(index)
    story.replicas[B].pass_local()
    assert not first.replies and not any(type(packet.message) is messages.SessionGiven for packet in story.network)
    work(story)
    assert first.sums == [4.0]
    settle(story)
    assert second.sums == [6.0]


def test_private_session_of_a_socket_asks_nobody() -> None:
    story = Story()
    client = story.replicas[A].harness.call([1], session="stream:abc")
    story.replicas[A].step()
    assert client.sums == [1.0] and not story.network and not story.replicas[A].local
