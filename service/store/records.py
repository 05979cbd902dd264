"""What a store keeps of each session, and what it promises. A store is a folder or a Redis server that all replicas share.

A record names the owner of its session, a replica, and has the number of this ownership. Every change is atomic and compares that number
first, so a session has one saved history, and a change that comes late is refused. Each replica renews one lease; the sessions of a replica
whose lease has ended may be taken over. A replica that needs a session of a living owner leaves a mark in the owner's inbox, and the owner
saves the session and lets go of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple, Protocol

from service.ipc.messages.store import DropSession, ReleaseSession, SaveSession, TakeOutcome, TakeSession

FORMAT_VERSION = 1
"""Version of the saved records. A replica reads this version and earlier ones, and leaves records of later versions alone."""
LEASE_SECONDS = 2.0
RENEW_SECONDS = 0.4
INBOX_WAIT_SECONDS = 1.0
"""How long a call waits for notes at most."""
DIGEST_BYTES = 16
"""Size of the digest of a session's name, which may have characters that a file name cannot have."""
FORGOTTEN = "-"
"""Value of `ended` for a session that ended with its client's knowledge. The record stays for FORGOTTEN_SECONDS: a late save is refused."""
FORGOTTEN_SECONDS = 300.0


class StoreFailed(Exception):
    """The store does not answer, or cannot be written."""


@contextmanager
def failing(*errors: type[Exception]) -> Iterator[None]:
    """Raise StoreFailed instead of errors of the store."""
    try:
        yield
    except errors as error:
        raise StoreFailed(str(error)) from None


class Change(NamedTuple):
    """A change of one record. state: the session file of a SaveSession."""

    message: TakeSession | SaveSession | ReleaseSession | DropSession
    state: bytes = b""


class TakenSession(NamedTuple):
    """The outcome of a TakeSession. begun, exact, state: of the state that was saved last. ended: why the session ended."""

    outcome: TakeOutcome
    begun: int = 0
    exact: bool = False
    ended: str = ""
    state: bytes = b""


class NoteKind(StrEnum):
    """WANTED: another replica needs the session. RELEASED: the session that this replica waits for is free.

    SEIZED: another replica took over a session of this replica, because its lease had ended or the store was away.
    """

    WANTED = "w"
    RELEASED = "r"
    SEIZED = "s"


class Note(NamedTuple):
    """An entry of a replica's inbox."""

    kind: NoteKind
    session: str


Result = TakenSession | bool | StoreFailed
"""Of a change: TakenSession for a TakeSession, otherwise whether its ownership had not ended. StoreFailed: it may have been made."""


class Store(Protocol):
    """Keeps the records. The functions block, and may be called by several threads."""

    def apply(self, changes: Sequence[Change], *, may_seize: bool) -> list[Result]:
        """Make changes in their order. may_seize: whether sessions of replicas without a lease are taken over."""

    def renew(self) -> bool:
        """Renew the lease of this replica. Returns whether it had not ended. Raises StoreFailed."""

    def read_inbox(self, seconds: float) -> list[Note]:
        """Remove and return the notes for this replica, after waiting for the first for up to `seconds`. Raises StoreFailed."""

    def sweep(self) -> None:
        """Remove what is too old. Raises StoreFailed."""

    def end(self) -> None:
        """End the lease of this replica. Raises StoreFailed."""


def digest(session: str) -> str:
    """Return the name of a session's record."""
    return blake2b(session.encode(), digest_size=DIGEST_BYTES).hexdigest()
