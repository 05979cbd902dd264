"""The sessions of one engine: sequences whose next chunk may still come. Pure: the time is an argument.

Who goes on with a session that has ended without him is told so once, and never goes on from somewhere else without knowing it: ids of
sessions that are open or have ended so stand in a journal, which outlives the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple, Protocol

from service.engine.batching.ticket import Held, Session
from service.errors import (
    ServiceError,
    SessionConflict,
    SessionExpired,
    SessionLost,
    TooManySessions,
    UnknownSession,
)
from service.ipc.messages import DIGEST_BYTES, ModelKey, Request
from service.metrics import Metrics


class Journal(Protocol):
    """Records of DIGEST_BYTES each, zeros where there is none."""

    @property
    def records(self) -> int: ...

    def read(self, record: int) -> bytes: ...

    def write(self, record: int, digest: bytes) -> None: ...


class _Gone(NamedTuple):
    """Why a session has ended, one of UNTOLD, and where that is recorded."""

    why: str
    record: int


UNTOLD: dict[str, type[ServiceError]] = {"expired": SessionExpired, "lost": SessionLost, "unloaded": SessionLost}
"""What who goes on with a session is told of its end that he does not know of: idle, with its engine, or with its version."""


class Sessions:
    """At most `limit` of them, each idle for `idle_seconds` at most. A journal has more records than there may be sessions: the rest tell
    of those that have ended."""

    def __init__(self, limit: int, idle_seconds: float, journal: Journal, metrics: Metrics) -> None:
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._journal = journal
        self._metrics = metrics
        self._open: dict[str, Session] = {}
        self._idle: OrderedDict[Session, None] = OrderedDict()
        """The one that was left first comes first."""
        self._gone: OrderedDict[bytes, _Gone] = OrderedDict()
        self._records = list(range(journal.records))[::-1]
        self._take_over()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, id: str) -> Session:
        """Raises what became of it when it is not open."""
        if id not in self._open:
            raise self._tell(id) or UnknownSession(f"no session {id!r} is open", field="session")
        return self._open[id]

    def find(self, id: str) -> Session | None:
        return self._open.get(id)

    def going_on(self, request: Request, again: bool) -> Session | None:
        """The session of which a request is a chunk, None when it begins one; raises what became of it, or why it is no chunk of it.

        again: the session that it was sent for ended with its engine; one of its name that is open is another.
        """
        id = request.session
        assert id is not None
        session = self._open.get(id)
        if again and not request.session_starts:
            self._forget(_digest(id))
            raise self._lost("lost", id)
        if session is None:
            self._absent(id, request)
            return None
        if session.key != request.key:
            raise _of_another(session, request)
        if session.ending:
            raise SessionConflict(f"session {id!r} ends with a chunk that came before this one", field="session")
        return session

    def open(self, id: str, key: ModelKey) -> Session:
        """A new one; raises TooManySessions at the limit."""
        if len(self._open) >= self._limit:
            raise TooManySessions(
                f"{len(self._open)} sessions are open and SEQSERVE_MAX_SESSIONS is {self._limit}: "
                "end one, retry later, or raise SEQSERVE_MAX_SESSIONS",
                field="session",
                retry_after=1,
            )
        self._forget(_digest(id))
        if not self._records:
            self._forget(next(iter(self._gone)))
        session = self._open[id] = Session(id, Held(key), self._records.pop())
        self._journal.write(session.record, _digest(id))
        return session

    def of(self, key: ModelKey) -> list[Session]:
        """All that are open of one version of a model."""
        return [session for session in self._open.values() if session.key == key]

    def lose(self, session: Session) -> None:
        """Its version is served no longer: it has ended without its caller's knowledge; its state is the caller's business."""
        self._end_untold(session, "unloaded")

    def close(self, session: Session, reason: str) -> None:
        """It has ended as its caller knows, for one of metrics.SESSION_ENDS; its state is the caller's business."""
        self._drop(session, reason)
        self._journal.write(session.record, bytes(DIGEST_BYTES))
        self._records.append(session.record)

    def rest(self, session: Session, now: float) -> None:
        """It has no chunk any more, for now."""
        session.touched = now
        self._idle[session] = None
        self._idle.move_to_end(session)

    def wake(self, session: Session) -> None:
        """A chunk of it has come."""
        self._idle.pop(session, None)

    def expire(self, now: float) -> list[Session]:
        """Those that were idle for too long have ended, without their callers' knowledge; their states are the caller's business."""
        ended = []
        while self._idle and (session := next(iter(self._idle))).touched + self._idle_seconds <= now:
            self._end_untold(session, "expired")
            ended.append(session)
        return ended

    def _take_over(self) -> None:
        """What a predecessor left: every session that it had is lost."""
        for record in list(self._records):
            digest = self._journal.read(record)
            if any(digest):
                self._gone[digest] = _Gone("lost", record)
        taken = {gone.record for gone in self._gone.values()}
        self._records = [record for record in self._records if record not in taken]

    def _absent(self, id: str, request: Request) -> None:
        """Nothing of this name is open: that is told to who goes on with it, once."""
        gone = None if request.session_starts else self._tell(id)
        if gone is not None:
            raise gone
        if request.session_starts is False:
            raise UnknownSession(f"no session {id!r} is open to go on with: begin it with start = true", field="session")

    def _tell(self, id: str) -> ServiceError | None:
        gone = self._forget(_digest(id))
        return None if gone is None else self._lost(gone.why, id)

    def _lost(self, why: str, id: str) -> ServiceError:
        said = {
            "expired": f"session {id!r} was idle for longer than SEQSERVE_SESSION_IDLE_SECONDS, {self._idle_seconds:g} s",
            "lost": f"the engine that had the state of session {id!r} ended",
            "unloaded": f"the version of the model that session {id!r} began with is served no longer",
        }
        return UNTOLD[why](f"{said[why]}: begin it anew, with all of its steps", field="session")

    def _forget(self, digest: bytes) -> _Gone | None:
        gone = self._gone.pop(digest, None)
        if gone is not None:
            self._journal.write(gone.record, bytes(DIGEST_BYTES))
            self._records.append(gone.record)
        return gone

    def _end_untold(self, session: Session, why: str) -> None:
        self._drop(session, why)
        self._gone[_digest(session.id)] = _Gone(why, session.record)

    def _drop(self, session: Session, reason: str) -> None:
        del self._open[session.id]
        self._idle.pop(session, None)
        self._metrics.sessions_ended.add(reason)


def _of_another(session: Session, request: Request) -> SessionConflict:
    """Why this is no chunk of the session, which is of another version of the model, or of another model."""
    key = session.key
    said = f"session {session.id!r} is of {key.name} version {key.version}: name that, or another session"
    meant = key.labels == request.key.labels or (key.name == request.model and not request.exactly)
    return SessionConflict(said, field="session", elsewhere=key if meant else None)


def _digest(id: str) -> bytes:
    return blake2b(id.encode(), digest_size=DIGEST_BYTES).digest()
