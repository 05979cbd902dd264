"""Sessions that come from other replicas or from a checkpoint, and sessions that go there. `moves` decides, this module carries it out.

Work for a session that is not open here waits until the location of the session is known. A chunk waits in this module and reaches the
batcher's queue afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from service.engine.batching.moves import Moves, Take
from service.engine.batching.session_table import SessionTable
from service.engine.batching.ticket import Session
from service.errors import Overloaded, ServiceError, SessionUnreachable
from service.ipc import messages, session_file
from service.ipc.messages import RESERVED_SESSION_PREFIX, AbsentBecause, Message, TicketState, session_id
from service.ipc.session_file import SessionFile
from service.metrics import Metrics

RETRY_SECONDS = 1
SendToMover = Callable[[Message, bytes], None]
"""Sends a message with its trailing bytes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Work that waits for a session. `proceed` does it, `refuse` ends it with an error, and nothing waits for it any more if `ended`.

    limit: how many sessions the tenant may have, 0 for no limit.
    """

    proceed: Callable[[], None]
    refuse: Callable[[ServiceError], None]
    ended: Callable[[], bool]
    limit: int = 0


class _KeptState(NamedTuple):
    """A state as a session file, the beginning and the steps of its session, and until when it is kept."""

    begun: int
    steps: int
    file: bytes
    until: float


class Transfers:
    """The moves of one engine's sessions. `sessions` exports and imports states."""

    def __init__(
        self,
        moves: Moves,
        table: SessionTable,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        replica: str,
        patience: float,
        max_waiting: int,
        checkpoint_chunks: int = 0,
    ) -> None:
        """replica: the id of this replica. patience: how long work waits. checkpoint_chunks: chunks between two checkpoints, 0 for none."""
        self._moves = moves
        self._table = table
        self._metrics = metrics
        self._clock = clock
        self._patience = patience
        self._max_waiting = max_waiting
        self.checkpoint_chunks = checkpoint_chunks
        self._waiting: dict[str, list[Waiting]] = {}
        """By session, in the order of arrival."""
        self._until: dict[str, float] = {}
        """When the work that waits for a departure is refused."""
        self._waiters = 0
        self._proceeding = ""
        """The session whose work proceeds now, because no other replica holds it."""
        self._kept: dict[str, _KeptState] = {}
        """States of sessions whose taker ended before it confirmed: it may have answered more chunks."""
        self._replica = replica
        self._send: SendToMover | None = None
        self.export: Callable[[Session], bytes]
        self.import_file: Callable[[str, SessionFile, int], Session]
        self.discard: Callable[[Session], None]
        self._handlers: dict[type[Message], Callable[[Any, bytes | memoryview], None]] = {
            messages.SeekEnded: self._handle_seek_ended,
            messages.TakeSession: self._handle_take,
            messages.SessionGiven: self._handle_given,
            messages.AskTicket: self._handle_ask,
            messages.TicketReport: self._handle_report,
            messages.OfferSessions: self._handle_offer,
            messages.ForgetEnd: self._handle_forget,
        }
        self.handles = frozenset(self._handlers)

    def attach(self, send: SendToMover) -> None:
        """A mover has started. It learns of every claim: an earlier mover may have ended in the middle of a search."""
        self._send = send
        for session in self._moves.claims:
            self._seek(session)

    def detach(self) -> None:
        """The mover has ended. Claims wait for its successor, until they are too old."""
        self._send = None

    def open_sessions(self) -> list[str]:
        """Return the names of the sessions that other replicas can take."""
        return [name for name in self._table.names() if not _is_private(name)]

    # Work for a session.

    def hold(self, session: str, waiting: Waiting) -> bool:
        """Keep work until the location of its session is known. Returns False if it can be done now, or is refused with an error."""
        if session == self._proceeding or _is_private(session):
            return False
        departing = session in self._moves.departures
        if self._table.find(session) is not None and not departing:
            return False
        if self._waiters >= self._max_waiting:
            raise Overloaded(
                f"{self._waiters} chunks wait for sessions of other replicas and SEQSERVE_MAX_WAITING is {self._max_waiting}: "
                "retry later",
                retry_after=RETRY_SECONDS,
            )
        self._waiting.setdefault(session, []).append(waiting)
        self._waiters += 1
        if departing:
            self._until.setdefault(session, self._clock() + self._patience)
            if not self._moves.departures[session].finishing:
                self._ask(session)
        elif session not in self._moves.claims:
            self._claim(session)
        return True

    def _claim(self, session: str, giver: str = "") -> None:
        self._moves.claim(session, self._clock(), giver)
        self._seek(session)

    def _seek(self, session: str) -> None:
        claim = self._moves.claims[session]
        self._tell(messages.SeekSession(session, claim.ticket, claim.giver, self._moves.holder(session)))

    def _ask(self, session: str) -> None:
        departure = self._moves.departures[session]
        self._tell(messages.AskTicket(session, departure.ticket, departure.taker, self._replica))

    def _proceed(self, session: str) -> None:
        """Do the work that waits for a session, in its order. No other replica holds the session."""
        self._proceeding = session
        try:
            for waiting in self._take_waiting(session):
                waiting.proceed()
        finally:
            self._proceeding = ""
        if self._table.find(session) is not None:
            self._moves.opened(session)

    def _refuse(self, session: str, error: ServiceError) -> None:
        for waiting in self._take_waiting(session):
            waiting.refuse(error)

    def _take_waiting(self, session: str) -> list[Waiting]:
        self._until.pop(session, None)
        waiting = self._waiting.pop(session, [])
        self._waiters -= len(waiting)
        return [one for one in waiting if not one.ended()]

    def _search_again(self, session: str) -> None:
        """Begin a new claim for the work that still waits, if there is any."""
        self._until.pop(session, None)
        if session in self._waiting:
            self._claim(session)

    # Sessions of this engine.

    def rested(self, session: Session) -> None:
        """Give a session to the replica that waits for it, if any, after its last chunk has left."""
        departure = self._moves.departures.get(session.id)
        if departure is not None and departure.finishing:
            self._moves.finished(session.id, self._clock())
            self._give(session)

    def closed(self, session: Session, reason: str) -> None:
        """Note that a session has ended. reason: from metrics.SESSION_ENDS."""
        departure = self._moves.departures.get(session.id)
        if departure is not None:
            self._moves.closed(session.id)
            if departure.finishing:
                self._refuse_take(session.id, departure.ticket, departure.taker, departure.round)
            self._search_again(session.id)
        if self.checkpoint_chunks and reason not in ("moved", "unbegun"):
            self._tell(messages.DropCheckpoint(session.id, session.begun))

    def answered(self, session: Session) -> None:
        """Save a checkpoint if it is due, after a chunk of a session was answered."""
        if not self.checkpoint_chunks or _is_private(session.id):
            return
        session.unsaved += 1
        if session.unsaved >= self.checkpoint_chunks and self._send is not None:
            self._save(session)

    def save_all(self) -> None:
        """Save a checkpoint of each session that has changed since its last."""
        for session in [session for name in self.open_sessions() if (session := self._table.find(name)) is not None]:
            if session.unsaved and session.steps and self.checkpoint_chunks:
                self._save(session)

    def _save(self, session: Session) -> None:
        session.unsaved = 0
        self._tell(messages.SaveCheckpoint(session.id, session.begun, session.steps), self.export(session))

    def step(self) -> None:
        """Refuse what has waited for too long, and ask again for departures without an outcome."""
        if not self._moves.claims and not self._moves.departures and not self._kept:
            return
        now = self._clock()
        while self._kept and (oldest := next(iter(self._kept))) and self._kept[oldest].until <= now:
            del self._kept[oldest]
        for session in self._moves.late_claims(now):
            self._moves.give_up(session)
            self._refuse(session, _unreachable(session))
        for session in [session for session, until in self._until.items() if until <= now]:
            self._refuse(session, _unreachable(session))
        for session in self._moves.to_ask(now):
            self._ask(session)

    # Messages of the mover.

    def handle(self, message: Message, tail: bytes | memoryview) -> None:
        """Handle a message of one of the types in `handles`."""
        self._handlers[type(message)](message, tail)

    def _tell(self, message: Message, tail: bytes = b"") -> None:
        if self._send is not None:
            self._send(message, tail)

    def _handle_seek_ended(self, message: messages.SeekEnded, tail: bytes | memoryview) -> None:
        session = message.session
        if not self._moves.is_valid(session, message.ticket, self._clock()):
            return
        claim = self._moves.claims[session]
        self._moves.give_up(session)
        if claim.giver:
            self._search_again(session)  # the claim asked a single replica
        elif message.unreachable:
            self._metrics.moves_refused.add("unreachable")
            self._refuse(session, _unreachable(session))
        else:
            if message.ended:
                self._table.note_end(session, message.ended)
                self._tell(messages.ForgetEnd(session))
            kept = self._kept.pop(session, None)
            if kept is not None:
                self._import_kept(session, kept)
            self._proceed(session)

    def _import_kept(self, session: str, kept: _KeptState) -> None:
        try:
            imported = self.import_file(session, session_file.read(kept.file, with_ids=True), 0)
        except ServiceError:
            return  # for example, its model is no longer served: the session is lost
        imported.begun, imported.uncertain = kept.begun, True

    def _handle_given(self, message: messages.SessionGiven, tail: bytes | memoryview) -> None:
        session, now = message.session, self._clock()
        if not self._moves.is_valid(session, message.ticket, now):
            self._report(message, self._moves.state_of(session, message.ticket))
            self._metrics.moves_refused.add("late")
            return
        claim, kept = self._moves.claims[session], self._kept.pop(session, None)
        limit = next((waiting.limit for waiting in self._waiting.get(session, [])), 0)
        try:
            file = session_file.read(tail, with_ids=True)
            if kept is not None and not message.giver and (kept.begun, kept.steps) > (message.begun, file.origin.steps):
                self._moves.give_up(session)
                self._import_kept(session, kept)
                self._proceed(session)
                return
            imported = self.import_file(session, file, limit)
        except ServiceError as error:
            self._moves.give_up(session)
            self._report(message, TicketState.ABANDONED)
            self._metrics.moves_refused.add("refused")
            self._refuse(session, error)
            return
        imported.begun, imported.uncertain = message.begun, message.uncertain
        self._table.rest_since(imported, now - message.idle)
        self._moves.imported(session)
        if message.giver:
            self._report(message, TicketState.IMPORTED)
            self._metrics.moved_in.add()
            self._metrics.move_seconds.observe(max(0.0, now - claim.since))
        self._proceed(session)

    def _report(self, given: messages.SessionGiven, state: TicketState) -> None:
        if given.giver:
            self._tell(messages.TicketReport(given.session, given.ticket, given.taker, given.giver, state))

    def _handle_take(self, message: messages.TakeSession, tail: bytes | memoryview) -> None:
        name = message.session
        session = self._table.find(name)
        is_busy = session is not None and bool(session.chunks)
        match self._moves.take(message, self._clock(), is_open=session is not None, is_busy=is_busy):
            case Take.GIVE:
                assert session is not None
                self._table.wake(session)  # it cannot expire while it is frozen
                self._give(session)
            case Take.REFUSE:
                self._refuse_take(name, message.ticket, message.taker, message.round)

    def _give(self, session: Session) -> None:
        departure = self._moves.departures[session.id]
        idle = max(0.0, self._clock() - session.idle_since)
        given = messages.SessionGiven(
            session.id, departure.ticket, departure.taker, self._replica, idle, session.begun, session.uncertain
        )
        self._tell(given, self.export(session))

    def _refuse_take(self, name: str, ticket: str, taker: str, number: int) -> None:
        because = self._moves.refusal(name, ticket)
        ended = "" if because is AbsentBecause.MOVING else self._table.end_reason(name)
        holder = self._moves.holder(name)
        self._tell(messages.SessionAbsent(name, ticket, taker, self._replica, number, because, holder, ended))
        if because is AbsentBecause.MOVING and not self._moves.departures[name].finishing:
            self._ask(name)
        if because is AbsentBecause.YIELDED:
            self._moves.give_up(name)
            self._metrics.moves_refused.add("yielded")
            self._search_again(name)

    def _handle_ask(self, message: messages.AskTicket, tail: bytes | memoryview) -> None:
        state = self._moves.state_of(message.session, message.ticket)
        self._tell(messages.TicketReport(message.session, message.ticket, message.taker, message.giver, state))

    def _handle_report(self, message: messages.TicketReport, tail: bytes | memoryview) -> None:
        name = message.session
        if not self._moves.settle(name, message.ticket, message.state):
            if message.state is TicketState.UNREACHABLE and name in self._until:
                self._metrics.moves_refused.add("unreachable")
                self._refuse(name, _unreachable(name))
            return
        session = self._table.find(name)
        assert session is not None, "a departing session is open"
        if message.state is TicketState.IMPORTED:
            self._metrics.moved_out.add()
            self.discard(session)
            self._table.close(session, "moved")
            self._search_again(name)
            return
        if message.state is TicketState.UNKNOWN:
            self._keep(session)
            self._search_again(name)
            return
        if not session.chunks:
            self._table.rest(session, self._clock())
        self._proceed(name)

    def _keep(self, session: Session) -> None:
        """End a session whose taker has ended, and keep its state for a client without a later answer."""
        self._metrics.moves_refused.add("taker_lost")
        until = self._clock() + self._table.idle_seconds
        self._kept[session.id] = _KeptState(session.begun, session.steps, self.export(session), until)
        self.discard(session)
        self._table.lose(session, "lost")

    def _handle_offer(self, message: messages.OfferSessions, tail: bytes | memoryview) -> None:
        for session in message.sessions:
            if self._table.find(session) is None and session not in self._moves.claims:
                self._claim(session, message.giver)

    def _handle_forget(self, message: messages.ForgetEnd, tail: bytes | memoryview) -> None:
        self._kept.pop(message.session, None)
        self._table.forget_end(message.session)


def now_ms() -> int:
    """Return Unix time in milliseconds."""
    return round(datetime.now(UTC).timestamp() * 1000)


def _is_private(session: str) -> bool:
    """Return whether a session belongs to one socket: no other replica can know its name."""
    return session_id(session).startswith(RESERVED_SESSION_PREFIX)


def _unreachable(session: str) -> SessionUnreachable:
    return SessionUnreachable(
        f"session {session_id(session)!r} may be held by another replica, which does not answer: retry later",
        field="session",
        retry_after=RETRY_SECONDS,
    )
