"""The calls of frontends about one session, and the messages of the session store."""

from __future__ import annotations

from functools import partial

from service.engine.batching.sessions import Sessions
from service.engine.batching.taken_sessions import Waiting
from service.engine.frontend_channel import FrontendChannel
from service.engine.internal_errors import InternalErrors
from service.errors import ServiceError
from service.ipc.channel import Channel, Frame, encode
from service.ipc.messages.inference import Cancel
from service.ipc.messages.message import Done, Refusal, Reply
from service.ipc.messages.sessions import EndSession, ExportSession, FindSession, ImportSession, SessionFound
from service.ipc.messages.store import ReleaseSessions, SessionsLeft

SessionCall = ExportSession | ImportSession | EndSession | FindSession


class SessionCalls:
    """Answers the calls about the sessions of one engine."""

    def __init__(self, sessions: Sessions, errors: InternalErrors) -> None:
        self._sessions = sessions
        self._errors = errors

    def handle(self, frontend: FrontendChannel, frame: Frame, message: SessionCall) -> None:
        """Answer a call about one session, as soon as this replica owns the session, or knows that there is none."""
        stored, refuse = self._sessions.stored, partial(frontend.send_refusal, frame.id)
        answer, begins = partial(self._answer, frontend, frame, message), isinstance(message, ImportSession)
        try:
            waiting = Waiting(answer, refuse, lambda: not frontend.channel.open, begins=begins)
            if stored is None or not stored.hold(message.session, waiting):
                answer()
        except ServiceError as error:
            refuse(error)

    def _answer(self, frontend: FrontendChannel, frame: Frame, message: SessionCall) -> None:
        reply: Reply = Done()
        state = b""
        try:
            match message:
                case ExportSession(session=session):
                    state = self._sessions.export_state(session)
                case ImportSession(session=session, origin=origin, tensors=tensors, session_limit=limit):
                    self._sessions.import_state(session, origin, tensors, frame.tail, limit)
                case FindSession(session=session):
                    reply = SessionFound(self._sessions.model_of(session))
                case EndSession(session=session):
                    self._sessions.end(session)
        except ServiceError as error:
            reply = Refusal.of(error)
        frontend.send(frame.id, encode(reply, frame.id, (state,)))

    def handle_store_frame(self, channel: Channel, frame: Frame) -> None:
        """Handle a message of the session store. After an unexpected exception, the loop continues."""
        stored = self._sessions.stored
        assert stored is not None
        try:
            if isinstance(frame.message, ReleaseSessions):
                channel.send(encode(SessionsLeft(stored.release_some(frame.message.limit)), frame.id))
            elif not isinstance(frame.message, Cancel):
                stored.handle(frame.message, frame.tail)
        except Exception as error:
            self._errors.report("store", error)
