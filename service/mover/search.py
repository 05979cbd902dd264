"""The search for a session at the other replicas, for one claim of an engine. Pure: it decides which replicas to ask and when it ends.

The session is absent only if every other replica says so, each after the last event that could have brought the session to it.
Therefore an answer is void when

- another replica reports that the session moved to the replica that gave the answer, or
- a replica or an engine ends, which may have known of a move.
"""

from __future__ import annotations

from enum import Enum

from service.ipc.messages import AbsentBecause, SessionAbsent

RETRY_SECONDS = 0.01
"""Pause before another question to a replica that cannot answer yet."""


class Outcome(Enum):
    """The result of a search."""

    NOWHERE = "nowhere"
    UNREACHABLE = "unreachable"


class Search:
    """One search. `ask` is called with the id of each replica to ask, now or again."""

    def __init__(self, session: str, ticket: str, now: float, patience: float, giver: str = "", holder: str = "") -> None:
        """giver: the only replica to ask, empty for all. holder: the replica that must answer in any case, or empty."""
        self.session = session
        self.ticket = ticket
        self.giver = giver
        self.until = now + patience
        self.ended = ""
        """Why the session ended at another replica without its client's knowledge."""
        self._needed = {name for name in (holder, giver) if name}
        """Replicas that must answer even if they are not known yet."""
        self._answered: set[str] = set()
        self._asked: dict[str, float] = {}
        """Replicas without an answer, and when to ask them again."""
        self._round = 0
        self._rounds: dict[str, int] = {}
        """The number of the newest question to each replica."""

    def to_ask(self, replicas: set[str], now: float) -> dict[str, int]:
        """Return which of the replicas that can be reached must be asked now, and the number of the question to each."""
        wanted = replicas & {self.giver} if self.giver else replicas
        due = [name for name in sorted(wanted) if name not in self._answered and self._asked.get(name, now) <= now]
        for name in due:
            self._round += 1
            self._rounds[name], self._asked[name] = self._round, self.until
        return {name: self._rounds[name] for name in due}

    def absent(self, replica: str, answer: SessionAbsent, now: float) -> None:
        """Note that a replica does not give the session."""
        if replica in self._answered or self._rounds.get(replica) != answer.round:
            return  # a repeated answer, or a void answer
        self.ended = answer.ended or self.ended
        if answer.because in (AbsentBecause.CLAIMED, AbsentBecause.MOVING):
            self._asked[replica] = now + RETRY_SECONDS
            return
        self._answered.add(replica)
        if answer.holder:
            self._needed.add(answer.holder)
            self._forget(answer.holder)

    def _forget(self, replica: str) -> None:
        """Ask a replica again: its last answer no longer counts."""
        self._answered.discard(replica)
        self._asked.pop(replica, None)
        self._rounds.pop(replica, None)

    def void(self) -> None:
        """Void all answers: a replica or an engine has ended."""
        for replica in list(self._rounds):
            self._forget(replica)

    def lost(self, replica: str) -> None:
        """The connection to a replica broke: its answer may never come."""
        self._asked.pop(replica, None)

    def outcome(self, replicas: set[str], gone: set[str], now: float, *, complete: bool) -> Outcome | None:
        """Return the result of the search, None while it continues.

        replicas: the existing replicas, reachable or not. gone: the replicas that have ended. complete: whether all replicas are known.
        """
        needed = {self.giver} if self.giver else replicas | self._needed
        if (complete or self.giver) and needed - gone <= self._answered:
            return Outcome.NOWHERE
        return Outcome.UNREACHABLE if now >= self.until else None
