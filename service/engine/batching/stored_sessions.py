"""The sessions of one engine in the session store: how they are saved, and how they go to other replicas.

A session that another replica needs is saved after its last chunk, and closes once the store has the state. Private sessions, those of
one socket, are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from service.engine.batching.session_table import TAKEN_OVER, UNREPORTED_ENDS, Session, SessionTable
from service.engine.batching.taken_sessions import SendToStore, TakenSessions, is_private, ownership_of
from service.ipc.messages.message import Message
from service.ipc.messages.store import DropSession, ReleaseSession, SaveEnded, SessionTaken, SessionWanted, VerifySession


class StoredSessions(TakenSessions):
    """Keeps the sessions of one engine in step with their records in the store."""

    def __init__(self, table: SessionTable, clock: Callable[[], float], *, max_waiting: int, checkpoint_chunks: int) -> None:
        """max_waiting: most work that waits. checkpoint_chunks: chunks between two saves of a session."""
        super().__init__(table, clock, max_waiting, checkpoint_chunks)
        self._handlers: dict[type[Message], Callable[[Any, bytes | memoryview], None]] = {
            SessionTaken: self._handle_taken,
            SaveEnded: self._handle_save_ended,
            SessionWanted: self._handle_wanted,
            VerifySession: self._handle_verify,
        }

    def attach(self, send: SendToStore) -> None:
        """The process of the store has started. An earlier one may have ended before it replied."""
        self._send = send
        for claim in self._claims.values():
            self._tell(claim)
        for name in self._table.names():
            session = self._table.get(name)
            session.unsaved = self._checkpoint_chunks  # its last save may not have been made
            if name in self._departing and not self._pending(session):
                self._release(session, again=True)

    def detach(self) -> None:
        """The process of the store has ended. Work waits for its successor."""
        self._send = None

    def handle(self, message: Message, tail: bytes | memoryview) -> None:
        self._handlers[type(message)](message, tail)

    def answered(self, session: Session) -> None:
        """Save a session if that is due, after a chunk of it was answered, and let go of it if another replica needs it."""
        session.unsaved += 1
        if session.unsaved >= self._checkpoint_chunks or ownership_of(session).anew:
            self._save(session)
        self.rested(session)

    def rested(self, session: Session) -> None:
        """Let go of a session that another replica needs, after its last chunk has left."""
        if session.id in self._departing and not self._pending(session):
            self._release(session)

    def closed(self, session: Session, reason: str) -> None:
        """Note that a session has ended. reason: from metrics.SESSION_ENDS."""
        name, ownership = session.id, session.ownership
        self._departing.discard(name)
        if ownership is None or is_private(name):
            return  # nothing began
        if reason == "unbegun":
            self._tell(ReleaseSession(name, ownership.number))
        elif reason not in ("moved", TAKEN_OVER):
            self._tell(DropSession(name, ownership.number, reason if reason in UNREPORTED_ENDS and reason != "lost" else ""))
        if reason != TAKEN_OVER and name != self._proceeding:
            self._claim(name)

    def release_some(self, limit: int) -> int:
        """Begin to let go of up to `limit` sessions. Returns how many this engine still holds, at most."""
        names = self._table.names()
        # The store answers a claim of an open session first.
        ready = (name for name in names if not (name in self._departing or name in self._claims or is_private(name)))
        departing = list(islice(ready, limit))
        for name in departing:
            self._depart(name)
        if limit and len(departing) == limit:
            return len(names)  # to count a hundred thousand sessions a hundred times would take seconds
        return sum(not is_private(name) for name in names)

    def _depart(self, name: str) -> None:
        session = self._table.find(name)
        assert session is not None, "only open sessions depart"
        self._departing.add(name)
        self.rested(session)

    def _release(self, session: Session, *, again: bool = False) -> None:
        """again: an earlier process of the store may have made it."""
        self._table.states.last_use[session.handle] = math.inf  # it cannot expire while it is saved
        self._send_state(session, releases=True, again=again)

    def _handle_save_ended(self, message: SaveEnded, tail: bytes | memoryview) -> None:
        name = message.session
        session = self._table.find(name)
        if session is None or message.ownership != ownership_of(session).number:
            return  # it has ended, or has begun again
        departing = message.releases and name in self._departing
        if message.failed:
            if departing:
                self._departing.discard(name)
                if not self._pending(session):
                    self.states.rest(session)
                self._proceed(name)
        elif not message.owned:
            self.states.lose(session, TAKEN_OVER)
            self._proceed(name)  # work that waits learns of it
        elif not departing:
            session.ownership = ownership_of(session)._replace(anew=False)
        elif not self._pending(session):
            self._table.close(session, "moved")

    def _handle_wanted(self, message: SessionWanted, tail: bytes | memoryview) -> None:
        name = message.session
        if name in self._claims or name in self._departing:
            return
        if self._table.find(name) is None:
            self._tell(ReleaseSession(name))
        else:
            self._depart(name)

    def _handle_verify(self, message: VerifySession, tail: bytes | memoryview) -> None:
        session = self._table.find(message.session)
        begun = session is not None and self._table.states.steps[session.handle]
        if session is not None and begun and message.session not in self._departing:
            self._save(session)
