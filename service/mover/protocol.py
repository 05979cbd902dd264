"""Handles the messages of a mover's engines and of other movers. Pure: it knows no sockets, and the time is an argument.

The mover holds no session and decides about no session: engines do. It asks all other replicas for a session, forwards messages, and
reports which replicas can be reached and which have ended. A restarted mover has forgotten its searches; engines begin them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from service.ipc import messages
from service.ipc.messages import Message, TicketState
from service.mover.search import Outcome, Search

Tail = bytes | memoryview


class MoverProtocol:
    """The mover of one replica."""

    def __init__(
        self,
        replica: str,
        to_engine: Callable[[str, Message, Tail], None],
        to_peer: Callable[[str, Message, Tail], None],
        patience: float,
    ) -> None:
        """to_engine: sends a message to the engine of a session. to_peer: sends a message to the replica with this id."""
        self.replica = replica
        self._to_engine = to_engine
        self._to_peer = to_peer
        self._patience = patience
        self._reachable: set[str] = set()
        self._known: set[str] = set()
        """Replicas that exist, reachable or not."""
        self._gone: set[str] = set()
        """Replicas that have ended."""
        self._complete = True
        self._searches: dict[str, Search] = {}
        """By ticket."""
        self._engine_handlers: dict[type[Message], Callable[[Any, Tail, float], None]] = {
            messages.SeekSession: self._seek,
            messages.SessionGiven: self._pass_to_taker,
            messages.SessionAbsent: self._pass_to_taker,
            messages.AskTicket: self._ask_taker,
            messages.TicketReport: self._pass_to_giver,
            messages.ForgetEnd: self._tell_all,
        }
        self._peer_handlers: dict[type[Message], Callable[[str, Any, Tail, float], None]] = {
            messages.TakeSession: self._pass_on,
            messages.SessionGiven: self._handle_given,
            messages.SessionAbsent: self._handle_absent,
            messages.AskTicket: self._pass_on,
            messages.TicketReport: self._pass_on,
            messages.ForgetEnd: self._pass_on,
            messages.OfferSessions: self._pass_offer,
            messages.AnswersVoid: self._void,
        }
        self.find_checkpoint: Callable[[Search], None] | None = None
        """Called at the end of a search that found nothing; then calls `restored`."""

    # Events.

    def from_engine(self, message: Message, tail: Tail, now: float) -> None:
        """Handle a message of an engine of this replica."""
        self._engine_handlers[type(message)](message, tail, now)

    def from_peer(self, peer: str, message: Message, tail: Tail, now: float) -> None:
        """Handle a message of another replica; messages that only an engine may send are ignored."""
        handler = self._peer_handlers.get(type(message))
        if handler is not None:
            handler(peer, message, tail, now)

    def engine_ended(self) -> None:
        """Void answers after the end of an engine of this replica, which knew of moves."""
        for peer in self._reachable:
            self._to_peer(peer, messages.AnswersVoid(), b"")

    def peers_changed(
        self, reachable: Iterable[str], known: Iterable[str], gone: Iterable[str], *, complete: bool, now: float
    ) -> None:
        """Take over the list of replicas. complete: false while a listed address has an unknown replica."""
        before, self._reachable, self._known = self._reachable, set(reachable), set(known)
        ended = set(gone) - self._gone
        self._gone, self._complete = set(gone), complete
        for search in self._searches.values():
            if ended:
                search.void()
            for lost in before - self._reachable:
                search.lost(lost)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Continue all searches."""
        for search in list(self._searches.values()):
            self._continue(search, now)

    @property
    def searching(self) -> bool:
        """Whether `tick` must be called again soon."""
        return bool(self._searches)

    @property
    def reachable(self) -> set[str]:
        return self._reachable

    # Messages of engines.

    def _seek(self, message: messages.SeekSession, tail: Tail, now: float) -> None:
        if message.ticket in self._searches:
            return
        search = Search(message.session, message.ticket, now, self._patience, message.giver, message.holder)
        self._searches[message.ticket] = search
        self._continue(search, now)

    def _continue(self, search: Search, now: float) -> None:
        for peer, number in search.to_ask(self._reachable, now).items():
            self._to_peer(peer, messages.TakeSession(search.session, search.ticket, self.replica, number), b"")
        outcome = search.outcome(self._known, self._gone, now, complete=self._complete)
        if outcome is None:
            return
        del self._searches[search.ticket]
        if outcome is Outcome.NOWHERE and self.find_checkpoint is not None and not search.giver:
            self.find_checkpoint(search)
        else:
            self._end(search, unreachable=outcome is Outcome.UNREACHABLE)

    def _end(self, search: Search, *, unreachable: bool = False) -> None:
        ended = messages.SeekEnded(search.session, search.ticket, unreachable, search.ended)
        self._to_engine(search.session, ended, b"")

    def restored(self, search: Search, begun: int, state: bytes | None, *, failed: bool) -> None:
        """Forward the checkpoint, if any, of a session that no replica holds. failed: whether the store does not answer."""
        if state is None:
            self._end(search, unreachable=failed)
            return
        given = messages.SessionGiven(search.session, search.ticket, self.replica, "", 0.0, begun, uncertain=True)
        self._to_engine(search.session, given, state)

    def _pass_to_taker(self, message: messages.SessionGiven | messages.SessionAbsent, tail: Tail, now: float) -> None:
        if isinstance(message, messages.SessionAbsent) and message.holder in self._gone:
            # The taker may never have known that replica, and would wait for it.
            message = msgspec.structs.replace(message, holder="")
        self._to_peer(message.taker, message, tail)

    def _pass_to_giver(self, message: messages.TicketReport, tail: Tail, now: float) -> None:
        self._to_peer(message.giver, message, tail)

    def _ask_taker(self, message: messages.AskTicket, tail: Tail, now: float) -> None:
        """Ask the taker of a session, or tell the engine at once that the taker cannot be asked."""
        if message.taker in self._reachable:
            self._to_peer(message.taker, message, b"")
            return
        state = TicketState.UNKNOWN if message.taker in self._gone else TicketState.UNREACHABLE
        report = messages.TicketReport(message.session, message.ticket, message.taker, message.giver, state)
        self._to_engine(message.session, report, b"")

    def _tell_all(self, message: messages.ForgetEnd, tail: Tail, now: float) -> None:
        for peer in self._reachable:
            self._to_peer(peer, message, b"")

    # Messages of other replicas.

    def _pass_on(self, peer: str, message: Any, tail: Tail, now: float) -> None:
        self._to_engine(message.session, message, tail)

    def _pass_offer(self, peer: str, message: messages.OfferSessions, tail: Tail, now: float) -> None:
        for session in message.sessions:
            self._to_engine(session, messages.OfferSessions([session], peer), b"")

    def _handle_given(self, peer: str, message: messages.SessionGiven, tail: Tail, now: float) -> None:
        """Forward a state. The engine decides whether it still counts."""
        self._searches.pop(message.ticket, None)
        self._to_engine(message.session, message, tail)

    def _handle_absent(self, peer: str, message: messages.SessionAbsent, tail: Tail, now: float) -> None:
        search = self._searches.get(message.ticket)
        if search is not None:
            search.absent(peer, message, now)
            self._continue(search, now)

    def _void(self, peer: str, message: messages.AnswersVoid, tail: Tail, now: float) -> None:
        for search in list(self._searches.values()):
            search.void()
            self._continue(search, now)
