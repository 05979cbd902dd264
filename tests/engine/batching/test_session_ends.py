"""Sessions end when they are idle or their engine ends, and their limits leave room for others."""

from __future__ import annotations

import pytest

from service.errors import (
    SessionConflict,
    SessionExpired,
    SessionLost,
    TooManySessions,
    UnknownSession,
)
from service.ipc.messages.sessions import session_of_tenant
from service.ipc.session_journal import SessionJournal
from tests.engine.batching.harness import IDLE_SECONDS, BatcherHarness
from tests.engine.batching.session_clients import ChunkedHarness, progress, refused, send, used_slots


def test_idle_session_expires_and_reports_it_once(harness: BatcherHarness) -> None:
    send(harness, 1)
    send(harness, 1, session="b")
    harness.now = IDLE_SECONDS - 1
    send(harness, 1, session="b")
    harness.now = IDLE_SECONDS
    harness.batcher.step()
    assert used_slots(harness) == 1
    assert refused(send(harness, 2)) is SessionExpired
    assert progress(send(harness, 2)) == (2, 1)
    assert send(harness, 1, session="b").sums == [3.0]


def test_session_with_a_waiting_chunk_is_not_idle() -> None:
    harness = ChunkedHarness()
    client = harness.call([1] * 20, session="a")
    harness.batch()
    harness.now = 10 * IDLE_SECONDS
    harness.batch()
    harness.batcher.step()
    assert progress(client) == (20, 20)


def test_tenant_leaves_sessions_to_others() -> None:
    """Unless its key says how many it may have."""
    harness = BatcherHarness(max_sessions=16)
    names = [session_of_tenant("a", str(number)) for number in range(16)]
    assert [bool(send(harness, 1, session=name).errors) for name in names] == [False] * 14 + [True] * 2
    assert refused(send(harness, 1, session=names[14])) is TooManySessions
    assert not send(harness, 1, session=session_of_tenant("b", "0")).errors
    assert not send(harness, 1, session=names[15], limit=16).errors


def test_session_beyond_the_limit_is_refused() -> None:
    """Chunks, imports, and chunks of the session that a client deletes. An import replaces no open session."""
    harness = BatcherHarness(max_sessions=2)
    assert refused(send(harness, 1, starts=False)) is UnknownSession
    send(harness, 1)
    file = harness.batcher.sessions.export_state("a")
    with pytest.raises(SessionConflict):
        harness.import_state("a", file)
    harness.import_state("b", file)
    [error] = send(harness, 1, session="c").errors
    assert isinstance(error, TooManySessions) and error.retry_after == 1
    assert error.message.startswith("2 sessions are open and SEQSERVE_MAX_SESSIONS is 2")
    with pytest.raises(TooManySessions):
        harness.import_state("c", file)
    waits = harness.call([2], session="b")
    with pytest.raises(SessionConflict):
        harness.batcher.sessions.export_state("b")
    harness.batcher.sessions.end("b")
    assert refused(waits) is SessionConflict and used_slots(harness) == 1
    with pytest.raises(UnknownSession):
        harness.batcher.sessions.end("b")
    assert send(harness, 1, session="c").sums == [1.0]
    assert progress(send(harness, 2, starts=False)) == (3, 2)


def test_abandoned_sessions_make_room_for_open_ones() -> None:
    """The end of the oldest is forgotten by then."""
    harness = BatcherHarness(max_sessions=2)
    for number in range(50):
        send(harness, 1, session=f"s{number}")
        harness.now += IDLE_SECONDS
        harness.batcher.step()
    assert used_slots(harness) == 0 and harness.metrics.sessions.values[()] == [0.0]
    assert refused(send(harness, 1, session="s49")) is SessionExpired
    assert send(harness, 1, session="s3").sums == [1.0]


# Ends of engines.


def test_chunks_that_are_sent_again_do_not_continue_a_lost_session() -> None:
    journal = SessionJournal(6)
    send(BatcherHarness(journal=journal), 1)
    after = BatcherHarness(journal=journal)
    clients = [after.call([value], session="a", resubmitted=True) for value in (1, 2)]
    begins = after.call([5], session="b", starts=True, resubmitted=True)
    after.run()
    assert [refused(client) for client in clients] == [SessionLost, SessionLost]
    assert begins.sums == [5.0]


def test_session_lost_with_its_engine_reports_it_once() -> None:
    """Also after another engine has ended, and if the session had expired before."""
    journal = SessionJournal(6)
    before = BatcherHarness(journal=journal)
    send(before, 1, session="expired")
    before.now = IDLE_SECONDS
    for name in ("a", "b"):
        send(before, 1, session=name)
    send(before, 1, session="ended", ends=True)
    BatcherHarness(journal=journal)
    after = BatcherHarness(journal=journal)
    assert progress(send(after, 2, session="b", starts=True)) == (2, 1), "it begins anew"
    for name, error in (("a", SessionLost), ("expired", SessionLost)):
        assert refused(send(after, 2, session=name)) is error
        assert progress(send(after, 2, session=name, ends=True)) == (2, 1)
    assert progress(send(after, 2, session="ended")) == (2, 1)
