"""The sessions of one engine in the session store: how they come here, how they are saved, and how they go to other replicas.

Work for a session that is not open here waits until this replica owns the session, or knows that there is none. A session that another
replica needs is saved after its last chunk, and closes once the store has the state. Private sessions, those of one socket, are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from service.engine.batching.session_table import TAKEN_OVER, UNREPORTED_ENDS, SessionTable
from service.engine.batching.ticket import Session
from service.errors import Overloaded, ServiceError, SessionUnreachable
from service.ipc import messages, session_file
from service.ipc.messages import RESERVED_SESSION_PREFIX, Message, TakeOutcome, session_id
from service.ipc.session_file import SessionFile

RETRY_SECONDS = 1
PATIENCE_SECONDS = 5.0
"""How long work waits for a session. The store takes at most 4 s, and its process may have to start again."""
SendToStore = Callable[[Message, bytes], None]
"""Sends a message with its trailing bytes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work that waits for a session. `proceed` does it, `refuse` ends it with an error, and nothing waits for it any more if `ended`.

    limit: how many sessions the tenant may have, 0 for no limit. begins: whether it may begin the session. anew: whether it begins the
    session in any case.
    """

    proceed: Callable[[], None]
    refuse: Callable[[ServiceError], None]
    ended: Callable[[], bool]
    limit: int = 0
    begins: bool = False
    anew: bool = False


class SessionStates(Protocol):
    """What `sessions` does with the states of sessions."""

    def export(self, session: Session) -> bytes:
        """Return the state of a session as a session file."""

    def import_file(self, id: str, file: SessionFile, limit: int) -> Session:
        """Open a session with a saved state. Raises ServiceError."""

    def let_go(self, session: Session) -> None:
        """Close a session that another replica may take now."""

    def lose(self, session: Session, reason: str) -> None:
        """End a session without its client's knowledge."""

    def rest(self, session: Session) -> None:
        """Start the idle time of a session."""


class StoredSessions:
    """Keeps the sessions of one engine in step with their records in the store."""

    states: SessionStates

    def __init__(self, table: SessionTable, clock: Callable[[], float], *, max_waiting: int, checkpoint_chunks: int) -> None:
        """max_waiting: most work that waits. checkpoint_chunks: chunks between two saves of a session."""
        self._table = table
        self._clock = clock
        self._max_waiting = max_waiting
        self._checkpoint_chunks = checkpoint_chunks
        self._waiting: dict[str, list[Waiting]] = {}
        """By session, in the order of arrival."""
        self._waiting_until: dict[str, float] = {}
        self._waiters = 0
        self._claims: set[str] = set()
        """The sessions that the store is asked for."""
        self._departing: set[str] = set()
        """The open sessions that this engine lets go of. Their chunks wait."""
        self._released_twice: set[str] = set()
        """Those of them whose release was sent again, to the next process of the store: the first may have been made."""
        self._proceeding = ""
        """The session whose work proceeds now."""
        self._send: SendToStore | None = None
        self._handlers: dict[type[Message], Callable[[Any, bytes | memoryview], None]] = {
            messages.SessionTaken: self._handle_taken,
            messages.SaveEnded: self._handle_save_ended,
            messages.SessionWanted: self._handle_wanted,
            messages.VerifySession: self._handle_verify,
        }

    def attach(self, send: SendToStore) -> None:
        """The process of the store has started. An earlier one may have ended before it replied."""
        self._send = send
        for name in self._claims:
            self._ask(name)
        for name in self._departing:
            session = self._table.find(name)
            if session is not None and not session.chunks:
                self._released_twice.add(name)
                self._release(session)

    def detach(self) -> None:
        """The process of the store has ended. Work waits for its successor."""
        self._send = None

    # Work for a session.

    def hold(self, name: str, waiting: Waiting) -> bool:
        """Keep work until this replica owns its session. Returns False if it can be done now. Raises Overloaded."""
        if name == self._proceeding or _is_private(name):
            return False
        departing = name in self._departing
        if not departing:
            if self._table.find(name) is not None:
                return False
            if not waiting.anew and self._table.end_reason(name) == TAKEN_OVER:
                return False  # the client learns that first
        if self._waiters >= self._max_waiting:
            raise Overloaded(
                f"{self._waiters} requests wait for the session store and SEQSERVE_MAX_WAITING is {self._max_waiting}: retry later",
                retry_after=RETRY_SECONDS,
            )
        self._waiting.setdefault(name, []).append(waiting)
        self._waiting_until.setdefault(name, self._clock() + PATIENCE_SECONDS)
        self._waiters += 1
        if not departing and name not in self._claims:
            self._claim(name)
        return True

    def _claim(self, name: str) -> None:
        self._claims.add(name)
        self._ask(name)

    def _ask(self, name: str) -> None:
        self._tell(messages.TakeSession(name, now_ms(), self._waiting[name][0].begins))

    def _proceed(self, name: str, *, owned: bool, exact: bool = False, unread: ServiceError | None = None) -> None:
        """Do the work that waits for a session, in its order. owned: whether this replica owns the session, so that it may open here.

        exact: of its saved state, for another replica if the session does not open here. unread: why its saved state is of no use here.
        Then it can only begin anew.
        """
        for index, waiting in enumerate(self._take_waiting(name)):
            if index and owned and self._table.find(name) is None and unread is None:
                owned = False  # the session has opened and ended, and its record with it
                self._tell(messages.ReleaseSession(name, exact))
            if unread is not None and not waiting.anew and self._table.find(name) is None:
                waiting.refuse(unread)
                continue
            if index and not owned and self._table.find(name) is None:
                self._hold_again(name, waiting)
                continue
            self._do(name, waiting)
        session = self._table.find(name)
        if session is not None:
            session.anew = not owned
        elif owned:
            self._tell(messages.ReleaseSession(name, exact))

    def _do(self, name: str, waiting: Waiting) -> None:
        """Do work that no longer waits for its session."""
        self._proceeding = name
        try:
            waiting.proceed()
        finally:
            self._proceeding = ""

    def _hold_again(self, name: str, waiting: Waiting) -> None:
        try:
            if not self.hold(name, waiting):
                waiting.proceed()
        except ServiceError as error:
            waiting.refuse(error)

    def _refuse(self, name: str, error: ServiceError) -> None:
        for waiting in self._take_waiting(name):
            waiting.refuse(error)

    def _take_waiting(self, name: str) -> list[Waiting]:
        self._waiting_until.pop(name, None)
        taken = self._waiting.pop(name, [])
        self._waiters -= len(taken)
        return [waiting for waiting in taken if not waiting.ended()]

    def _without_store(self, name: str, error: ServiceError) -> None:
        """Begin a session that begins anew, report the end of a session that ended here, and refuse other work.

        A session that was lost with its engine may be saved.
        """
        for waiting in self._take_waiting(name):
            is_known = self._table.find(name) is not None or self._table.end_reason(name) not in ("", "lost")
            if waiting.anew or is_known:
                self._do(name, waiting)
            else:
                waiting.refuse(error)
        session = self._table.find(name)
        if session is not None:
            session.anew = True

    # Sessions of this engine.

    def answered(self, session: Session) -> None:
        """Save a session if that is due, after a chunk of it was answered."""
        session.unsaved += 1
        is_due = session.unsaved >= self._checkpoint_chunks or session.anew
        if is_due and self._send is not None and not _is_private(session.id):
            self._save(session)

    def rested(self, session: Session) -> None:
        """Let go of a session that another replica needs, after its last chunk has left."""
        if session.id in self._departing:
            self._release(session)

    def closed(self, session: Session, reason: str) -> None:
        """Note that a session has ended. reason: from metrics.SESSION_ENDS."""
        name = session.id
        if _is_private(name):
            return
        self._departing.discard(name)
        self._released_twice.discard(name)
        if reason == "unbegun":
            self._tell(messages.ReleaseSession(name))
        elif reason not in ("moved", TAKEN_OVER):
            self._tell(messages.DropSession(name, reason if reason in UNREPORTED_ENDS and reason != "lost" else ""))
        if reason != TAKEN_OVER and name != self._proceeding:
            self._claim_again(name)

    def _claim_again(self, name: str) -> None:
        """Ask the store for a session if work waits for it."""
        if name in self._waiting and name not in self._claims:
            self._claim(name)

    def release_some(self, limit: int) -> int:
        """Begin to let go of up to `limit` sessions. Returns how many this engine still holds, at most."""
        names = self._table.names()
        if not limit:
            return sum(not _is_private(name) for name in names)
        for name in names:
            if not limit:
                return len(names)
            if name not in self._departing and not _is_private(name):
                limit -= 1
                self._depart(name)
        return len(self._departing)

    def step(self) -> None:
        """Refuse what has waited for too long."""
        if not self._waiting_until:
            return
        now = self._clock()
        for name in [name for name, until in self._waiting_until.items() if until <= now]:
            if name in self._claims:
                self._claims.discard(name)
                self._without_store(name, _unreachable(name))
            else:
                self._refuse(name, _unreachable(name))

    def _save(self, session: Session) -> None:
        session.unsaved = 0
        self._tell(messages.SaveSession(session.id, session.begun, anew=session.anew), self.states.export(session))

    def _depart(self, name: str) -> None:
        session = self._table.find(name)
        assert session is not None, "only open sessions depart"
        self._departing.add(name)
        if not session.chunks:
            self._release(session)

    def _release(self, session: Session) -> None:
        self._table.wake(session)  # it cannot expire while it is saved
        exact = not session.uncertain
        self._tell(
            messages.SaveSession(session.id, session.begun, exact, releases=True, anew=session.anew),
            self.states.export(session),
        )

    # Messages of the store.

    def handle(self, message: Message, tail: bytes | memoryview) -> None:
        """Handle a message of the store."""
        self._handlers[type(message)](message, tail)

    def _tell(self, message: Message, tail: bytes = b"") -> None:
        if self._send is not None:
            self._send(message, tail)

    def _handle_taken(self, message: messages.SessionTaken, tail: bytes | memoryview) -> None:
        name = message.session
        if name not in self._claims:
            self._handle_late(message)
            return
        self._claims.discard(name)
        match message.outcome:
            case TakeOutcome.NEW:
                self._proceed(name, owned=True)
            case TakeOutcome.TAKEN:
                self._import(message, tail)
            case TakeOutcome.ENDED:
                self._table.note_end(name, message.ended)
                self._proceed(name, owned=False)
            case TakeOutcome.ABSENT:
                self._proceed(name, owned=False)
            case TakeOutcome.NEWER:
                self._without_store(name, _newer(name))
            case _:
                self._without_store(name, _unreachable(name))

    def _handle_late(self, message: messages.SessionTaken) -> None:
        """Give back what came too late, and keep the reason of an end for the next chunk."""
        if self._table.find(message.session) is not None:
            return
        if message.outcome in (TakeOutcome.NEW, TakeOutcome.TAKEN):
            self._tell(messages.ReleaseSession(message.session, message.exact))
        elif message.outcome is TakeOutcome.ENDED:
            self._table.note_end(message.session, message.ended)

    def _import(self, message: messages.SessionTaken, tail: bytes | memoryview) -> None:
        name = message.session
        limit = next((waiting.limit for waiting in self._waiting.get(name, ())), 0)
        try:
            session = self.states.import_file(name, session_file.read(tail, with_ids=True), limit)
        except ServiceError as error:
            self._proceed(name, owned=True, exact=message.exact, unread=error)
            return
        session.begun, session.uncertain = message.begun, not message.exact
        self._proceed(name, owned=True)

    def _handle_save_ended(self, message: messages.SaveEnded, tail: bytes | memoryview) -> None:
        name = message.session
        session, departing = self._table.find(name), message.releases and name in self._departing
        if session is None:
            return
        if message.failed:
            if departing:
                self._departing.discard(name)
                self.states.rest(session)
                self._proceed(name, owned=not session.anew)
        elif departing and not session.chunks and (message.owned or name in self._released_twice):
            self.states.let_go(session)
        elif message.owned:
            session.anew = False
        else:
            self._lose(session)

    def _lose(self, session: Session) -> None:
        """End a session that another replica has taken over. Work that waits learns of it."""
        self.states.lose(session, TAKEN_OVER)
        if self._table.end_reason(session.id):
            self._proceed(session.id, owned=False)
        else:
            self._claim_again(session.id)

    def _handle_wanted(self, message: messages.SessionWanted, tail: bytes | memoryview) -> None:
        name = message.session
        if name in self._claims or name in self._departing:
            return
        if self._table.find(name) is None:
            self._tell(messages.ReleaseSession(name))
        else:
            self._depart(name)

    def _handle_verify(self, message: messages.VerifySession, tail: bytes | memoryview) -> None:
        session = self._table.find(message.session)
        if session is not None and session.steps and message.session not in self._departing:
            self._save(session)


def now_ms() -> int:
    """Return Unix time in milliseconds."""
    return round(datetime.now(UTC).timestamp() * 1000)


def _is_private(name: str) -> bool:
    """Return whether a session belongs to one socket: no other replica can know its name."""
    return session_id(name).startswith(RESERVED_SESSION_PREFIX)


def _unreachable(name: str) -> SessionUnreachable:
    return SessionUnreachable(
        f"session {session_id(name)!r} may be held by another replica, and the session store does not give it: "
        "retry later, or begin it with start = true",
        field="session",
        retry_after=RETRY_SECONDS,
    )


def _newer(name: str) -> SessionUnreachable:
    return SessionUnreachable(
        f"session {session_id(name)!r} was saved by a later version of the service, and this replica cannot read it: retry later",
        field="session",
        retry_after=RETRY_SECONDS,
    )
