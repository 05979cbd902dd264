"""Messages between an engine and the session store."""

from __future__ import annotations

from enum import StrEnum

from service.ipc.messages.message import Message, Reply


class TakeOutcome(StrEnum):
    """The outcome of a TakeSession.

    NEW: this replica owns the session, which begins. TAKEN: it owns the session, whose state follows. ABSENT: there is no session of this
    name. ENDED: the session ended without its client's knowledge. HELD: another replica has it. NEWER: a later version of the service
    saved it. AWAY: the store does not answer, or the owner does not let go.
    """

    NEW = "new"
    TAKEN = "taken"
    ABSENT = "absent"
    ENDED = "ended"
    HELD = "held"
    NEWER = "newer"
    AWAY = "away"


class TakeSession(Message, frozen=True):
    """This replica wants to own a session.

    ownership: its number if the replica gets it; no other has this number. begun: when the session begins, if it does, in milliseconds of
    Unix time. begins: whether it may begin. replaces: if the session still has this ownership, it begins again without a state.
    """

    session: str
    ownership: int
    begun: int
    begins: bool
    replaces: int = 0


class SessionTaken(Message, frozen=True):
    """The outcome of a TakeSession, never HELD. With TAKEN, the state is in the trailing bytes as a session file.

    begun: when the session began. exact: no chunk was answered after this state. ended: why the session ended.
    """

    session: str
    outcome: TakeOutcome
    begun: int = 0
    exact: bool = False
    ended: str = ""


class SaveSession(Message, frozen=True):
    """The state of a session as a session file in the trailing bytes. It is saved if `ownership` is still that of the session.

    exact: no chunk was answered after this state. releases: the session is then free for other replicas, and SaveEnded follows. anew: the
    session began while the store was away, and also replaces a session that began earlier. again: it may have been made before.
    """

    session: str
    ownership: int
    begun: int
    exact: bool = False
    releases: bool = False
    anew: bool = False
    again: bool = False


class SaveEnded(Message, frozen=True):
    """The end of a SaveSession with `releases` or `anew`, or that was refused: `owned` is then false, the ownership has ended.

    ownership, releases: as in the SaveSession. failed: the state was not saved.
    """

    session: str
    ownership: int
    owned: bool
    releases: bool
    failed: bool = False


class ReleaseSession(Message, frozen=True):
    """The engine does not hold this session: others may take its saved state, if it has one.

    ownership: the one that ends, or 0 for any of this replica: without a state, its session is lost. exact: as the state was taken.
    """

    session: str
    ownership: int = 0
    exact: bool = False


class DropSession(Message, frozen=True):
    """The session has ended, and with it this ownership. ended: why, if its client does not know."""

    session: str
    ownership: int
    ended: str = ""


class SessionWanted(Message, frozen=True):
    """Another replica needs this session: save it and let go of it."""

    session: str


class VerifySession(Message, frozen=True):
    """Another replica may have taken over this session: save it, which is then refused."""

    session: str


class ReleaseSessions(Message, frozen=True):
    """Call: save up to `limit` sessions, and let go of them. The reply is SessionsLeft."""

    limit: int


class FlushSessions(Message, frozen=True):
    """Call of the supervisor: save all sessions and let go of them, within `seconds`."""

    seconds: float


class SessionsLeft(Reply, frozen=True):
    """How many sessions this engine still holds."""

    sessions: int
