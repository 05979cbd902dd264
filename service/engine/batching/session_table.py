"""Which sessions are open, which are idle, and which ended without their client's knowledge. Pure: the time is an argument.

A client that resumes a session which ended without its knowledge gets an error once, so it never continues from another state unnoticed.
A journal therefore records the ids of open sessions and of sessions that ended this way. The journal outlives the engine process.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from service.engine.batching.fair_shares import TENANT_SHARE
from service.engine.batching.state_cache import StateCache
from service.errors import ServiceError, SessionConflict, SessionExpired, SessionLost, TooManySessions, UnknownSession
from service.ipc.messages.inference import SessionOptions
from service.ipc.messages.models import ModelKey
from service.ipc.messages.sessions import DIGEST_BYTES, session_id, session_tenant
from service.ipc.session_journal import SessionJournal
from service.metrics import Metrics


class Ownership(NamedTuple):
    """The ownership of a session in the session store.

    number: no other ownership has it. begun: when the session began, in milliseconds of Unix time. anew: the store has no record of it yet.
    """

    number: int
    begun: int
    anew: bool = False


class Restart(NamedTuple):
    """A queued chunk that begins an open session again. steps_before: of the session; ownership: of the session after it, if it changes."""

    steps_before: int
    ownership: Ownership | None


@dataclass(slots=True, eq=False)
class Session:
    """A sequence that arrives in chunks. What changes with every chunk is in the arrays of StateCache.

    record: its record in the journal.
    earlier_end: why the session of the same id before it ended without its client's knowledge, or None.
    ownership: of this replica, None without a session store. restarts: its chunks without an answer that begin it again, oldest first.
    uncertain: its client may have answers to later chunks than this state has. Only a chunk that names these steps may continue.
    ending: whether its last chunk has arrived.
    unsaved: chunks since it was saved last.
    """

    id: str
    key: ModelKey
    handle: int
    record: int
    earlier_end: str | None = None
    ownership: Ownership | None = None
    restarts: list[Restart] = field(default_factory=list)
    uncertain: bool = False
    ending: bool = False
    unsaved: int = 0


class ArrivingChunk(NamedTuple):
    """A chunk for a session. at: how many steps the session has before it according to the client, None if the client does not say."""

    session: str
    key: ModelKey
    options: SessionOptions
    at: int | None = None


class _EndedSession(NamedTuple):
    """Why a session ended without its client's knowledge, a key of UNREPORTED_ENDS, and its record in the journal."""

    reason: str
    record: int


TAKEN_OVER = "taken_over"
"""Another replica continues the session, because this one did not reach the session store for too long."""
UNREPORTED_ENDS: dict[str, type[ServiceError]] = {
    "expired": SessionExpired,
    "lost": SessionLost,
    "unloaded": SessionLost,
    TAKEN_OVER: SessionLost,
}
"""Errors for a client that resumes a session which ended without its knowledge: idle too long, with its engine or its model version."""


class SessionTable:
    """Up to `limit` open sessions, each idle for up to `idle_seconds`.

    The journal has more records than there may be open sessions. The others remember sessions that have ended.
    """

    def __init__(self, limit: int, idle_seconds: float, journal: SessionJournal, metrics: Metrics, states: StateCache) -> None:
        self._limit = limit
        self.idle_seconds = idle_seconds
        self._journal = journal
        self._metrics = metrics
        self.states = states
        self._open: dict[str, Session] = {}
        self._by_handle: dict[int, Session] = {}
        self._handles: dict[ModelKey, dict[str, int]] = {}
        """Of the sessions that any chunk may continue, by model version and id."""
        self._of_tenant: Counter[str] = Counter()
        """How many sessions each tenant has open."""
        self._expires_at = 0.0
        """No session is idle for too long before."""
        self._ended: OrderedDict[bytes, _EndedSession] = OrderedDict()
        self._free_records: list[int] = []
        self.on_close: Callable[[Session, str], None] | None = None
        """Called with each session that ends, and the reason."""
        self._read_journal()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, id: str) -> Session:
        """Return an open session; raises the error that describes its end if it is not open. A client that resumes it still gets that."""
        if id not in self._open:
            ended = self._ended.get(_digest(id))
            unknown = UnknownSession(f"no session {session_id(id)!r} is open", field="session")
            raise unknown if ended is None else self._end_error(ended.reason, id)
        return self._open[id]

    def find(self, id: str) -> Session | None:
        return self._open.get(id)

    def of_handle(self, handle: int) -> Session:
        return self._by_handle[handle]

    def handles(self, key: ModelKey) -> dict[str, int]:
        """Return the handles of the sessions of a model version that any chunk may continue, by id."""
        return self._handles.get(key, {})

    def note(self, session: Session, *, uncertain: bool | None = None, ending: bool | None = None) -> None:
        """Change what a session allows its next chunk."""
        session.uncertain = session.uncertain if uncertain is None else uncertain
        session.ending = session.ending if ending is None else ending
        handles = self._handles.setdefault(session.key, {})
        if session.uncertain or session.ending:
            handles.pop(session.id, None)
        else:
            handles[session.id] = session.handle

    def resume(self, chunk: ArrivingChunk) -> Session | None:
        """Return the session that a chunk continues, None if it starts a session.

        If another engine ended while it had the chunk, the session ended with it, so an open session of the same id is a new session.
        Raises the error that describes the end of the session, or SessionConflict if the chunk cannot be its next.
        """
        id, starts = chunk.session, chunk.options.starts
        session = self._open.get(id)
        if chunk.options.resubmitted and not starts and not (session is not None and session.uncertain):
            self._forget(_digest(id))
            raise self._end_error("lost", id)
        if session is None:
            self._check_absent(chunk)
            return None
        if session.key != chunk.key:
            raise _other_version(session, chunk)
        if session.ending:
            raise SessionConflict(f"session {session_id(id)!r} ends with an earlier chunk", field="session")
        if not starts:
            self._check_steps(session, chunk)
        return session

    def open(self, id: str, key: ModelKey, tenant_limit: int = 0) -> Session:
        """Open a session; raises TooManySessions at the limit. tenant_limit: of the open sessions of its tenant, 0 for its share."""
        tenant, free = session_tenant(id), self._limit - len(self._open)
        of_tenant = self._of_tenant[tenant]
        problem = ""
        if tenant and of_tenant and not tenant_limit and of_tenant >= TENANT_SHARE * (free + of_tenant):
            problem = f"{of_tenant} sessions of {tenant} are open and the {free} others are for other tenants: "
            problem += "end one, retry later, or set max_sessions of its key"
        elif 0 < tenant_limit <= of_tenant:
            problem = f"{of_tenant} sessions of {tenant} are open and its key allows {tenant_limit}: end one, or retry later"
        elif free <= 0:
            problem = f"{len(self._open)} sessions are open and SEQSERVE_MAX_SESSIONS is {self._limit}: "
            problem += "end one, retry later, or raise SEQSERVE_MAX_SESSIONS"
        if problem:
            raise TooManySessions(problem, field="session", retry_after=1)
        ended = self._forget(_digest(id))
        if not self._free_records:
            self._forget(next(iter(self._ended)))
        self._of_tenant[tenant] += 1
        earlier_end = None if ended is None else ended.reason
        session = self._open[id] = Session(id, key, self.states.open(), self._free_records.pop(), earlier_end=earlier_end)
        self._by_handle[session.handle] = session
        self.note(session)
        self._journal.write(session.record, _digest(id))
        return session

    def names(self) -> list[str]:
        return list(self._open)

    def end_reason(self, id: str) -> str:
        """Return why a session ended without its client's knowledge, empty if it did not."""
        ended = self._ended.get(_digest(id))
        return "" if ended is None else ended.reason

    def note_end(self, id: str, reason: str) -> None:
        """Record that a session ended without its client's knowledge, according to the session store."""
        if self._forget(_digest(id)) is None and not self._free_records:
            self._forget(next(iter(self._ended)))
        record = self._free_records.pop()
        known = reason if reason in UNREPORTED_ENDS else "lost"  # a later version may have more reasons
        self._ended[_digest(id)] = _EndedSession(known, record)
        self._journal.write(record, _digest(id))

    def of(self, key: ModelKey) -> list[Session]:
        return [session for session in self._open.values() if session.key == key]

    def lose(self, session: Session, reason: str) -> None:
        """End a session without its client's knowledge. reason: of UNREPORTED_ENDS. Its state is discarded."""
        self._remove(session, reason)
        self._ended[_digest(session.id)] = _EndedSession(reason, session.record)

    def close(self, session: Session, reason: str) -> None:
        """End a session with its client's knowledge. reason: from metrics.SESSION_ENDS. Its state is discarded.

        If no chunk of it was answered, its client still knows the earlier session of the same id. If that session ended without
        the client's knowledge, the client still gets the error.
        """
        self._remove(session, reason)
        if reason == "unbegun" and session.earlier_end is not None:
            self._ended[_digest(session.id)] = _EndedSession(session.earlier_end, session.record)
        else:
            self._free_record(session.record)

    def expire(self, now: float) -> None:
        """End the sessions that were idle for too long, without their clients' knowledge."""
        if now < self._expires_at:
            return
        last_use = self.states.last_use
        idle = last_use + self.idle_seconds <= now
        for handle in np.flatnonzero(idle).tolist():
            if not self.states.pending[handle]:
                self.lose(self._by_handle[handle], "expired")
        self._expires_at = min(now, float(last_use[~idle].min(initial=np.inf))) + self.idle_seconds

    def _read_journal(self) -> None:
        """Take over the journal of the previous engine: every session in it is lost."""
        for record in reversed(range(self._journal.records)):
            digest = self._journal.read(record)
            if any(digest) and digest not in self._ended:
                self._ended[digest] = _EndedSession("lost", record)
            else:
                self._free_records.append(record)

    def _check_absent(self, chunk: ArrivingChunk) -> None:
        """Raise, once, the error for a client that resumes a session which is not open."""
        id, starts = chunk.session, chunk.options.starts
        ended = None if starts else self._forget(_digest(id))
        if ended is not None:
            raise self._end_error(ended.reason, id)
        if chunk.at and not starts:
            raise SessionLost(
                f"the chunk continues session {session_id(id)!r} at {chunk.at} steps, and no state of the session is left: "
                "start the session again from its first step",
                field="steps",
                steps=0,
            )
        if starts is False:
            raise UnknownSession(f"no session {session_id(id)!r} is open: start it with start = true", field="session")

    def uncertain_error(self, session: Session) -> SessionLost:
        """Return the error for a client that may have answers to later chunks than the state of its session has."""
        steps = int(self.states.steps[session.handle])
        return SessionLost(
            f"the newest state of session {session_id(session.id)!r} was lost, and one with {steps} steps is left: "
            f"send the steps after it again, with steps = {steps}, or begin the session again with start = true",
            field="session",
            steps=steps,
        )

    def _check_steps(self, session: Session, chunk: ArrivingChunk) -> None:
        """Raise SessionConflict for a chunk that expects another number of steps."""
        steps, expected = self.states.next_steps[session.handle], chunk.at
        if expected is not None and expected != steps:
            raise SessionConflict(
                f"the chunk continues session {session_id(session.id)!r} at {expected} steps and the session has {steps}: "
                "continue from there, or start it again",
                field="steps",
                steps=steps,
            )

    def _end_error(self, reason: str, id: str) -> ServiceError:
        causes = {
            "expired": f"session {session_id(id)!r} was idle for longer than SEQSERVE_SESSION_IDLE_SECONDS, {self.idle_seconds:g} s",
            "lost": f"the engine that held the state of session {session_id(id)!r} ended",
            "unloaded": f"the model version of session {session_id(id)!r} was unloaded",
            TAKEN_OVER: f"another replica took over session {session_id(id)!r} while this one did not reach the session store",
        }
        return UNREPORTED_ENDS[reason](f"{causes[reason]}: start the session again from its first step", field="session")

    def _forget(self, digest: bytes) -> _EndedSession | None:
        ended = self._ended.pop(digest, None)
        if ended is not None:
            self._free_record(ended.record)
        return ended

    def _free_record(self, record: int) -> None:
        self._journal.write(record, bytes(DIGEST_BYTES))
        self._free_records.append(record)

    def _remove(self, session: Session, reason: str) -> None:
        del self._open[session.id], self._by_handle[session.handle]
        self._handles[session.key].pop(session.id, None)
        self.states.close(session.key, session.handle)
        tenant = session_tenant(session.id)
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._metrics.sessions_ended.add(reason)
        if self.on_close is not None:
            self.on_close(session, reason)


def _other_version(session: Session, chunk: ArrivingChunk) -> SessionConflict:
    """Return the error for a chunk of another model or version. `elsewhere` is the session's version if the client may have meant it."""
    key = session.key
    message = (
        f"session {session_id(session.id)!r} belongs to {key.name} version {key.version}: name that version, or another session"
    )
    error = SessionConflict(message, field="session")
    if key.labels == chunk.key.labels or (key.name == chunk.key.name and not chunk.options.exactly):
        error.elsewhere = key
    return error


def _digest(id: str) -> bytes:
    return blake2b(id.encode(), digest_size=DIGEST_BYTES).digest()
