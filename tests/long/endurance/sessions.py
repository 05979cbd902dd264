"""Clients of sessions: each chunk continues from the sums before it, and each session that is lost or expired is reported exactly once.

A client knows which of its sessions were in an engine that was killed, and which may have expired or ended with their version. All other
reports are wrong, and so are a second report, and a session that begins again without a report.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.target import Target
from service.ipc import session_file
from service.ipc.session_placement import engine_of_session
from tests.accumulator import RESTART_STEPS, Account
from tests.long.endurance.faults import ENGINES, Explained
from tests.long.endurance.load import Tally

IDLE_SECONDS = 20.0
"""After this time without a chunk a session expires."""
ABANDONED_SECONDS = 1.5 * IDLE_SECONDS
ENDS, ABANDONED, EXPORTED = 0.02, 0.001, 0.004
"""Shares of the chunks that end their session, of the turns in which a session is left alone until it expires, and of the turns in which it
is exported, deleted and imported."""
MOST_STEPS = 4
PAUSE_SECONDS = 0.02
"""After a refusal because an engine is being replaced."""
RETRY = {"engine_lost", "overloaded", "unavailable"}
REPORTS = {"session_lost": "lost", "session_expired": "expired"}
NEW = Account()
CHUNKS = [
    (f"[{','.join(str(value + 1) for value in values)}]", sum(values), len(values))
    for values in (random.Random(number).choices((-1, 0, 1), k=1 + number % MOST_STEPS) for number in range(200))
]
"""Chunks as JSON, with the sum and the number of steps that each adds."""


class Output(msgspec.Struct):
    value: tuple[float, float]


class Told(msgspec.Struct):
    steps: int


class Reply(msgspec.Struct):
    """An answer to a chunk, or an error."""

    outputs: list[Output] = []
    version: str = ""
    session: Told | None = None
    code: str = ""
    error: str = ""


class Failure(msgspec.Struct):
    """An error, or anything else."""

    code: str = ""
    error: str = ""


CHUNK_DECODER, DECODER = msgspec.json.Decoder(Reply), msgspec.json.Decoder(Failure)


class Session:
    """A session as its client knows it.

    place: its engine.
    heard: when its last answered chunk was sent.
    lost, maybe: its engine was killed while it rested, or while a request of it was on its way.
    reported: its client has just received the report of its end.
    version: of the model.
    file, deleted: its exported state, and whether it was deleted then.
    """

    __slots__ = ("account", "deleted", "file", "heard", "lost", "maybe", "name", "open", "place", "reported", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.place = engine_of_session(name, ENGINES)
        self.account = NEW
        self.open = self.lost = self.maybe = self.reported = self.deleted = False
        self.heard = 0.0
        self.version = ""
        self.file: bytes | None = None

    def close(self, *, reported: bool = False) -> None:
        self.open = self.lost = self.maybe = self.deleted = False
        self.account, self.file, self.reported = NEW, None, reported


class SessionClient:
    """A client and its sessions."""

    def __init__(self, target: Target, names: Sequence[str], explained: Explained, tally: Tally, chance: random.Random) -> None:
        self._target = target
        self._sessions = [Session(name) for name in names]
        self._abandoned: deque[tuple[float, Session]] = deque()
        self._explained = explained
        self._tally = tally
        self._chance = chance
        self._now: Session | None = None
        """The session of the request on its way."""
        self._what: Any = None
        self.pause = self.leaves = 0.0

    def engine_was_killed(self, place: int) -> None:
        """Note which sessions are lost, and which may be."""
        for session in (*self._sessions, *(session for _, session in self._abandoned)):
            if session.place == place and session is self._now:
                session.maybe = True
            elif session.place == place and session.open and not session.deleted:
                self._tally.counts["sessions in killed engines"] += not session.lost
                session.lost = True

    def next_request(self, ending: bool) -> bytes | None:
        session = self._last() if ending else self._next()
        self._now = session
        if session is None:
            return None
        if session.file is not None:
            return self._import(session)
        if session.open and not ending and self._chance.random() < EXPORTED:
            self._what = "export"
            return self._request("GET", session)
        return self._chunk(session, ends=ending or self._chance.random() < ENDS)

    def answered(self, status: int, body: bytes, sent: float) -> None:
        session, what = self._now, self._what
        assert session is not None
        self._now = None
        if what == "export" and status == 200:
            self._exported(session, body)
            return
        reply: Any = (DECODER if isinstance(what, str) else CHUNK_DECODER).decode(body)
        if reply.code in RETRY:
            self._tally.counts["refused meanwhile"] += 1
            self.pause = PAUSE_SECONDS
            if reply.code == "engine_lost":
                self._explained.refused()
            if what == "delete":
                session.deleted = False
        elif what == "export":
            self._check_report(session, reply)
        elif what == "delete":
            self._deleted(session, reply)
        elif what == "import":
            self._imported(session, reply, sent)
        elif reply.code in REPORTS:
            self._reported(session, reply, what[0], sent)
        elif reply.code:
            self._refused(session, reply, what[0])
        else:
            self._continued(session, reply, what, sent)

    def unanswered(self, reason: str) -> None:
        self._tally.wrong(f"{self._now.name if self._now else 'a connection'}: {reason}")
        if self._now is not None:
            self._now.close()
            self._now = None

    # Requests.

    def _next(self) -> Session:
        """Return a random session, or an abandoned session that must have expired."""
        if self._abandoned and self._abandoned[0][0] <= time.monotonic():
            _, session = self._abandoned.popleft()
            self._sessions.append(session)
            return session
        index = int(self._chance.random() * len(self._sessions))
        session = self._sessions[index]
        if session.open and session.file is None and len(self._sessions) > 1 and self._chance.random() < ABANDONED:
            self._sessions[index] = self._sessions[-1]
            self._sessions.pop()
            self._abandoned.append((time.monotonic() + ABANDONED_SECONDS, session))
            self._tally.counts["abandoned"] += 1
            return self._next()
        return session

    def _last(self) -> Session | None:
        """Return a session that is still to be ended."""
        while self._abandoned:
            self._sessions.append(self._abandoned.popleft()[1])
        while self._sessions and not (self._sessions[-1].open or self._sessions[-1].file is not None):
            self._sessions.pop()
        return self._sessions[-1] if self._sessions else None

    def _chunk(self, session: Session, *, ends: bool) -> bytes:
        """Return a chunk. The first of a session may have start = true, but not after a report, to notice a second report."""
        values, sum, steps = CHUNKS[int(self._chance.random() * len(CHUNKS))]
        starts: bool | None = None
        if self._chance.random() < 0.5:
            starts = not (session.open or session.reported)
        account = Account(session.account.sum + sum, session.account.steps + steps)
        ends = ends or account.steps > RESTART_STEPS
        self._what = (starts, ends, account)
        flags = ("" if starts is None else f',"start":{"true" if starts else "false"}') + (',"end":true' if ends else "")
        body = f'{{"model":"accumulator","session":"{session.name}","inputs":[{values}]{flags}}}'.encode()
        return self._target.request(body)

    def _import(self, session: Session) -> bytes:
        assert session.file is not None
        if not session.deleted:
            self._what, session.deleted = "delete", True
            return self._request("DELETE", session)
        self._what = "import"
        return self._request("PUT", session, session.file)

    def _request(self, verb: str, session: Session, body: bytes = b"") -> bytes:
        path, host = f"/sessions/{session.name}/state", self._target.host
        head = (
            f"{verb} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}"
        )
        return head.encode() + b"\r\n\r\n" + body

    # Answers.

    def _continued(self, session: Session, reply: Reply, what: tuple[bool | None, bool, Account], sent: float) -> None:
        """Compare an answer with the account of the session."""
        starts, ends, account = what
        told = Account.told(reply.outputs[0].value)
        steps = -1 if reply.session is None else reply.session.steps
        if (told, steps) != (account, account.steps):
            self._tally.wrong(f"{session.name}: {told} and {steps} steps, not {account}")
        if session.lost:
            self._tally.wrong(f"{session.name} goes on although its engine was killed")
        if starts is False and not session.open:
            self._tally.wrong(f"{session.name} goes on although it was not open")
        self._tally.counts["chunks"] += 1
        if ends:
            self._tally.counts["ended"] += 1
            session.close()
            return
        session.open, session.account, session.version, session.heard = True, told, reply.version, sent
        session.lost = session.reported = False
        self._settle(session, sent)

    def _settle(self, session: Session, sent: float) -> None:
        """After an answer to a request that was in no killed engine, the session is there."""
        if session.maybe and not self._explained.may_be_in_a_killed_engine(session.place, sent):
            session.maybe = False

    def _reported(self, session: Session, reply: Reply, starts: bool | None, sent: float) -> None:
        """Record the end of a session, which the service reports once."""
        kind = REPORTS[reply.code]
        on_its_way = session.maybe or self._explained.may_be_in_a_killed_engine(session.place, sent)
        if starts:
            self._tally.wrong(f"{session.name} was to start and is reported as {kind}")
        elif session.open:
            self._check_report(session, reply, on_its_way=on_its_way)
            self._tally.counts[f"{kind} and reported"] += 1
            self._tally.counts["sessions in killed engines, reported"] += session.lost
        elif not (kind == "lost" and on_its_way):
            self._tally.wrong(f"{session.name} is not open and is reported as {kind}")
        session.close(reported=True)

    def _check_report(self, session: Session, reply: Reply | Failure, *, on_its_way: bool = False) -> None:
        """Check that the end of an open session has a cause that its client knows."""
        if reply.code == "session_expired" and not session.lost:
            explained = time.monotonic() - session.heard >= IDLE_SECONDS
        elif reply.code == "session_lost":
            explained = session.lost or session.maybe or on_its_way or self._explained.unloaded(session.version)
        else:
            explained = False
        if not explained:
            self._tally.wrong(f"{session.name} ended without a cause: {reply.code}, {reply.error}")

    def _refused(self, session: Session, reply: Reply, starts: bool | None) -> None:
        """Check a refusal: only a chunk that does not start a session is refused, if the session is not open and that was reported."""
        if reply.code == "unknown_session" and starts is False and session.reported:
            self._tally.counts["unknown after the report"] += 1
            return
        flags = f"start = {starts}, open = {session.open}, version = {session.version}"
        self._tally.wrong(f"{session.name}, {flags}: {reply.code}, {reply.error}")
        session.close()

    # Exports.

    def _exported(self, session: Session, file: bytes) -> None:
        steps = session_file.read(file).origin.steps
        if steps != session.account.steps:
            self._tally.wrong(f"{session.name} was exported with {steps} steps, not {session.account.steps}")
        session.file = file
        self._tally.counts["exports"] += 1

    def _deleted(self, session: Session, reply: Failure) -> None:
        """The session is deleted, or it was in a killed engine; a session that has ended keeps the report of its end."""
        if not reply.code or (reply.code == "unknown_session" and session.maybe):
            session.lost = session.maybe = False
            return
        self._check_report(session, reply)
        session.deleted, session.file = False, None

    def _imported(self, session: Session, reply: Failure, sent: float) -> None:
        if reply.code == "session_conflict" and session.version in self._explained.replaced:
            session.close()
            return
        if reply.code:
            self._tally.wrong(f"{session.name} could not be imported: {reply.code}, {reply.error}")
            session.close()
            return
        session.deleted, session.file, session.heard = False, None, sent
        self._tally.counts["imports"] += 1
        self._settle(session, sent)
