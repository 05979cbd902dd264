"""Takes sessions from the session store for the work that waits for them.

Work for a session that is not open here waits until this replica owns the session, or knows that there is none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from service.engine.batching.session_table import TAKEN_OVER, Ownership, Session, SessionTable
from service.errors import Overloaded, ServiceError, SessionUnreachable, TooManySessions
from service.ipc import session_file
from service.ipc.messages.message import Message
from service.ipc.messages.sessions import RESERVED_SESSION_PREFIX, session_id
from service.ipc.messages.store import DropSession, ReleaseSession, SaveSession, SessionTaken, TakeOutcome, TakeSession
from service.ipc.session_file import SessionFile

RETRY_SECONDS = 1
PATIENCE_SECONDS = 5.0
"""How long work waits for a session. The store takes at most 4 s, and its process may have to start again."""
_ELSEWHERE = (TakeOutcome.TAKEN, TakeOutcome.ENDED, TakeOutcome.ABSENT)
"""Outcomes by which the copy of a session that this replica has is not the newest: another replica has continued or ended it."""
NOT_GIVEN = "may be held by another replica, and the session store does not give it: retry later, or begin it with start = true"
NEWER = "was saved by a later version of the service, and this replica cannot read it: retry later"
SendToStore = Callable[[Message, bytes], None]
"""Sends a message with its trailing bytes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work that waits for a session. `proceed` does it, `refuse` ends it with an error, and nothing waits for it any more if `ended`.

    limit: how many sessions the tenant may have, 0 for no limit. begins: whether it may begin the session. anew: whether it begins the
    session in any case. is_chunk: whether its client learns why the session ended.
    """

    proceed: Callable[[], None]
    refuse: Callable[[ServiceError], None]
    ended: Callable[[], bool]
    limit: int = 0
    begins: bool = False
    anew: bool = False
    is_chunk: bool = False


class SessionStates(Protocol):
    """What `sessions` does with the states of sessions."""

    def export(self, session: Session) -> bytes:
        """Return the state of a session as a session file."""

    def import_file(self, id: str, file: SessionFile, limit: int) -> Session:
        """Open a session with a saved state. Raises ServiceError."""

    def lose(self, session: Session, reason: str) -> None:
        """End a session without its client's knowledge."""

    def rest(self, session: Session) -> None:
        """Start the idle time of a session."""


class TakenSessions:
    """The work that waits for sessions of the store, and the claims by which this replica becomes their owner."""

    states: SessionStates

    def __init__(self, table: SessionTable, clock: Callable[[], float], max_waiting: int, checkpoint_chunks: int) -> None:
        self._table = table
        self._clock = clock
        self._max_waiting = max_waiting
        self._checkpoint_chunks = checkpoint_chunks
        self._waiting: dict[str, list[Waiting]] = {}
        """By session, in the order of arrival."""
        self._waiting_until: dict[str, float] = {}
        self._waiters = 0
        self._claims: dict[str, TakeSession] = {}
        """What the store is asked for: one claim of a session at a time, until the store has replied."""
        self._departing: set[str] = set()
        """The open sessions that this engine lets go of. Their chunks wait."""
        self._proceeding = ""
        """The session whose work proceeds now."""
        self._granted: Ownership | None = None
        """The ownership that this work may use, once."""
        self._send: SendToStore | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the store is asked for a session, or has to take one. Chunks of such a session wait."""
        return bool(self._waiting or self._departing)

    def hold(self, name: str, waiting: Waiting) -> bool:
        """Keep work until this replica owns its session. Returns False if it can be done now. Raises Overloaded."""
        if name == self._proceeding or is_private(name):
            return False
        departing = name in self._departing
        if not departing and self._first(name) is None:
            session = self._table.find(name)
            if session is not None and (not waiting.anew or ownership_of(session).anew):
                return False
            if waiting.is_chunk and not waiting.anew and self._table.end_reason(name) == TAKEN_OVER:
                return False  # the client learns that first
        if self._waiters >= self._max_waiting:
            raise Overloaded(
                f"{self._waiters} requests wait for the session store and SEQSERVE_MAX_WAITING is {self._max_waiting}: retry later",
                retry_after=RETRY_SECONDS,
            )
        self._keep(name, waiting)
        if not departing:
            self._claim(name)
        return True

    def next_ownership(self) -> Ownership:
        """Return the ownership of a session that begins: the granted one, or one that the store does not know."""
        ownership, self._granted = self._granted, None
        return ownership or Ownership(_new_number(), now_ms(), anew=True)

    def step(self) -> None:
        """Refuse what has waited for too long."""
        if not self._waiting_until:
            return
        now = self._clock()
        for name in [name for name, until in self._waiting_until.items() if until <= now]:
            if name in self._departing:
                self._refuse(name, _unreachable(name))
            else:
                self._without_store(name, _unreachable(name))

    def adopt(self, session: Session, ownership: Ownership) -> None:
        """Continue a session with an ownership for which the store has no state of it yet."""
        session.ownership, session.unsaved = ownership, self._checkpoint_chunks
        if self._table.states.steps[session.handle] and not self._pending(session):
            self._save(session)

    def _save(self, session: Session) -> None:
        """Save a session behind the stream, unless it begins again: then the store has no use for its state."""
        begins_again = session.id in self._claims or any(restart.ownership for restart in session.restarts)
        if self._send is not None and not begins_again and not is_private(session.id):
            session.unsaved = 0
            self._send_state(session)

    def _send_state(self, session: Session, *, releases: bool = False, again: bool = False) -> None:
        """again: an earlier process of the store may have released it."""
        ownership, exact = ownership_of(session), releases and not session.uncertain
        message = SaveSession(session.id, ownership.number, ownership.begun, exact, releases, ownership.anew, again)
        self._tell(message, self.states.export(session))

    def _tell(self, message: Message, tail: bytes = b"") -> None:
        if self._send is not None:
            self._send(message, tail)

    def _pending(self, session: Session) -> int:
        """Return how many chunks of a session have no answer."""
        return self._table.states.pending[session.handle]

    def _keep(self, name: str, waiting: Waiting) -> None:
        if self._first(name) is None:
            self._waiting_until[name] = self._clock() + PATIENCE_SECONDS
        self._waiting.setdefault(name, []).append(waiting)
        self._waiters += 1

    def _claim(self, name: str, replaces: int = 0) -> None:
        """Ask the store for a session that work waits for, unless it is asked already.

        replaces: the ownership of this replica. Only its owner begins a session anew, because a claim may outlive what
        waits for it, and a copy may be older than the session of another replica.
        """
        first = self._first(name)
        if name in self._claims or first is None:
            return
        session = self._table.find(name)
        if session is not None:
            replaces = ownership_of(session).number
        claim = TakeSession(name, _new_number(), now_ms(), first.begins or first.anew, replaces if first.anew else 0)
        self._claims[name] = claim
        self._tell(claim)

    def _first(self, name: str) -> Waiting | None:
        """Return the oldest work that still waits for a session."""
        return next((waiting for waiting in self._waiting.get(name, ()) if not waiting.ended()), None)

    def _proceed(self, name: str, claim: TakeSession | None = None) -> None:
        """Do the work that waits for a session, in its order, until some needs an ownership first.

        claim: what the store has granted. If no work has used it, the session gets it if it is open, or the store gets it back.
        """
        granted = None if claim is None else Ownership(claim.ownership, claim.begun)
        for waiting in self._take_waiting(name):
            begins = waiting.anew or (waiting.begins and self._table.find(name) is None)
            if name in self._waiting or (begins and granted is None):
                self._hold_again(name, waiting)
            else:
                granted = self._do(name, waiting, granted)
        if claim is None or granted is None:
            return
        session = self._table.find(name)
        if session is not None:
            self.adopt(session, granted)
        elif claim.replaces:
            self._tell(DropSession(name, granted.number, "lost"))
        else:
            self._tell(ReleaseSession(name, granted.number))

    def _do(self, name: str, waiting: Waiting, granted: Ownership | None) -> Ownership | None:
        """Do work that no longer waits for its session. Returns the ownership if the work did not use it."""
        self._proceeding, self._granted = name, granted
        try:
            waiting.proceed()
            return self._granted
        finally:
            self._proceeding, self._granted = "", None

    def _hold_again(self, name: str, waiting: Waiting) -> None:
        try:
            if not self.hold(name, waiting):
                self._do(name, waiting, None)
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
            has_ended = waiting.is_chunk and self._table.end_reason(name) not in ("", "lost")
            if waiting.anew or has_ended or self._table.find(name) is not None:
                self._do(name, waiting, None)
            else:
                waiting.refuse(error)

    def _handle_taken(self, message: SessionTaken, tail: bytes | memoryview) -> None:
        name = message.session
        claim = self._claims.pop(name, None)
        if claim is None:
            return  # an earlier process of the store has replied
        session = self._table.find(name)
        if session is not None and not ownership_of(session).anew and message.outcome in _ELSEWHERE:
            self.states.lose(session, TAKEN_OVER)
            session = None
        match message.outcome:
            case TakeOutcome.TAKEN if session is None:
                self._import(message, tail, claim)
            case TakeOutcome.NEW | TakeOutcome.TAKEN:
                self._proceed(name, claim)
            case TakeOutcome.ENDED if session is None:
                self._report_end(name, message.ended, claim)
            case TakeOutcome.ENDED:
                self._tell(ReleaseSession(name, claim.ownership))
                self._proceed(name)
            case TakeOutcome.ABSENT:
                self._proceed(name)
            case TakeOutcome.NEWER:
                self._without_store(name, _unreachable(name, NEWER))
            case _:
                self._without_store(name, _unreachable(name))

    def _report_end(self, name: str, ended: str, claim: TakeSession) -> None:
        """Report the end of a session to the first client that continues it. Until a client has learned it, the store keeps it."""
        first = self._first(name)
        if first is None:
            self._tell(ReleaseSession(name, claim.ownership))
        elif first.anew:
            self._claim(name, replaces=claim.ownership)
        else:
            self._table.note_end(name, ended)
            first, *others = self._take_waiting(name)
            self._do(name, first, None)
            is_told = not self._table.end_reason(name)
            self._tell(DropSession(name, claim.ownership) if is_told else ReleaseSession(name, claim.ownership))
            for waiting in others:
                self._hold_again(name, waiting)

    def _import(self, message: SessionTaken, tail: bytes | memoryview, claim: TakeSession) -> None:
        """Open a session with its saved state and do the work that waits for it, or give it back."""
        name, first = message.session, self._first(message.session)
        give_back = ReleaseSession(name, claim.ownership, message.exact)
        if first is None:
            self._tell(give_back)
            return
        try:
            session = self.states.import_file(name, session_file.read(tail, with_ids=True), first.limit)
        except TooManySessions as error:
            self._tell(give_back)
            self._refuse(name, error)
        except ServiceError as error:
            self._begin_anew(name, claim.ownership, give_back, error)
        else:
            session.ownership = Ownership(claim.ownership, message.begun)
            self._table.note(session, uncertain=not message.exact)
            self._proceed(name)

    def _begin_anew(self, name: str, ownership: int, give_back: ReleaseSession, error: ServiceError) -> None:
        """Begin a session again without its saved state, which this replica cannot read, or give it back. error: for all other work."""
        for waiting in self._take_waiting(name):
            if waiting.anew:
                self._keep(name, waiting)
            else:
                waiting.refuse(error)
        if self._first(name) is None:
            self._tell(give_back)
        else:
            self._claim(name, replaces=ownership)


def now_ms() -> int:
    return round(datetime.now(UTC).timestamp() * 1000)


def _new_number() -> int:
    return secrets.randbits(62) + 1


def ownership_of(session: Session) -> Ownership:
    assert session.ownership is not None, "with a session store, every chunk gives its session an ownership"
    return session.ownership


def is_private(name: str) -> bool:
    """Return whether a session belongs to one socket: no other replica can know its name."""
    return session_id(name).startswith(RESERVED_SESSION_PREFIX)


def _unreachable(name: str, why: str = NOT_GIVEN) -> SessionUnreachable:
    return SessionUnreachable(f"session {session_id(name)!r} {why}", field="session", retry_after=RETRY_SECONDS)
