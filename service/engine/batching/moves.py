"""Which sessions of one engine are on the way to or from other replicas. Pure: it knows neither states nor sockets, and the time is an
argument.

Two things exist here. A *claim* is this engine's attempt to become the owner of a session that it does not hold: it asks all others.
A *departure* is a session that another replica has taken: it is frozen here until that replica is known to have it or not. Each claim has a
ticket, which names the engine process and the claim. Every question about a move names a ticket, so a message that is lost,
late or repeated never counts for another attempt. docs/decisions/moving-sessions.md has the protocol and its cases.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from service.ipc.messages import AbsentBecause, TakeSession, TicketState

MAX_TICKETS = 1 << 16
"""Tickets that brought a session here, and sessions that moved away, are remembered up to this number each."""
ASK_SECONDS = 1.0
"""Interval of the questions to the taker of a session about a ticket that it has not confirmed."""


@dataclass(slots=True)
class Claim:
    """An attempt to become the owner of a session. giver: the only replica to ask, empty for all of them."""

    ticket: str
    since: float
    until: float
    giver: str = ""


@dataclass(slots=True)
class Departure:
    """A session that the replica `taker` has taken, or will have when its chunks have run (`finishing`)."""

    ticket: str
    taker: str
    round: int
    ask_at: float
    finishing: bool = False


class Take(StrEnum):
    """The decision about a session that another replica wants to take."""

    GIVE = "give"
    FINISH = "finish"
    """The session moves as soon as its chunks have run."""
    REFUSE = "refuse"


class Moves:
    """The claims and departures of one engine process."""

    def __init__(self, instance: str, claim_seconds: float) -> None:
        """instance: a name that no other engine process has. claim_seconds: after this time a claim counts for nothing."""
        self._instance = instance
        self._claim_seconds = claim_seconds
        self._count = 0
        self.claims: dict[str, Claim] = {}
        """By session, as the departures."""
        self.departures: dict[str, Departure] = {}
        self._imported: OrderedDict[str, None] = OrderedDict()
        """Tickets that brought a session here."""
        self._forgotten = ""
        """The newest ticket that is not remembered any more."""
        self._holders: OrderedDict[str, str] = OrderedDict()
        """The replica to which each session moved."""

    # The side of the taker.

    def claim(self, session: str, now: float, giver: str = "") -> Claim:
        """Begin a claim. There must be none for this session."""
        assert session not in self.claims, "a session has one claim at a time"
        self._count += 1
        claim = self.claims[session] = Claim(f"{self._instance}.{self._count:012d}", now, now + self._claim_seconds, giver)
        return claim

    def is_valid(self, session: str, ticket: str, now: float) -> bool:
        """Return whether a ticket is that of the session's claim, and in time."""
        claim = self.claims.get(session)
        return claim is not None and claim.ticket == ticket and now < claim.until

    def give_up(self, session: str) -> None:
        """End a claim that did not bring the session here."""
        del self.claims[session]

    def imported(self, session: str) -> None:
        """End a claim that brought the session here: this engine is its owner from now on."""
        self._imported[self.claims.pop(session).ticket] = None
        self._holders.pop(session, None)
        if len(self._imported) > MAX_TICKETS:
            self._forgotten, _ = self._imported.popitem(last=False)

    def opened(self, session: str) -> None:
        """Note that a session of this name begins here."""
        self._holders.pop(session, None)

    def state_of(self, session: str, ticket: str) -> TicketState:
        """Return the state of a claim of this engine."""
        if not ticket.startswith(self._instance + "."):
            return TicketState.UNKNOWN  # of an engine process that has ended
        if ticket in self._imported:
            return TicketState.IMPORTED
        claim = self.claims.get(session)
        if claim is not None and claim.ticket == ticket:
            return TicketState.PENDING
        return TicketState.UNKNOWN if ticket <= self._forgotten else TicketState.ABANDONED

    def holder(self, session: str) -> str:
        """Return the replica to which a session moved last, empty if unknown."""
        return self._holders.get(session, "")

    # The side of the giver.

    def take(self, wish: TakeSession, now: float, *, is_open: bool, is_busy: bool) -> Take:
        """Decide whether another replica gets a session. A session that moves is frozen from now on.

        is_open: whether the session is open here; is_busy: whether it has chunks without an answer.
        """
        session = wish.session
        departure = self.departures.get(session)
        if departure is not None:
            if departure.ticket != wish.ticket:
                return Take.REFUSE
            departure.round = wish.round
            return Take.FINISH if departure.finishing else Take.GIVE
        if not is_open:
            return Take.REFUSE
        self.departures[session] = Departure(wish.ticket, wish.taker, wish.round, now + ASK_SECONDS, is_busy)
        return Take.FINISH if is_busy else Take.GIVE

    def refusal(self, session: str, ticket: str) -> AbsentBecause:
        """Return why a session does not move. If two replicas claim a session that no replica holds, the smaller ticket wins.

        The claim of this engine then ends: nothing that arrives for it later counts.
        """
        if session in self.departures:
            return AbsentBecause.MOVING
        claim = self.claims.get(session)
        if claim is None:
            return AbsentBecause.ABSENT
        return AbsentBecause.CLAIMED if claim.ticket < ticket else AbsentBecause.YIELDED

    def finished(self, session: str, now: float) -> None:
        """Note that the chunks of a departing session have run."""
        departure = self.departures[session]
        departure.finishing, departure.ask_at = False, now + ASK_SECONDS

    def settle(self, session: str, ticket: str, state: TicketState) -> bool:
        """End a departure with a known outcome; false without a departure with this ticket, or for a state that leaves it open."""
        departure = self.departures.get(session)
        if departure is None or departure.ticket != ticket or state in (TicketState.PENDING, TicketState.UNREACHABLE):
            return False
        del self.departures[session]
        if state is not TicketState.ABANDONED:
            self._holders[session] = departure.taker
            self._holders.move_to_end(session)
            if len(self._holders) > MAX_TICKETS:
                self._holders.popitem(last=False)
        return True

    def closed(self, session: str) -> None:
        """Drop the departure of a session that has ended here."""
        self.departures.pop(session, None)

    # Time.

    def late_claims(self, now: float) -> list[str]:
        """Return the sessions whose claims are too old."""
        return [session for session, claim in self.claims.items() if claim.until <= now]

    def to_ask(self, now: float) -> list[str]:
        """Return the sessions whose takers must be asked now, and schedule the next question."""
        due = [name for name, departure in self.departures.items() if not departure.finishing and departure.ask_at <= now]
        for name in due:
            self.departures[name].ask_at = now + ASK_SECONDS
        return due
