"""Sessions: every chunk continues exactly from the answered chunks before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from service.engine.batching import session_state as states
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.state_slots import ZERO_SLOT
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    InvalidRequest,
    Overloaded,
    ServiceError,
    SessionConflict,
    SessionExpired,
    SessionLost,
    UnknownModel,
    UnknownSession,
)
from service.ipc.messages.inference import SessionOptions
from service.ipc.messages.models import ModelKey
from service.ipc.session_file import StateOrigin
from tests.engine.batching.harness import (
    IDLE_SECONDS,
    MODEL,
    NEVER,
    OTHER,
    OVERFLOW,
    POISON,
    BatcherHarness,
    FakeClient,
    FakeEngine,
    FakeFrontend,
    block,
    counted,
    ids,
    total,
)
from tests.engine.batching.session_clients import ChunkedHarness, InFlightHarness, progress, refused, send, used_slots
from tests.engine.batching.story import tell_story


def fail(*arguments: object, **others: object) -> None:
    raise IndexError("secret")


# Chunks.


def test_last_chunk_ends_the_session(harness: BatcherHarness) -> None:
    send(harness, 1)
    assert used_slots(harness) == 1
    assert progress(send(harness, 2, ends=True)) == (3, 2)
    assert used_slots(harness) == 0
    assert progress(send(harness, 5)) == (5, 1)


def test_empty_chunk_ends_a_session_after_the_chunks_before_it(harness: BatcherHarness) -> None:
    """It never opens one, and is refused with a chunk before it that does not run."""
    clients = [harness.call([1], session="a"), harness.call([2, 3], session="a")]
    end = harness.call([], session="a", starts=False, ends=True)
    late = harness.call([1], session="a")
    assert not end.replies
    harness.run()
    assert [progress(client) for client in clients] == [(1, 1), (6, 3)] and refused(late) is SessionConflict
    [(answer, data)] = end.answers
    assert (answer.session_steps, answer.steps, answer.scores, data, used_slots(harness)) == (3, [], (), b"", 0)
    assert refused(send(harness, starts=False, ends=True)) is UnknownSession
    assert refused(send(harness, starts=False)) is InvalidInput
    first, end = harness.call([1], session="a"), harness.call([], session="a", starts=False, ends=True)
    harness.disconnect(first)
    assert refused(end) is SessionConflict and not harness.batcher.sessions.holds(MODEL)


def test_restart_waits_for_the_chunks_before_it(harness: BatcherHarness) -> None:
    clients = [
        harness.call([value], session="a", starts=starts) for value, starts in ((1, None), (2, None), (5, True), (6, None))
    ]
    harness.run()
    assert [progress(client) for client in clients] == [(1, 1), (3, 2), (5, 1), (11, 2)]
    assert used_slots(harness) == 1
    assert counted(harness.metrics.sessions_ended) == {"restarted": 1}


def test_block_may_end_a_session_and_start_it_again(harness: BatcherHarness) -> None:
    clients = [FakeClient([[1]]), FakeClient([[2]])]
    requests = [(harness.frontend.add(client), NEVER, [1]) for client in clients]
    options = SessionOptions(starts=True, ends=True)
    values, owner = ids([[1], [2]]), harness.frontend
    harness.batcher.submit(block(requests, values, divisible=True, owner=owner, sessions=["a", "a"], options=options))
    harness.run()
    assert refused(clients[0]) is SessionConflict and progress(clients[1]) == (2, 1) and used_slots(harness) == 0


def test_chunk_that_expects_other_steps_is_refused(harness: BatcherHarness) -> None:
    """The steps of waiting chunks count as well, from the last restart on."""
    clients, at = [], 0
    for values, starts in (([1, 2], None), ([3], None), ([4, 4, 4], None), ([5], True), ([6, 6], None), ([7], None)):
        clients.append(harness.call(values, session="a", starts=starts, at=None if starts else at))
        at = len(values) + (0 if starts else at)
        wrong = [harness.call([9], session="a", at=steps) for steps in range(8) if steps != at]
        assert [refused(client) for client in wrong] == [SessionConflict] * 7
    harness.run()
    assert [progress(client) for client in clients] == [(3, 2), (6, 3), (18, 6), (5, 1), (17, 3), (24, 4)]


def test_refused_restart_leaves_the_session_as_it_was(harness: BatcherHarness) -> None:
    send(harness, 1)
    assert refused(send(harness, POISON, starts=True)) is InferenceFailed
    cancelled = harness.call([5], session="a", starts=True)
    harness.disconnect(cancelled)
    harness.run()
    assert progress(send(harness, 2, starts=False)) == (3, 2)
    assert not counted(harness.metrics.sessions_ended) and used_slots(harness) == 1


def test_refused_restart_of_an_expired_session_still_reports_its_end(harness: BatcherHarness) -> None:
    send(harness, 1)
    harness.now += IDLE_SECONDS
    harness.run()
    assert refused(send(harness, POISON, starts=True)) is InferenceFailed
    assert refused(send(harness, 2)) is SessionExpired
    assert progress(send(harness, 3)) == (3, 1)


def test_restart_begins_at_zero_when_the_state_is_on_the_host() -> None:
    harness = BatcherHarness(engine=FakeEngine(slots=1))
    send(harness, 1)
    send(harness, 7, session="b")
    assert progress(send(harness, 5, starts=True)) == (5, 1)
    assert progress(send(harness, 1, session="b")) == (8, 2)
    assert progress(send(harness, 1)) == (6, 2)


@pytest.mark.parametrize(
    "lengths, model, error",
    [([1, 1], MODEL, InvalidInput), ([1], OTHER, InvalidInput)],
    ids=["two sequences", "a model that sees the whole"],
)
def test_request_that_cannot_be_a_chunk_is_refused(
    harness: BatcherHarness, lengths: Sequence[int], model: ModelKey, error: type[ServiceError]
) -> None:
    client = harness.call(*([1] * length for length in lengths), model=model, session="a")
    assert refused(client) is error
    assert send(harness, 3).sums == [3.0]


# Versions.


NEWER, RELOADED = ModelKey(MODEL.name, "2", 1), ModelKey(*MODEL.labels, 1)
"""Another version of MODEL, and the same version loaded again."""


def harness_of_versions() -> BatcherHarness:
    harness = BatcherHarness()
    served = (MODEL, NEWER, RELOADED)
    harness.engine.serves = harness.engine.streams = lambda key: key in served  # type: ignore[method-assign]
    harness.engine.states |= {key: [[0.0, 0.0] for _ in range(100)] for key in served}
    return harness


@pytest.mark.parametrize(
    ("model", "exactly", "elsewhere"),
    [(NEWER, False, MODEL), (NEWER, True, None), (RELOADED, False, MODEL), (RELOADED, True, MODEL)],
)
def test_conflict_names_the_version_that_was_probably_meant(model: ModelKey, exactly: bool, elsewhere: ModelKey | None) -> None:
    """A restarted session uses the named version."""
    harness = harness_of_versions()
    send(harness, 1)
    [error] = harness.call([2], model=model, session="a", exactly=exactly).errors
    assert isinstance(error, SessionConflict) and error.elsewhere == elsewhere
    assert total(harness.metrics.refused) == (elsewhere is None), "a chunk that is sent again is not counted"
    assert harness.batcher.sessions.model_of("a") == MODEL
    assert send(harness, 2).sums == [3.0]
    assert progress(send(harness, 2, model=NEWER, starts=True)) == (2, 1)
    assert (harness.batcher.sessions.model_of("a"), harness.batcher.sessions.model_of("b")) == (NEWER, None)


def test_chunk_of_a_version_that_was_unloaded_is_lost_once() -> None:
    """Its frontend had chosen the version of the session before, or another engine ended with the chunk."""
    harness, gone = harness_of_versions(), ModelKey(MODEL.name, "3", 9)
    assert refused(harness.call([1], model=gone, session="a", resubmitted=True)) is SessionLost
    send(harness, 1)
    harness.batcher.sessions.unload(MODEL)
    assert refused(harness.call([2], model=gone, session="a", starts=True)) is UnknownModel
    assert refused(harness.call([2], model=gone, session="a")) is SessionLost
    assert refused(harness.call([2], model=gone, session="a")) is UnknownModel
    assert send(harness, 3).sums == [3.0]


def test_session_of_a_version_is_found_when_a_newer_one_was_unloaded() -> None:
    """The frontend, which knows neither, chose the newest."""
    harness, gone = harness_of_versions(), ModelKey(MODEL.name, "3", 9)
    send(harness, 1)
    [error] = harness.call([2], model=gone, session="a", starts=False, exactly=False).errors
    assert isinstance(error, SessionConflict) and error.elsewhere == MODEL
    assert refused(harness.call([2], model=gone, session="a", starts=False)) is SessionConflict, "it names that version"
    assert refused(harness.call([2], model=gone, session="a", starts=True)) is UnknownModel


def test_unload_loses_only_the_sessions_of_its_version() -> None:
    harness = harness_of_versions()
    send(harness, 1)
    send(harness, 5, session="waits")
    send(harness, 7, session="other", model=NEWER)
    waits = harness.call([6], session="waits")
    assert harness.batcher.has(MODEL)
    harness.batcher.sessions.unload(MODEL)
    assert refused(waits) is refused(harness.call([1], session="a")) is SessionLost
    assert not harness.batcher.has(MODEL) and harness.batcher.has(NEWER)
    assert send(harness, 3).sums == [3.0]
    assert send(harness, 4, session="waits").sums == [4.0]
    assert send(harness, 1, session="other", model=NEWER).sums == [8.0]
    assert counted(harness.metrics.sessions_ended)["unloaded"] == 2


# Chunks that do not run.


def test_chunk_cancelled_between_batches_changes_nothing() -> None:
    harness = ChunkedHarness()
    harness.answer(1)
    cancelled = harness.call([1] * 70, session="a")
    harness.batch()
    harness.batcher.step()
    assert used_slots(harness) == 2
    harness.disconnect(cancelled)
    assert used_slots(harness) == 1
    assert counted(harness.metrics.cancelled) == {"running": 1}
    harness.asynchronous.end_batch()
    assert not harness.answer(*[1] * 40, OVERFLOW, *[1] * 29).answers[0][0].finite, "as a part of it"
    assert harness.batcher.idle and used_slots(harness) == 1
    assert progress(harness.answer(2)) == (3, 2)


def test_chunks_after_one_that_is_not_run_are_refused(harness: BatcherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled, or its answer raises."""
    first, cancelled, later, last = (harness.call([value], session="a") for value in (1, 2, 3, 4))
    harness.disconnect(cancelled)
    harness.run()
    assert first.sums == [1.0]
    assert refused(later) is refused(last) is SessionConflict
    with monkeypatch.context() as patched:
        patched.setattr(FakeFrontend, "answer", fail)
        bad, later = harness.call([10], session="a"), harness.call([20], session="a")
        harness.run()
    assert refused(bad) is InferenceFailed and refused(later) is SessionConflict
    assert progress(send(harness, 2)) == (3, 2)
    assert used_slots(harness) == 1


@pytest.mark.parametrize(("value", "allowed", "error"), [(POISON, 1e9, InferenceFailed), (10, 5.0, DeadlineExceeded)])
def test_chunk_that_fails_or_is_late_changes_nothing(value: int, allowed: float, error: type[ServiceError]) -> None:
    """The slot of its session can be given to another session, as before."""
    harness = BatcherHarness(engine=FakeEngine(slots=2))
    for name in ("a", "b"):
        send(harness, 1, session=name)
    bad, mate = harness.call([value], session="a", allowed=allowed), harness.call([2], session="b")
    harness.now = 5.0
    harness.run()
    assert refused(bad) is error and mate.sums == [3.0]
    assert send(harness, 7, session="c").sums == [7.0]
    assert on_host(harness) == ["a"], "its chunk was the first that ran"
    assert progress(send(harness, 4)) == (5, 2)
    assert send(harness, 4, session="b").sums == [7.0]


def test_chunk_whose_state_cannot_be_restored_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = BatcherHarness(engine=FakeEngine(slots=1))
    restore = harness.engine.restore

    def restore_others(model: ModelKey, slot: int, state: states.State) -> None:
        (fail if state["sum"][0] == 1.0 else restore)(model, slot, state)

    for name, value in (("a", 1), ("b", 2)):
        send(harness, value, session=name)
    with monkeypatch.context() as patched:
        patched.setattr(harness.engine, "restore", restore_others)
        bad, mate = harness.call([10], session="a"), harness.call([2], session="b")
        harness.run()
    assert refused(bad) is InferenceFailed and mate.sums == [4.0]
    assert progress(send(harness, 4)) == (5, 2)


def test_request_that_opens_no_session_only_continues_one(harness: BatcherHarness) -> None:
    assert refused(send(harness, 1, opens=False)) is Overloaded
    send(harness, 1)
    assert progress(send(harness, 2, opens=False)) == (3, 2)
    assert progress(send(harness, 5, starts=True, opens=False)) == (5, 1), "it takes the place of the open session"
    harness.now += IDLE_SECONDS
    harness.run()
    assert refused(send(harness, 1, opens=False)) is SessionExpired
    assert refused(send(harness, 1, opens=False)) is Overloaded


@pytest.mark.parametrize("ends", [False, True])
def test_chunk_that_is_not_finite_changes_nothing(harness: BatcherHarness, ends: bool) -> None:
    for name in ("a", "b"):
        send(harness, 1, session=name)
    bad, later = harness.call([10, OVERFLOW], session="a", ends=ends), harness.call([20], session="a")
    mate = harness.call([2], session="b")
    harness.run()
    assert [answer.finite for answer, _ in bad.answers] == [False]
    assert refused(later) is SessionConflict and mate.sums == [3.0]
    assert used_slots(harness) == 2
    assert progress(send(harness, 2)) == (3, 2)


def test_first_chunk_that_is_not_answered_opens_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = BatcherHarness(max_waiting=1)
    harness.call([1])
    assert refused(harness.call([1], session="a")) is Overloaded
    harness.run()
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "add_block", fail)
        with pytest.raises(IndexError):
            harness.call([10], session="a", allowed=5.0)
    harness.disconnect(harness.call([1], session="a"))
    assert not send(harness, OVERFLOW).answers[0][0].finite
    assert harness.batcher.sessions.model_of("a") is None and harness.batcher.idle and used_slots(harness) == 0
    assert harness.metrics.sessions.values[()] == [0.0]
    assert refused(send(harness, 1, starts=False)) is UnknownSession


# State slots.


def on_host(harness: BatcherHarness) -> list[str]:
    """Return the sessions whose state is not in a slot, in alphabetical order."""
    sessions = harness.batcher.sessions._table._open.values()
    return sorted(session.id for session in sessions if harness.states.slots[session.handle] == ZERO_SLOT)


def test_session_that_rested_longest_gives_up_its_slot() -> None:
    harness = BatcherHarness(engine=FakeEngine(slots=2))
    moved = []
    for name in "abacabca":
        harness.now += 1.0
        send(harness, 1, session=name)
        moved.append("".join(on_host(harness)))
    assert moved == ["", "", "", "b", "b", "c", "a", "b"]
    assert counted(harness.metrics.session_moves) == {"host": 4.0, "slot": 3.0} and used_slots(harness) == 2
    assert [send(harness, 0, session=name).sums[0] for name in "abc"] == [4.0, 2.0, 2.0]


# Batches in flight.


@pytest.mark.parametrize(("sessions", "chunks"), [(64, 3), (5, 8)])
def test_chunks_in_flight_are_answered_in_order(sessions: int, chunks: int) -> None:
    """However many sessions share the slots, each answer is the sum of all chunks so far."""
    harness = InFlightHarness(max_sessions=sessions, max_waiting=1000)
    sent = [[harness.call([10 * name + 1], session=str(name)) for name in range(sessions)] for _ in range(chunks)]
    while harness.batch():
        for of_session in zip(*sent, strict=True):
            replies = [client.replies for client in of_session]
            assert replies == sorted(replies, reverse=True)
    for number, of_chunk in enumerate(sent, 1):
        assert [progress(client) for client in of_chunk] == [((10 * name + 1) * number, number) for name in range(sessions)]


def test_handle_of_a_deleted_session_is_free_after_its_batch() -> None:
    harness = InFlightHarness()
    running = harness.call([5], session="a")
    harness.batcher.step()
    handle = harness.batcher.sessions._table.get("a").handle
    harness.batcher.sessions.end("a")
    clients = []
    for name in "bcb":
        clients.append(harness.call([1], session=name))
        assert (harness.batcher.sessions._table.get(name).handle == handle) == (name == "c")
        while harness.batch():
            pass
    assert [progress(client) for client in clients] == [(1, 1), (1, 1), (2, 2)]
    assert refused(running) is SessionConflict and used_slots(harness) == 2


def test_chunk_waits_for_the_batch_of_a_cancelled_chunk() -> None:
    harness = InFlightHarness()
    harness.call([1], session="a")
    while harness.batch():
        pass
    cancelled = harness.call([5], session="a")
    harness.batcher.step()
    harness.disconnect(cancelled)
    later = harness.call([2], session="a")
    assert not harness.batcher.step(), "the device would accept a batch"
    while harness.batch():
        pass
    assert progress(later) == (3, 2) and used_slots(harness) == 1


# Export and import.


def test_exported_state_continues_in_another_engine() -> None:
    here, there = BatcherHarness(engine=FakeEngine(slots=1)), BatcherHarness()
    send(here, 1, 2)
    send(here, 9, session="b")
    data = here.batcher.sessions.export_state("a")
    there.import_state("a", data)
    here.import_state("fork", data)
    assert progress(send(there, 3)) == (6, 3)
    assert progress(send(here, 4, session="fork")) == (7, 3)
    assert progress(send(here, 10)) == (13, 3)


@pytest.mark.parametrize(
    "origin",
    [
        StateOrigin("other", "1", "abc", 1),
        StateOrigin(MODEL.name, "2", "abc", 1),
        StateOrigin(MODEL.name, "1", "abd", 1),
        StateOrigin(*OTHER.labels, "abc", 1),
    ],
    ids=["model", "version", "weights", "a model without sessions"],
)
def test_import_of_another_model_is_refused(origin: StateOrigin) -> None:
    with pytest.raises(SessionConflict):
        BatcherHarness().import_state("a", states.pack({"sum": torch.zeros(2)}, origin))


@pytest.mark.parametrize(
    "state",
    [
        {"sum": torch.zeros(3)},
        {"sums": torch.zeros(2)},
        {},
        {"sum": torch.zeros(2), "more": torch.zeros(1)},
        {"sum": torch.tensor([0.0, float("nan")])},
        {"sum": torch.tensor([0.0, float("-inf")])},
        {"sum": torch.zeros(2, dtype=torch.int32)},
    ],
    ids=["shape", "name", "none", "more", "not a number", "infinite", "dtype"],
)
def test_import_of_other_tensors_is_refused(state: states.State) -> None:
    with pytest.raises(InvalidRequest):
        BatcherHarness().import_state("a", states.pack(state, StateOrigin(*MODEL.labels, "abc", 1)))


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_events_keeps_sums_and_slots(seed: int) -> None:
    """tests/long tells a million events."""
    tell_story(seed, events=200)
